"""Bytes in memory -> a checkpoint folder on disk that is either complete or absent.

Everything is written into a folder of another name, each file fsynced, the manifest last; then the folder is renamed
and its parent fsynced. A process that dies at any moment leaves either no new name or a complete checkpoint. Hashes are
computed from memory, in parallel with the writing, so that what is on disk can be checked against them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from steadygrad.disk.direct import write_all
from steadygrad.disk.manifest import NAME, FileEntry, Manifest, hash_piece, run_soon, start_pool

WRITING, REMOVING = ".writing-", ".removing-"
"""Prefixes of folders that are not checkpoints: one being written, one being removed."""

Pieces = Iterable[bytes | memoryview]


def write_folder(
    target: Path, files: Mapping[str, Pieces], describe: Callable[[dict[str, FileEntry]], Manifest]
) -> None:
    """Write `files` and their manifest under the name `target`, which must not exist. Raise OSError on failure."""
    aside = target.with_name(f"{WRITING}{os.getpid()}-{target.name}")
    remove_folder(aside)  # of an earlier process with the same id, as in containers
    try:
        aside.mkdir()
        with start_pool() as pool:
            entries = {name: _write_file(aside / name, pieces, pool) for name, pieces in files.items()}
        # This order survives a power cut: files, then the manifest, then their names, then the folder's own name.
        _write_file(aside / NAME, [describe(entries).render()], None)
        sync_folder(aside)
        aside.rename(target)
        sync_folder(target.parent)
    # Not only OSError: a save that Ctrl-C ends must not leave gigabytes behind either.
    except BaseException:
        with contextlib.suppress(OSError):
            remove_folder(aside)  # give a full disk its space back
        raise


def _write_file(path: Path, pieces: Pieces, pool: ThreadPoolExecutor | None) -> FileEntry:
    """Write and fsync one file; return its size and the hashes of its pieces."""
    with path.open("xb", buffering=0) as file:  # unbuffered: pieces are written from where they are staged
        hashes = []
        num_bytes = 0
        for piece in pieces:
            if pool is not None:
                # Started before the write, so that hashing and writing overlap.
                hashes.append(run_soon(pool, hash_piece, piece))
            num_bytes += write_all(file.fileno(), memoryview(piece))
        # Before the rename: some file systems put a new name on disk ahead of the data that it stands for.
        os.fsync(file.fileno())
    return FileEntry(num_bytes, tuple(take() for take in hashes))


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file so that readers see its old or its new contents, never a mix. Not fsynced."""
    # In the same folder: a rename is atomic only within one file system.
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(data)
    aside.replace(path)


def sync_folder(folder: Path) -> None:
    """Make the names in it survive a power cut, where the system can guarantee that."""
    if sys.platform == "win32":  # a folder cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a folder, renaming it first so that a half-removed checkpoint is never mistaken for a complete one."""
    if not folder.is_dir():
        return
    if not folder.name.startswith("."):
        hidden = folder.with_name(f"{REMOVING}{os.getpid()}-{folder.name}")
        if hidden.exists():
            shutil.rmtree(hidden)
        folder = folder.rename(hidden)
    shutil.rmtree(folder)


def remove_leftovers(parent: Path) -> None:
    """Remove what dead processes left half-written or half-removed."""
    for folder in parent.iterdir():
        prefix = next((p for p in (WRITING, REMOVING) if folder.name.startswith(p)), None)
        if prefix is None:
            continue
        owner = folder.name.removeprefix(prefix).partition("-")[0]
        # Our own id counts as dead: the store calls this before its first save, so the folder is of an earlier process.
        if not owner.isdigit() or int(owner) == os.getpid() or not is_alive(int(owner)):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def is_alive(process: int) -> bool:
    """Whether a process with this id exists on this machine, under any user."""
    if sys.platform == "win32":  # signal 0 is Ctrl+C there; better to leave a dead process's files than to send it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # EPERM: it exists and belongs to another user
        return True
    return True
