"""A path -> Contents: which file or folder it is, recognized by its content, not by its name.

Files: safetensors, both formats of `torch.save`. Folders whose files belong together: a sharded Hugging Face model, a
distributed checkpoint, a checkpoint of ours with its manifest. Everything else in a folder is one file, one Contents.
Never runs what a file says, never follows it out of its folder, never opens anything but plain files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steadygrad.disk import manifest
from steadygrad.disk.manifest import MODEL, MODEL_FILE, SET_ASIDE
from steadygrad.errors import CheckpointError, DamagedCheckpoint
from steadygrad.scan.readers.checks import resolve_inside
from steadygrad.scan.readers.distributed import METADATA, read_distributed
from steadygrad.scan.readers.safetensors import looks_like_safetensors, read_safetensors
from steadygrad.scan.readers.torch import read_torch
from steadygrad.scan.stored import Contents, StoredTensor

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pth.tar")
INDEX_SUFFIX = ".index.json"
NO_TENSORS = ("training_args.bin",)
"""transformers pickles its settings into it; there is nothing to scan, and no safe way to read it."""
MAX_DEPTH = 4
MAX_INDEX_BYTES = 100_000_000


def find_checkpoints(path: Path) -> list[Path]:
    """Return what `read_contents` takes, at `path` or in folders below it; of a run directory its checkpoints only."""
    if not _is_folder(path):
        return [path]
    found = list(_search(path, 0))
    if not found:
        raise CheckpointError(
            f"{path} holds no checkpoint: no file with {', '.join(SUFFIXES[:5])}, no {METADATA} and no folder with one "
            f"within {MAX_DEPTH} levels. Give the checkpoint itself."
        )
    return found


def read_contents(path: Path) -> Contents:
    """Describe a checkpoint without reading one of its elements."""
    if not _is_folder(path):
        return _read_file(path)
    if (path / METADATA).is_file():
        return read_distributed(path)
    if _is_own(path):
        return _read_own(path)
    indexes = _list_indexes(path)
    if indexes:
        return _read_sharded(path, indexes[0])
    files = [file for file in _list_files(path) if file.name not in NO_TENSORS]
    if len(files) == 1:
        return _read_file(files[0])
    raise CheckpointError(
        f"{path} holds {len(files)} candidates: {', '.join(file.name for file in files[:5])}. Name one."
        if files
        else f"{path} holds no checkpoint. Give a file, or a folder with one in it."
    )


def read_tensors(path: Path) -> list[StoredTensor]:
    """Return every tensor at `path`; where several checkpoints lie there, under the name of its file and its own."""
    found = find_checkpoints(path)
    if len(found) == 1:
        return list(read_contents(found[0]).tensors)
    return [
        tensor.renamed(f"{source.relative_to(path)}:{tensor.name}")
        for source in found
        for tensor in read_contents(source).tensors
    ]


def _is_folder(path: Path) -> bool:
    """Whether it is a folder or a plain file; a path that leads to neither is an error that says why."""
    try:
        # Asked before anything is opened: opening a pipe waits for a writer
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # also a circle of links, and a name with a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}. Check the path and its permissions.") from None
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file: a pipe or device never ends. Give a file or a folder.")
    return stat.S_ISDIR(mode)


def _is_own(folder: Path) -> bool:
    """Whether a manifest of ours lies in it, damaged or not; another program's manifest.json says something else."""
    path = folder / manifest.NAME
    if not path.is_file():
        return False
    try:
        fields = json.loads(path.read_bytes()) if path.stat().st_size < manifest.MAX_BYTES else None  # bounded memory
    except (OSError, ValueError, RecursionError):
        # Ours, if it cannot be read: to pass it over would hide the damage
        return True
    return not isinstance(fields, dict) or "manifest_sha256" in fields or fields.get("format") == manifest.FORMAT


def _read_file(path: Path) -> Contents:
    try:
        with path.open("rb") as file:
            if looks_like_safetensors(file.read(16)) or path.suffix == ".safetensors":
                return read_safetensors(path, file)
            return read_torch(path, file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {reason}. Check its permissions and its disk.") from None


def _list_files(folder: Path) -> list[Path]:
    return [path for path in _list(folder) if path.name.endswith(SUFFIXES) and path.is_file()]


def _list_indexes(folder: Path) -> list[Path]:
    return [path for path in _list(folder) if path.name.endswith(INDEX_SUFFIX) and path.is_file()]


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(Path(folder, name) for name in os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}. Check its permissions.") from None


def _search(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / METADATA).is_file() or _is_own(folder):
        yield folder
        return
    if (folder / "run.json").is_file():
        if (folder / "checkpoints").is_dir():  # and never batches/, which holds what was bad, on purpose
            yield from _search(folder / "checkpoints", depth + 1)
        return
    shards = set()
    for index in _list_indexes(folder):
        yield folder
        shards |= {resolve_inside(folder, file) for file in _read_index(index).values()}
        # One index only: `read_contents` takes the first, too
        break
    files = [file for file in _list_files(folder) if file not in shards and file.name not in NO_TENSORS]
    yield from files
    if depth < MAX_DEPTH:
        for path in _list(folder):
            # No links, which may form a cycle; no `.writing-` and `.removing-` folders of a store
            if path.is_dir() and not path.is_symlink() and not path.name.startswith((".", SET_ASIDE)):
                yield from _search(path, depth + 1)


def _read_sharded(folder: Path, index: Path) -> Contents:
    """Return all shards that the index names, as one; what index and shards say must agree."""
    named = _read_index(index)
    tensors: list[StoredTensor] = []
    problems: list[str] = []
    for file in sorted(set(named.values())):
        path = resolve_inside(folder, file)
        if not path.is_file():
            problems.append(f"{file} is named in {index.name} and not there")
            continue
        held = _read_file(path).tensors
        missing = {name for name, where in named.items() if where == file} - {tensor.name for tensor in held}
        problems += [f"{name} is not in {file}, where {index.name} puts it" for name in sorted(missing)]
        tensors += held
    return Contents(folder, "Hugging Face shards", tuple(tensors), problems=tuple(problems))


def _read_index(index: Path) -> dict[str, str]:
    """Return tensor -> file."""
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise DamagedCheckpoint(index, "it is too large to be an index")
        named: Any = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(index, f"it is not an index of shards ({type(error).__name__})") from None
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}. Check its permissions.") from None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise DamagedCheckpoint(index, "its weight_map is not a table of names and files")
    return named


def _read_own(folder: Path) -> Contents:
    """Return a checkpoint of ours: weights under `model.`, everything else as the state names it."""
    tensors: list[StoredTensor] = []
    numbers: list[tuple[str, float]] = []
    allowed: frozenset[str] = frozenset()
    for path in _list_files(folder):
        part = _read_file(path)
        prefix = f"{MODEL}." if path.name == MODEL_FILE else ""
        tensors += [tensor.renamed(prefix + tensor.name.removeprefix("odd.")) for tensor in part.tensors]
        numbers += [(name.removeprefix("tree."), value) for name, value in part.numbers]
        allowed |= part.may_be_nonfinite
    return Contents(
        path=folder,
        format="steadygrad checkpoint",
        tensors=tuple(tensors),
        numbers=tuple(numbers),
        may_be_nonfinite=allowed,
        manifest=folder / manifest.NAME,
    )
