"""A folder of torch.distributed.checkpoint -> Contents: its `.metadata` says which part of which file is which tensor.

torch itself reads `.metadata` with a pickle that runs whatever the file asks for; here it is read inertly, and only
the names of torch's own records are known. Every part is its own archive inside a larger file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steadygrad.errors import DamagedCheckpoint, UnsafePickleError, UnsupportedError
from steadygrad.scan.inert import BrokenPickle, Call, read_pickle
from steadygrad.scan.readers.checks import resolve_inside
from steadygrad.scan.readers.pickle import MAX_NAMES, is_plain_name
from steadygrad.scan.readers.torch import read_archive
from steadygrad.scan.stored import Contents, StoredTensor

METADATA = ".metadata"
MAX_METADATA_BYTES = 512 << 20
OWN = "torch.distributed.checkpoint."


class Window(io.RawIOBase):
    """A part of an open file as its own file; closing it leaves the other open."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._position)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._position)
        data: bytes = self._file.read(count)
        self._position += len(data)
        return data


def read_distributed(folder: Path) -> Contents:
    """Return the tensors of all parts. A tensor in several parts is several, named by where in it they begin."""
    tensors: list[StoredTensor] = []
    numbers: list[tuple[str, float]] = []
    problems: list[str] = []
    for name, path, start, length in _list_parts(folder):
        if not path.is_file():
            problems.append(f"{path.name} is named in {METADATA} and not there")
            continue
        with path.open("rb") as file:
            # Before it is opened as an archive, whose table of contents is at its end
            if start + length > path.stat().st_size:
                raise DamagedCheckpoint(path, f"{name!r} would end at byte {start + length}, past its end")
            part = read_archive(path, Window(file, start, length), length, start=start, name=name)  # type: ignore[arg-type]
        tensors += part.tensors
        numbers += part.numbers
    return Contents(folder, "distributed checkpoint", tuple(tensors), tuple(numbers), tuple(dict.fromkeys(problems)))


def _list_parts(folder: Path) -> Iterator[tuple[str, Path, int, int]]:
    """Yield (name, file, first byte, length) of every part."""
    records = _field(_read_metadata(folder), "storage_data")
    if not isinstance(records, dict):
        raise DamagedCheckpoint(folder / METADATA, "it has no table of parts")
    counts: dict[str, int] = {}
    for index in records:
        counts[str(_field(index, "fqn"))] = counts.get(str(_field(index, "fqn")), 0) + 1
    for index, place in records.items():
        name, first = str(_field(index, "fqn")), _field(index, "offset")
        relative, start, length = (_field(place, field) for field in ("relative_path", "offset", "length"))
        if not isinstance(relative, str) or type(start) is not int or type(length) is not int or min(start, length) < 0:
            raise DamagedCheckpoint(folder / METADATA, f"the place of {name!r} makes no sense")
        if _field(place, "transform_descriptors"):
            raise UnsupportedError(f"{folder}: {name!r} is compressed. Save it without extensions to have it scanned.")
        path = resolve_inside(folder, relative)
        yield f"{name}@{','.join(map(str, first or ()))}" if counts[name] > 1 else name, path, start, length


def _read_metadata(folder: Path) -> Any:
    with (folder / METADATA).open("rb") as file:
        data = file.read(MAX_METADATA_BYTES + 1)  # one more, to see that it is too long
    if len(data) > MAX_METADATA_BYTES:
        raise DamagedCheckpoint(folder / METADATA, f"it has more than {MAX_METADATA_BYTES} bytes")
    try:
        pickle = read_pickle(
            io.BytesIO(data), lambda name: name.startswith(OWN) or is_plain_name(name), _refuse_storage
        )
    except BrokenPickle as error:
        raise DamagedCheckpoint(folder / METADATA, str(error)) from None
    if pickle.wanted:
        raise UnsafePickleError(folder / METADATA, pickle.wanted[:MAX_NAMES])
    return pickle.value


def _refuse_storage(_: Any) -> Any:
    raise BrokenPickle("a storage, where only places of storages belong")


def _field(record: Any, name: str) -> Any:
    state = record.state if isinstance(record, Call) else None
    return state.get(name) if isinstance(state, dict) else None
