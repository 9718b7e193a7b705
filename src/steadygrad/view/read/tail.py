"""Tail: a file of JSON lines that may still be growing -> the objects of its complete lines, each once.

Reads on from where it stopped. A last line without a newline is left for the next time; `finish()` takes it if it is
complete after all. A line that is not a JSON object is counted and left out. It never writes or waits, and reads only
regular files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 18
"""Small enough that the parsed lines stay in the CPU cache."""
MAX_LINE_BYTES = 64 << 20
"""A longer line was not written by us."""

Row = dict[str, Any]
Quick = Callable[[bytes], Any]


class Tail:
    """Reads a file bit by bit; its real path must be inside the folder `within`."""

    def __init__(self, path: Path, *, within: Path | None = None, quick: Quick | None = None) -> None:
        """`quick` reads lines of a well-known form at once, and returns None for any others, which are read as JSON."""
        self.path, self._within, self._quick = path, within, quick
        self._offset, self._inode = 0, -1
        self.num_bad = 0
        """Number of lines that were not JSON objects."""
        self.problem = ""
        """Why it could not be read the last time; empty if it could."""
        self.num_restarts = 0
        """How often the file was found replaced or truncated: what was read before no longer holds."""

    @property
    def offset(self) -> int:
        """How many bytes have been read."""
        return self._offset

    def skip_to(self, offset: int) -> None:
        """Go on from the line that starts there, as if all before it had been read."""
        self._offset = offset
        found = self._stat()
        self._inode = self._inode if found is None else found.st_ino

    def read(self, end: int | None = None) -> Any:
        """Return the objects of the next complete lines, or what `quick` made of them; empty if nothing is new.

        Lines that begin at `end` or later are left alone.
        """
        size = self._look()
        if size <= self._offset:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(CHUNK_BYTES if end is None else max(0, min(CHUNK_BYTES, end - self._offset)))
                length = chunk.rfind(b"\n") + 1
                if length == 0 and len(chunk) == CHUNK_BYTES:
                    # A line longer than a chunk; beyond the limit it is taken in pieces, each of them a bad line, so
                    # that reading goes on
                    chunk += file.readline(MAX_LINE_BYTES)
                    length = len(chunk) if chunk.endswith(b"\n") or len(chunk) > MAX_LINE_BYTES else 0
        except OSError as error:
            return self._give_up(error)
        self.problem = ""
        self._offset += length  # only complete lines: half a line is read again when it has its end
        known = None if self._quick is None else self._quick(chunk[:length])
        return self._parse(chunk[:length]) if known is None else known

    def finish(self) -> list[Row]:
        """Return the last line if it is a complete object without a newline; count it as bad if it is truncated."""
        if self.num_unread_bytes == 0:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                rest = file.read(MAX_LINE_BYTES)
        except OSError as error:
            return self._give_up(error)
        self._offset += len(rest)
        return self._parse(rest)

    @property
    def exists(self) -> bool:
        """Whether there is a file to read."""
        return self._stat() is not None

    @property
    def num_bytes(self) -> int:
        """The file's current size."""
        found = self._stat()
        return 0 if found is None else found.st_size

    @property
    def num_unread_bytes(self) -> int:
        """Bytes not read yet, including an incomplete line."""
        return max(0, self.num_bytes - self._offset)

    def _look(self) -> int:
        """Return the file's size; start over if it was replaced, or is shorter now."""
        found = self._stat()
        if found is None:
            return 0
        # An atomic rewrite gives a new inode, a truncation a smaller size; one rewritten in place and longer is not
        # noticed
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
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for a writer
            return None
        if self._within is not None and not self.path.resolve().is_relative_to(self._within):
            return None
        return found

    def _give_up(self, error: OSError) -> list[Row]:
        self.problem = error.strerror or str(error)
        return []

    def _parse(self, text: bytes) -> list[Row]:
        lines = [line for line in text.split(b"\n") if line and not line.isspace()]
        rows = _parse_together(lines)
        if rows is None:
            rows = [row for line in lines if (row := parse_line(line)) is not None]
        self.num_bad += len(lines) - len(rows)
        return rows


def _parse_together(lines: list[bytes]) -> list[Row] | None:
    """Parse all lines as one list, a third faster than one by one; return None if any is not an object."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    # Two broken lines can make one valid object together: only as many objects as lines are believed
    whole = len(rows) == len(lines) and all(type(row) is dict for row in rows)
    return rows if whole else None


def parse_line(line: bytes) -> Row | None:
    """Return the object of one line; None if it is anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if type(row) is dict else None


def as_number(value: object) -> float | None:
    """Return a number, also from the record's spelling of a non-finite one; None for anything else."""
    if type(value) is float:
        return value
    if type(value) is int:  # not isinstance: True is an int
        return float(value) if abs(value) < 1 << 1000 else None  # float() raises above 2 ** 1024
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    return None
