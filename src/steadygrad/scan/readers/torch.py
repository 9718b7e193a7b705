"""A file of `torch.save` -> Contents, without torch.load: the pickle in it is read inertly, the bytes not at all.

Both formats: the archive (a zip whose records are stored, never compressed) and the older stream of pickles followed
by storages. What neither of them is, is an error that says what it is.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from steadygrad.errors import DamagedCheckpoint, NoCheckpoint, UnsupportedError
from steadygrad.scan.inert import Storage
from steadygrad.scan.readers.pickle import (
    KINDS,
    Place,
    describe_left_out,
    describe_tensors,
    interpret,
    make_storage,
)
from steadygrad.scan.stored import Contents

MAX_PICKLE_BYTES = 512 << 20
"""A pickle describes tensors and does not hold them: those of the largest optimizers have some ten megabytes."""
ALLOWED = "may_be_nonfinite"
"""Where a checkpoint of ours lists the tensors that were not finite before training, such as masks."""
FIRST_BYTES = 8 << 20
"""Of the older format, where the pickle's length is not known before it is read."""
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER


@dataclasses.dataclass(frozen=True, slots=True)
class OpenPickle:
    """The pickle of a file, read inertly, and where its storages are."""

    format: str
    value: Any
    left_out: tuple[str, ...]
    place: Place
    archive: tuple[int, int] | None = None
    """Where the archive begins in its file, and its size."""


def open_pickle(path: Path, file: BinaryIO) -> OpenPickle:
    """Return what a file of `torch.save` describes; `file` is open and at any place."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if file.read(4) == b"PK\x03\x04":
        return _open_archive(path, file, size, 0)
    return _open_stream(path, file, size)


def read_torch(path: Path, file: BinaryIO, name: str = "") -> Contents:
    """Return the tensors of a file of `torch.save`; `name` stands before every tensor's."""
    opened = open_pickle(path, file)
    return _describe(path, opened, file.seek(0, io.SEEK_END), name)


def read_archive(path: Path, file: BinaryIO, size: int, *, start: int = 0, name: str = "") -> Contents:
    """Return the tensors of an archive. `start`: where it begins in `path`, when `file` is only a part of that."""
    return _describe(path, _open_archive(path, file, size, start), size, name)


def _describe(path: Path, opened: OpenPickle, size: int, name: str) -> Contents:
    contents = describe_tensors(path, opened.format, opened.value, opened.place, size, name)
    tensors = tuple(dataclasses.replace(tensor, archive=opened.archive) for tensor in contents.tensors)
    texts = opened.value.get(ALLOWED) if isinstance(opened.value, dict) and opened.archive is not None else None
    allowed = frozenset(text for text in texts if isinstance(text, str)) if isinstance(texts, list) else frozenset()
    notes = describe_left_out(opened.left_out)
    return dataclasses.replace(contents, tensors=tensors, may_be_nonfinite=allowed, notes=notes)


def _open_archive(path: Path, file: BinaryIO, size: int, start: int) -> OpenPickle:
    records = _list_records(path, file)
    if any(record.startswith("code/") for record in records):
        raise UnsupportedError(
            f"{path} is a TorchScript program, not a checkpoint: loading it runs it. Save its state_dict() instead."
        )
    if "data.pkl" not in records:
        raise DamagedCheckpoint(path, "it is a zip archive without data.pkl, which torch.save always writes")
    if "byteorder" in records and _read_record(path, file, records["byteorder"], size) == b"big":
        raise _wrong_order(path)
    pickle = interpret(path, io.BytesIO(_read_record(path, file, records["data.pkl"], size)))

    def place(storage: Storage) -> tuple[int, int]:
        record = records.get(f"data/{storage.key}")
        if record is None:
            raise DamagedCheckpoint(path, f"storage {storage.key!r} is referenced but missing")
        return start + find_data(path, file, record, size), record.file_size

    return OpenPickle("torch archive", pickle.value, tuple(pickle.left_out), place, (start, size))


def _list_records(path: Path, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """Return the records of the archive by name, without the folder that all of them are in."""
    try:
        entries = zipfile.ZipFile(file).infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error) as error:
        raise DamagedCheckpoint(path, f"its table of contents cannot be read: {error}") from None
    records: dict[str, zipfile.ZipInfo] = {}
    for entry in entries:
        short = entry.filename.partition("/")[2] or entry.filename
        # A reader that takes the first and one that takes the last would see different files
        if short in records:
            raise DamagedCheckpoint(path, f"it has two records named {short!r}")
        records[short] = entry
    return records


def find_data(path: Path, file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> int:
    """Return where the bytes of a record begin. Only stored ones: a compressed one can grow without end."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise UnsupportedError(
            f"{path}: record {entry.filename!r} is compressed or encrypted, which torch.save never does. "
            "Load it where you trust it and save it again."
        )
    file.seek(max(0, entry.header_offset))
    header = file.read(30)
    if entry.header_offset < 0 or len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise DamagedCheckpoint(path, f"record {entry.filename!r} does not begin where the table of contents says")
    # From the header in front of the data: torch pads its extra field for alignment, which the table of contents
    # does not show
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    begin: int = entry.header_offset + 30 + name_length + extra_length
    if begin + entry.file_size > size:
        raise DamagedCheckpoint(path, f"record {entry.filename!r} reaches past the end of the file")
    return begin


def _read_record(path: Path, file: BinaryIO, entry: zipfile.ZipInfo, size: int) -> bytes:
    begin = find_data(path, file, entry, size)
    if entry.file_size > MAX_PICKLE_BYTES:  # before it is read into memory
        raise DamagedCheckpoint(
            path, f"record {entry.filename!r} has {entry.file_size} bytes, the most read is {MAX_PICKLE_BYTES}"
        )
    file.seek(begin)
    return file.read(entry.file_size)


# --- the older format: magic number, version, machine, pickle, keys, then the storages one after the other --------


def _open_stream(path: Path, file: BinaryIO, size: int) -> OpenPickle:
    file.seek(0)
    head = file.read(FIRST_BYTES)
    _check_is_pickle(path, head)
    try:
        pickles, position, storages, left_out = _read_pickles(path, head)
    except DamagedCheckpoint:  # cut off, perhaps only by the length of the head
        if size <= FIRST_BYTES:
            raise
        head += file.read(MAX_PICKLE_BYTES - FIRST_BYTES)
        pickles, position, storages, left_out = _read_pickles(path, head)
    if isinstance(pickles[2], dict) and pickles[2].get("little_endian") is False:
        raise _wrong_order(path)
    places = _place_stream(path, file, position, size, pickles[4], storages)
    return OpenPickle("torch stream", pickles[3], tuple(left_out), lambda storage: places[storage.key])


def _read_pickles(path: Path, head: bytes) -> tuple[list[Any], int, dict[str, Storage], list[str]]:
    stream, storages, values, left_out = io.BytesIO(head), dict[str, Storage](), list[Any](), list[str]()

    def persist(identity: Any) -> Storage:
        storage = make_storage(identity)
        return storages.setdefault(storage.key, storage)

    for _ in range(5):
        pickle = interpret(path, stream, persist)
        values.append(pickle.value)
        left_out += pickle.left_out
        if values[0] != LEGACY_MAGIC:
            raise UnsupportedError(
                f"{path} is a pickle that torch.save did not write, so nothing in it can be looked at safely. "
                "Load it where you trust it and save its tensors with safetensors."
            )
    return values, stream.tell(), storages, left_out


def _check_is_pickle(path: Path, head: bytes) -> None:
    if not head:
        raise DamagedCheckpoint(path, "it is empty: the program that wrote it was stopped")
    if head[:1] != b"\x80":  # the PROTO opcode, which begins every pickle since protocol 2
        raise NoCheckpoint(path, f"it begins with {head[:8]!r}, as neither torch.save nor safetensors does")


def _place_stream(
    path: Path, file: BinaryIO, position: int, size: int, keys: Any, storages: dict[str, Storage]
) -> dict[str, tuple[int, int]]:
    if not isinstance(keys, list):
        raise DamagedCheckpoint(path, "the list of storages is not a list")
    places = {}
    for key in keys:
        storage = storages.get(str(key))
        file.seek(position)
        head = file.read(8)
        if storage is None or len(head) < 8:
            raise DamagedCheckpoint(path, f"storage {key!r} is cut off or named by no tensor")
        # Each storage is preceded by its number of elements; the file's own number, so it is checked below
        num_bytes = struct.unpack("<q", head)[0] * (KINDS[storage.kind].itemsize if storage.kind else 1)
        if num_bytes < 0 or position + 8 + num_bytes > size:
            raise DamagedCheckpoint(path, f"storage {key!r} reaches past the end of the file")
        places[storage.key] = (position + 8, num_bytes)
        position += 8 + num_bytes
    missing = set(storages) - set(places)
    if missing:
        raise DamagedCheckpoint(path, f"storage {min(missing)!r} is referenced but missing")
    return places


def _wrong_order(path: Path) -> UnsupportedError:
    return UnsupportedError(f"{path} was written on a big-endian machine. Save it again on a little-endian one.")
