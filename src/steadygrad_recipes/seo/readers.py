"""A folder, CSV or JSONL file of pages or feature rows -> Rows, and a list of what was left out and why.

A folder holds pages (*.html, *.htm) and their scores in scores.csv or scores.jsonl, by file name. A file has a row for
each page: `file` (a path beside it) or `html`, or the features themselves and `text`. Scores are the columns that begin
with `score_`, or an object `scores`. A table with an `Address` is a crawler's export (`crawl.py`). A bad row affects no
other, is named with its line, and is never lost silently.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad_recipes.seo.crawl import ADDRESSES, find_fault, is_export, read_export
from steadygrad_recipes.seo.features import FEATURES, parse_page

PREFIX = "score_"
RESERVED = ("file", "html", "text", "scores", "features")
TABLES = ("scores.csv", "scores.jsonl")
PAGES = (".html", ".htm")
TAG = re.compile(r"<\s*(!doctype\s+html|html|head|body|title|p|div|h1|main|article|a)\b", re.IGNORECASE)
"""A tag that only a page has."""


@dataclass(frozen=True, slots=True)
class Row:
    """One page with what is known about it."""

    features: dict[str, float]
    text: str
    scores: dict[str, float]
    """Metric -> score; metrics without a judgement are absent."""


@dataclass(slots=True)
class Rows:
    """The rows that could be read, and those that could not."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Where each bad row is, and why it was left out."""


class BadRow(Exception):
    """What is wrong with one row."""


def read_rows(path: str | Path) -> Rows:
    """Read everything at `path`; raises UsageError when nothing in it can be learned from."""
    path = Path(path)
    if not path.exists():
        raise UsageError(
            f"there is no file or folder {path} to read pages from, seen from {Path.cwd()}. Give --data a folder of "
            "HTML pages, or a CSV or JSONL file."
        )
    read = _read_folder(path) if path.is_dir() else _read_table(path)
    if not read.rows:
        reasons = "; ".join(read.left_out[:3]) or "it has no rows"
        raise UsageError(f"{path} has no page with a score: {reasons}. See docs/recipes/seo.md for the format.")
    return read


def read_unscored(table: Path) -> tuple[list[tuple[str, Row]], list[str]]:
    """Return place and row of each page or feature row of a table, scores or not, and what cannot be scored."""
    rows: list[tuple[str, Row]] = []
    left_out: list[str] = []
    for where, line in _read_lines(table):
        try:
            rows.append((name_row(where, line), _read_row(line, table.parent, needs_scores=False)))
        except BadRow as bad:
            left_out.append(f"{where}: {bad}")
    return rows, left_out


def name_row(where: str, line: Any) -> str:
    """Return the file or address that a row is about; its place where it names none."""
    names = ("file", *ADDRESSES)
    return next((str(line[name]) for name in names if isinstance(line, Mapping) and line.get(name)), where)


def is_table(path: Path) -> bool:
    """Whether a file holds rows, by its name."""
    return path.suffix.lower() in (".csv", ".jsonl", ".ndjson")


def require_html(path: Path) -> str:
    """Return the text of a page; raise UsageError for a file that is none."""
    try:
        return _decode_page(path.read_bytes())
    except BadRow as bad:
        raise UsageError(
            f"{path} {bad}. Give a page, a folder of pages, or a .csv or .jsonl table of feature rows."
        ) from None


def _decode_page(content: bytes) -> str:
    text = content.decode("utf-8", errors="replace")
    if b"\0" in content[:4096] or not TAG.search(text):
        begins = text[:20].split("\n")[0].strip()
        raise BadRow(f"is not an HTML page: it begins with {begins!r} and has no HTML tag")
    return text


def _read_folder(folder: Path) -> Rows:
    table = next((folder / name for name in TABLES if (folder / name).is_file()), None)
    if table is None:
        raise UsageError(
            f"{folder} has no {' or '.join(TABLES)}. Write one with a row for each page: file, score_overall."
        )
    read = _read_table(table)
    named = {line["file"] for _, line in _read_lines(table) if isinstance(line, Mapping) and line.get("file")}
    pages = sorted(page.relative_to(folder).as_posix() for page in folder.rglob("*") if page.suffix.lower() in PAGES)
    read.left_out += [f"{page}: has no row in {table.name}" for page in pages if page not in named]
    return read


def _read_table(table: Path) -> Rows:
    read = Rows()
    for where, line in _read_lines(table):
        try:
            read.rows.append(_read_row(line, table.parent))
        except BadRow as bad:
            read.left_out.append(f"{where}: {bad}")
    return read


def _read_lines(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a file; for a row that cannot be read, the text of the exception."""
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
        ".csv": _read_csv,
        ".jsonl": _read_jsonl,
        ".ndjson": _read_jsonl,
    }
    reader = readers.get(table.suffix.lower())
    if reader is None:
        raise UsageError(
            f"{table} ends in {table.suffix!r}, which is not a table of pages. Use .csv or .jsonl, or a folder."
        )
    with table.open("rb") as file:
        if b"\0" in file.read(4096):
            raise UsageError(
                f"{table} is not text in UTF-8: it has zero bytes, as UTF-16 and binary files do. Save it as CSV UTF-8."
            )
    yield from reader(table)


def _read_csv(table: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(1 << 27)  # one cell may contain a whole page
    # Excel begins a CSV with a byte order mark, which would become part of the first column's name
    with table.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        header = file.readline()
        file.seek(0)
        # Spreadsheets of many countries write semicolons
        reader = csv.DictReader(file, delimiter=max(",;\t", key=header.count))
        for row in reader:
            extra = [cell for cell in row.pop(None, []) if cell]  # beyond the header
            cells = {name: cell for name, cell in row.items() if cell not in (None, "")}
            fault = f"has more cells than the header's {len(row)}: {extra[0][:20]!r}" if extra else None
            yield f"{table.name}:{reader.line_num}", cells if fault is None else fault


def _read_jsonl(table: Path) -> Iterator[tuple[str, Any]]:
    with table.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row: Any = json.loads(line)
            except ValueError as error:
                row = f"not JSON ({error})"
            yield f"{table.name}:{number}", row


def _read_row(line: Any, folder: Path, *, needs_scores: bool = True) -> Row:
    if not isinstance(line, Mapping):
        raise BadRow(line if isinstance(line, str) else f"is {type(line).__name__}, not an object")
    scores = _read_scores(line, needs_scores=needs_scores)
    if is_export(line):
        fault = find_fault(line)
        if fault is not None:
            raise BadRow(f"{name_row('', line)} {fault}")
        features, text = read_export(line, prefix=PREFIX)
        return Row(features, text, scores)
    html = _find_html(line, folder)
    if html is not None:
        page = parse_page(html)
        return Row(page.features, page.text, scores)
    given = line.get("features")
    pairs = given if isinstance(given, Mapping) else {n: v for n, v in line.items() if n and not _is_other(n)}
    features = {str(name): _as_number(value, str(name)) for name, value in pairs.items()}
    text = str(line.get("text") or "")
    if not features and not text:
        raise BadRow("has neither file nor html nor features nor text")
    return Row(features, text, scores)


def _find_html(line: Mapping[str, Any], folder: Path) -> str | None:
    if line.get("html"):
        return str(line["html"])
    if not line.get("file"):
        return None
    # Resolved before the test, so that neither `..` nor a link leads out of the folder
    page = (folder / str(line["file"])).resolve()
    if not page.is_relative_to(folder.resolve()):
        raise BadRow(f"file {line['file']} lies outside {folder}")
    try:
        return _decode_page(page.read_bytes())
    except OSError as error:
        raise BadRow(f"file {line['file']} cannot be read: {error.strerror}") from None
    except BadRow as bad:
        raise BadRow(f"file {line['file']} {bad}") from None


def _read_scores(line: Mapping[str, Any], *, needs_scores: bool) -> dict[str, float]:
    given = line.get("scores")
    if given is not None and not isinstance(given, Mapping):
        raise BadRow(f"scores must be an object of metric to number, found {type(given).__name__}")
    flat = {n.removeprefix(PREFIX): v for n, v in line.items() if n and n.startswith(PREFIX)}
    pairs = {**flat, **(given or {})}
    scores = {str(name): _as_number(value, str(name)) for name, value in pairs.items() if value is not None}
    if not scores and needs_scores:
        raise BadRow(f"has no score: no column that begins with {PREFIX}, no scores object")
    return scores


def _as_number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadRow(f"{name} is {value!r}, not a number") from None
    if not math.isfinite(number):
        raise BadRow(f"{name} is {number}")
    return number


def _is_other(name: str) -> bool:
    return name in RESERVED or name.startswith(PREFIX)


def list_features(rows: list[Row]) -> tuple[str, ...]:
    """Return the features of a set of rows: ours where a row has one of them, then the others by name."""
    names = {name for row in rows for name in row.features}
    ours = [name for name in FEATURES if name in names]
    return (*ours, *sorted(names - set(FEATURES)))
