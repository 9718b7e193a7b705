"""Tail: a file of JSON lines that may still be growing -> the objects of its complete lines, each once.

Reads from where it stopped. A last line without its end is left for the next time; `finish()` takes it when it is whole
after all. A line that is no JSON object is counted and left out. It never writes, waits or follows anything but a
plain file.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 18
"""Few enough lines that what they become stays in the cache."""
MAX_LINE_BYTES = 64 << 20
"""A longer line is none of ours."""

Row = dict[str, Any]


class Tail:
    """Reads a file bit by bit; `within` is a folder that its real path must not leave."""

    def __init__(self, path: Path, *, within: Path | None = None) -> None:
        self.path, self._within = path, within
        self._offset, self._inode = 0, -1
        self.num_bad = 0
        """Lines that were no JSON object."""
        self.num_restarts = 0
        """How often the file was found replaced or cut: what was read before no longer holds."""

    def read(self) -> list[Row]:
        """The objects of the next few megabytes of complete lines; empty when there is nothing new."""
        size = self._look()
        if size <= self._offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            chunk = file.read(CHUNK_BYTES)
            end = chunk.rfind(b"\n") + 1
            if end == 0 and len(chunk) == CHUNK_BYTES:
                chunk += file.readline(MAX_LINE_BYTES)
                end = len(chunk) if chunk.endswith(b"\n") or len(chunk) > MAX_LINE_BYTES else 0
        self._offset += end
        return self._parse(chunk[:end])

    def finish(self) -> list[Row]:
        """The last line, when it is a whole object without its line end; counted as bad when it is cut short."""
        if self.num_unread_bytes == 0:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            rest = file.read(MAX_LINE_BYTES)
        self._offset += len(rest)
        return self._parse(rest)

    @property
    def exists(self) -> bool:
        """Whether there is a file to read."""
        return self._stat() is not None

    @property
    def num_bytes(self) -> int:
        """Its size now."""
        found = self._stat()
        return 0 if found is None else found.st_size

    @property
    def num_unread_bytes(self) -> int:
        """Bytes behind what was read, half a line included."""
        return max(0, self.num_bytes - self._offset)

    def _look(self) -> int:
        """The file's size; what was read is forgotten when it is another file, or a shorter one."""
        found = self._stat()
        if found is None:
            return 0
        if self._offset > found.st_size or (self._offset and found.st_ino != self._inode):
            self._offset = self.num_bad = 0
            self.num_restarts += 1
        self._inode = found.st_ino
        return found.st_size

    def _stat(self) -> os.stat_result | None:
        try:
            found = self.path.stat()
        except (OSError, ValueError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        if self._within is not None and not self.path.resolve().is_relative_to(self._within):
            return None
        return found

    def _parse(self, text: bytes) -> list[Row]:
        lines = [line for line in text.split(b"\n") if line and not line.isspace()]
        rows = _parse_together(lines)
        if rows is None:
            rows = [row for line in lines if (row := _parse_one(line)) is not None]
        self.num_bad += len(lines) - len(rows)
        return rows


def _parse_together(lines: list[bytes]) -> list[Row] | None:
    """All lines as one list: a third faster than one by one. None when any of them is not an object."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    whole = len(rows) == len(lines) and all(type(row) is dict for row in rows)
    return rows if whole else None


def _parse_one(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if type(row) is dict else None


def as_number(value: object) -> float | None:
    """A number, or a number as the record spells one that is not finite; None for anything else."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value) if abs(value) < 1 << 1000 else None
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None
