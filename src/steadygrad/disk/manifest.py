"""Manifest: the files of one checkpoint -> sizes and hashes that prove them whole. Knows no torch.

`manifest.json` is written last, so a folder without one was never finished. Each file is hashed in pieces of
`PIECE_BYTES`, from its first byte on: pieces are hashed in parallel, and a bad one shows where the damage is. The
manifest proves itself too: its bytes must be exactly what its own contents are written as, hash included. Reading one
never trusts it: names stay inside the folder, and everything that does not fit is a DamagedCheckpoint with a reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from steadygrad.disk.direct import read_at
from steadygrad.errors import DamagedCheckpoint, NoCheckpoint

T = TypeVar("T")
NAME = "manifest.json"
MODEL, STATE = "model", "state"
"""The two files of tensors: weights under their own names, and everything else."""
MODEL_FILE, STATE_FILE, PLAIN_FILE = "model.safetensors", "state.safetensors", "state.pt"
FILES = {MODEL: MODEL_FILE, STATE: STATE_FILE}
SET_ASIDE = "set_aside"
"""Folder for checkpoints that could not be used, each with a reason.txt."""
FORMAT = "steadygrad-checkpoint"
VERSION = 1
PIECE_BYTES = 16 << 20
"""Large enough that starting a hash costs nothing, small enough that a 100 MB file keeps eight cores busy."""
MAX_BYTES = 64 << 20
"""Size limit of a manifest; that of a 10 TB checkpoint is smaller."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: its size, and the CRC-32 of each of its pieces."""

    num_bytes: int
    crc32: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint contains, with the size and hashes of each file."""

    step: int
    serial: int
    """Serial number of the save in its folder: a run that rolled back or restarted saves earlier steps later."""
    created: str
    files: Mapping[str, FileEntry]
    metrics: Mapping[str, float] = field(default_factory=dict)
    cleaned: Mapping[str, int] = field(default_factory=dict)
    """Tensor -> elements that were not finite and were replaced."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Plain facts for people: versions, epoch."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.files.values())

    def render(self) -> bytes:
        """Return the bytes of manifest.json; the last field is the hash of all others."""
        fields = {"format": FORMAT, "version": VERSION, "piece_bytes": PIECE_BYTES, **asdict(self)}
        return _render(fields | {"manifest_sha256": hashlib.sha256(_render(fields)).hexdigest()})


def _render(fields: Mapping[str, Any]) -> bytes:
    # These very bytes are compared on reading: another indent or order makes every earlier checkpoint damaged.
    return (json.dumps(fields, indent=1, sort_keys=False, allow_nan=False) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder; raise DamagedCheckpoint with the reason if it cannot be trusted."""
    path = folder / NAME
    try:
        # Before reading: the file may be anything, and json needs many times its size in memory.
        if path.stat().st_size > MAX_BYTES:
            raise DamagedCheckpoint(folder, f"{NAME} is too large to be one")
        data = path.read_bytes()
    except FileNotFoundError:
        if not folder.exists():
            raise NoCheckpoint(folder, "nothing is there") from None
        raise DamagedCheckpoint(folder, f"it has no {NAME}, so it was never finished") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{NAME} cannot be read: {error.strerror or error}") from error
    try:
        manifest = _parse(json.loads(data))
        rendered = manifest.render()
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedCheckpoint(folder, f"{NAME} is damaged: {error!r}") from None
    # Proves the hash too, and refuses unknown fields and duplicate keys, which json.loads drops silently.
    if rendered != data:
        raise DamagedCheckpoint(folder, f"{NAME} does not have the contents that it was written with")
    return manifest


def _parse(fields: Any) -> Manifest:
    if fields["format"] != FORMAT or fields["version"] != VERSION or fields["piece_bytes"] != PIECE_BYTES:
        raise ValueError(f"format {fields['format']!r} version {fields['version']!r} is not known here")
    files = {}
    for name, entry in fields["files"].items():
        # A path in here would have files outside the folder opened, and reported as part of the checkpoint.
        if name != os.path.basename(name) or name in ("", ".", "..", NAME):
            raise ValueError(f"{name!r} is not the name of a file beside it")
        files[name] = FileEntry(int(entry["num_bytes"]), tuple(map(str, entry["crc32"])))
    return Manifest(
        step=int(fields["step"]),
        serial=int(fields["serial"]),
        created=str(fields["created"]),
        files=files,
        # json.loads accepts NaN, and rendering it raises; dropped here, it shows as contents that differ.
        metrics={str(k): v for k, v in fields["metrics"].items() if math.isfinite(v)},
        cleaned={str(k): int(v) for k, v in fields["cleaned"].items()},
        about=dict(fields["about"]),
    )


# --- hashes -------------------------------------------------------------------------------------------------------


def split_pieces(whole: memoryview) -> Iterator[memoryview]:
    """Yield views of `PIECE_BYTES` each; the last may be shorter."""
    for start in range(0, len(whole), PIECE_BYTES):
        yield whole[start : start + PIECE_BYTES]


def hash_piece(piece: bytes | memoryview) -> str:
    """Return the CRC-32 as text; releases the interpreter's lock, so that threads hash in parallel.

    It guards against disk and memory errors, and detects every single flipped bit. It is twice as fast as the disk,
    where sha256 would double the time of a save. Nothing in a checkpoint is executed, so a forger would gain nothing.
    """
    return f"{zlib.crc32(piece):08x}"


def start_pool() -> ThreadPoolExecutor:
    """Start the threads that hash; two cores are left for the training."""
    return ThreadPoolExecutor(max(2, min(8, (os.cpu_count() or 2) - 2)), thread_name_prefix="steadygrad-hash")


def check_files(folder: Path, manifest: Manifest, *, written_now: bool = False) -> None:
    """Compare every file of the folder with the manifest: sizes first, then hashes. DamagedCheckpoint says where.

    `written_now`: read from the disk itself, past the page cache.
    """
    for name, entry in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(folder, f"{name} cannot be read: {error.strerror or error}") from error
        if found != entry.num_bytes:
            raise DamagedCheckpoint(folder, f"{name} has {found} bytes, {entry.num_bytes} were written")
    # Sizes of all files come first: a truncated one is found without reading gigabytes of the others.
    with start_pool() as pool:
        for name, entry in manifest.files.items():
            try:
                hashes = hash_file(folder / name, pool, direct=written_now)
                _check_hashes(folder, name, hashes, entry.crc32)
            except OSError as error:
                raise DamagedCheckpoint(folder, f"{name} cannot be read: {error.strerror or error}") from error


def _check_hashes(folder: Path, name: str, found: Sequence[str], wanted: Sequence[str]) -> None:
    if len(found) != len(wanted):
        raise DamagedCheckpoint(folder, f"{name} has {len(found)} pieces, the manifest {len(wanted)}")
    for i, (one, other) in enumerate(zip(found, wanted)):
        if one != other:
            where = f"bytes {i * PIECE_BYTES} to {(i + 1) * PIECE_BYTES}"
            raise DamagedCheckpoint(folder, f"{name} is not what was written: the hash of {where} differs")


def hash_file(path: Path, pool: ThreadPoolExecutor, *, direct: bool = False) -> list[str]:
    """Hash each piece. Read, not mapped: a failing disk then raises OSError instead of killing the process."""
    read = read_at if direct else os.pread
    with path.open("rb") as file:
        descriptor = file.fileno()
        starts = range(0, os.fstat(descriptor).st_size, PIECE_BYTES)
        # All are taken before `with` closes the file: the number of a closed descriptor is soon another file's.
        waiting = [run_soon(pool, _hash_at, read, descriptor, start) for start in starts]
        return [take() for take in waiting]


def _hash_at(read: Callable[[int, int, int], bytes | memoryview], descriptor: int, start: int) -> str:
    return hash_piece(read(descriptor, PIECE_BYTES, start))


def run_soon(pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> Callable[[], T]:
    """Run it in the pool, or now if the interpreter is exiting and pools take no more work; return a result getter."""
    try:
        return pool.submit(call, *arguments).result
    except RuntimeError:
        value = call(*arguments)
        return lambda: value
