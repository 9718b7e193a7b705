"""Tensors that all ranks share <-> files of torch.distributed.checkpoint, without running any foreign code.

Each rank writes its own parts, a tensor that is equal on all ranks is written once, and reading reassembles the parts
for any number of ranks. torch reads its table of parts (`.metadata`) with a pickle that can run arbitrary code; here
only torch's own record classes are allowed. Values that are not tensors are never written this way.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from steadygrad.errors import DamagedCheckpoint, UnsafePickleError
from steadygrad.state.muted_warnings import warnings_muted

METADATA = ".metadata"
KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},  # where it was written
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
"""The record classes of a table of parts; each merely holds numbers and names."""


def write_tensors(tensors: Mapping[str, Tensor], folder: Path, *, group: Any) -> None:
    """Write this rank's parts; every rank of the group must call it. A failure on one rank fails on all."""
    with warnings_muted():
        save(dict(tensors), storage_writer=FileSystemWriter(str(folder), sync_files=True), process_group=group)


def read_tensors(folder: Path, make_room: Callable[[str, Any], Tensor], *, group: Any) -> dict[str, Tensor]:
    """Read all tensors, each into `make_room(name, record)`: a DTensor receives its part, any other the whole."""
    table = read_table(folder)
    tensors = {name: make_room(name, record) for name, record in table.state_dict_metadata.items()}
    # torch warns that it reads in a single process, which is intended without a group
    with warnings_muted():
        load(tensors, storage_reader=_Reader(folder, table), process_group=group, no_dist=group is None)
    return tensors


def read_table(folder: Path) -> Metadata:
    """Read the table that maps parts of files to tensors."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            table = _Unpickler(file, path).load()
    # Before the broad one: an attack must not be reported as damage
    except UnsafePickleError:
        raise
    # Broad: a corrupt pickle can raise anything
    except Exception as error:
        raise DamagedCheckpoint(folder, f"{METADATA} cannot be read: {error}") from error
    if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
        raise DamagedCheckpoint(folder, f"{METADATA} is not a table of parts")
    odd = [name for name, record in table.state_dict_metadata.items() if not isinstance(record, TensorStorageMetadata)]
    if odd:
        raise DamagedCheckpoint(folder, f"{odd[0]!r} is not a tensor, and reading it would run code")
    outside = [
        info.relative_path
        for info in table.storage_data.values()
        # A path with folders in it, or `..`, would make torch read any file of this machine
        if Path(info.relative_path).name != info.relative_path
    ]
    if outside:
        raise DamagedCheckpoint(folder, f"{outside[0]!r} is not a file beside it")
    return table


class _Unpickler(pickle.Unpickler):
    """Allows the record classes of a table of parts, and nothing else."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    # The only place where a pickle obtains something to call
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in KNOWN.get(module, ()):
            raise UnsafePickleError(self._path, [f"{module}.{name}"])
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """torch's reader with a table that was read safely."""

    def __init__(self, folder: Path, table: Metadata) -> None:
        super().__init__(str(folder))
        self._table = table

    # torch's own unpickles `.metadata` without restrictions
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._table
