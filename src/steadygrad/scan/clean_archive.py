"""Checksums of a zip archive that fit its records again, after bytes of some were written over in place."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from steadygrad.scan.readers.distributed import Window
from steadygrad.scan.readers.torch import find_data

DIRECTORY_ENTRY = 46
"""Bytes of an entry of the table of contents before its name; its checksum is at 16, the lengths behind it at 28."""
BLOCK_BYTES = 1 << 20


def fix_checksums(path: Path, start: int, size: int, offsets: Sequence[int]) -> None:
    """Write the checksum of every record that one of `offsets` lies in; the archive begins at `start` of the file."""
    with path.open("r+b") as file:
        window = Window(file, start, size)
        with zipfile.ZipFile(window) as archive:
            entry_at = start + archive.start_dir
            for entry in archive.infolist():
                begin = start + find_data(path, window, entry, size)  # type: ignore[arg-type]
                if any(begin <= offset < begin + entry.file_size for offset in offsets):
                    _write_checksum(file, entry, entry_at, start + entry.header_offset, begin)
                file.seek(entry_at + 28)
                entry_at += DIRECTORY_ENTRY + sum(struct.unpack("<HHH", file.read(6)))


def _write_checksum(file: BinaryIO, entry: zipfile.ZipInfo, entry_at: int, header_at: int, begin: int) -> None:
    checksum = struct.pack("<I", _sum_up(file, begin, entry.file_size))
    end = begin + entry.file_size
    file.seek(end)
    described = entry.flag_bits & 8 and file.read(4) == b"PK\x07\x08"
    for place in (entry_at + 16, end + 4 if described else header_at + 14):
        file.seek(place)
        file.write(checksum)


def _sum_up(file: BinaryIO, begin: int, length: int) -> int:
    file.seek(begin)
    checksum = 0
    for position in range(0, length, BLOCK_BYTES):
        checksum = zlib.crc32(file.read(min(BLOCK_BYTES, length - position)), checksum)
    return checksum
