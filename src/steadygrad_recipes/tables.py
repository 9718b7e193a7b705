"""Text files of rows -> their rows, one by one, each with its line, and lines -> a file: what the recipes share.

A row that cannot be read is a ValueError in its place, so that it is reported with its line and affects no other; a
file that is not such a text at all raises UsageError. Nothing is decoded by guessing: what is not UTF-8 is named.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError

PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of a compressed file -> what compressed it."""
LONGEST_CELL = 1 << 27
"""A cell may hold a whole page or a long answer; csv's own limit is 128 KiB."""

HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of one half of a surrogate pair, by which JSON writes a character beyond U+FFFF."""

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
        # Decoded here: json itself accepts bytes that are not valid text if they look like half a surrogate pair
        return json.loads(text if isinstance(text, str) else text.decode(json.detect_encoding(text)))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        reason = error.msg.removesuffix(" at").removesuffix(" starting")
        raise ValueError(f"not JSON ({reason} at {where})") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: it is nested too deeply") from None


def require_unicode(value: Any) -> None:
    """Raise ValueError for a text that cannot be encoded, anywhere in a value of JSON: no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(str(error.object)[error.start])
        raise ValueError(
            f"not Unicode text: \\u{half:04x} is half of a character, and the other half is missing"
        ) from None


def read_jsonl(path: Path) -> Iterator[Numbered]:
    """Yield the values of a file of JSON lines."""
    # As bytes: text is also split at U+2028, which JSON allows inside a string, and one bad byte would end it all
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = parse_json(line.rstrip())  # with its end, a truncated line would be at fault in line 2
                if HALF_PAIR.search(line):
                    require_unicode(value)
            except ValueError as error:
                yield number, error
            else:
                yield number, value


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


# --- files ----------------------------------------------------------------------------------------------------------


def resolve_inside(folder: Path, name: str) -> Path:
    """Return where a name inside a folder leads; ValueError if that is outside or nowhere, OSError for a loop of links.

    The name comes from data: it may be anything.
    """
    try:
        # Both resolved, so that neither `..` nor a link leads out; the folder may itself be a link
        path, inside = (folder / name).resolve(), folder.resolve()
    except RuntimeError:  # a loop, before Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
    except ValueError:  # a zero byte, or half of a character
        raise ValueError("is not a name that a file can have") from None
    if not path.is_relative_to(inside):
        raise ValueError(f"lies outside {folder}")
    return path


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines that may name any file: a name that is not UTF-8 is written with escapes."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="backslashreplace")
