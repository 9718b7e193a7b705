"""Text files of rows -> their rows, one by one, each with its line: what the recipes' readers share.

A row that cannot be read is a ValueError in its place, so that it is reported with its line and affects no other; a
file that is not such a text at all raises UsageError. Nothing is decoded by guessing: what is not UTF-8 is named.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError

PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of a compressed file -> what compressed it."""
LONGEST_CELL = 1 << 27
"""A cell may hold a whole page or a long answer; csv's own limit is 128 KiB."""

Numbered = tuple[int, Any]
"""The line where a row begins, and the row; a ValueError where it cannot be read."""


def require_text(path: Path) -> None:
    """Raise UsageError for a file that is compressed or binary."""
    with path.open("rb") as file:
        begin = file.read(4096)
    packed = next((name for magic, name in PACKED.items() if begin.startswith(magic)), None)
    if packed is not None:
        raise UsageError(f"{path} is compressed with {packed}. Unpack it first.")
    if b"\0" in begin:
        raise UsageError(
            f"{path} is not text in UTF-8: it has zero bytes, as UTF-16 and binary files do. Save it in UTF-8."
        )


def parse_json(text: bytes | str) -> Any:
    """Return the value; ValueError says in a few words why there is none."""
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON ({error.msg} at {where})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: it is nested too deeply") from None


def read_jsonl(path: Path) -> Iterator[Numbered]:
    """Yield the values of a file of JSON lines."""
    # As bytes: text is also split at U+2028, which JSON allows inside a string, and one bad byte would end it all
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, parse_json(line)
            except ValueError as error:
                yield number, error


def read_lines(path: Path) -> Iterator[Numbered]:
    """Yield the lines of a text that are not blank."""
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        if line.strip():
            try:
                yield number, line.decode()
            except UnicodeDecodeError:
                yield number, ValueError("not UTF-8 text")


def read_csv(path: Path) -> Iterator[Numbered]:
    """Yield rows as column -> cell, without empty cells; commas, semicolons and tabs separate them."""
    csv.field_size_limit(LONGEST_CELL)  # process-wide
    # Excel begins a CSV with a byte order mark, which would become part of the first column's name. Bytes that are not
    # UTF-8 become surrogates, and their row is named below: replaced, they would only change its words
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline()
        file.seek(0)
        # Spreadsheets of many countries write semicolons. Strict: else one quote that is left open takes all the rest
        # of the file into its cell
        reader = csv.reader(file, delimiter=max(",;\t", key=header.count), strict=True)
        names: list[str] | None = None
        while True:
            begin = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                cells, fault = [], f"{error}, in lines {begin} to {reader.line_num}: is a quote not closed or doubled?"
            else:
                fault = _find_fault(cells, names)
            if cells is None:
                return
            if names is None:
                names = _read_header(path, cells, fault)
            elif fault:
                yield begin, ValueError(fault)
            elif any(cells):  # else a blank line
                yield begin, {name: cell for name, cell in zip(names, cells) if cell}


def _find_fault(cells: list[str] | None, names: list[str] | None) -> str:
    try:
        "".join(cells or ()).encode()
    except UnicodeEncodeError:
        return "not UTF-8 text"
    extra = [cell for cell in (cells or ())[len(names) :] if cell] if names else []
    # A comma in a text without quotes: what is behind it would be lost
    return f"more cells than the header's {len(names or ())}: {extra[0][:20]!r}" if extra else ""


def _read_header(path: Path, cells: list[str], fault: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        fault = f"the column {twice[0]!r} is there {names.count(twice[0])} times, and only one could be used"
    if fault:
        raise UsageError(f"{path}: its first line cannot be used as names of columns: {fault}. Write it again.")
    return names
