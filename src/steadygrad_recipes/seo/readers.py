"""A folder, CSV or JSONL file of pages or feature rows -> Rows, and a list of what was left out and why.

A folder holds pages (*.html, *.htm) and their scores in scores.csv or scores.jsonl, by file name. A file has a row for
each page: `file` (a path beside it) or `html`, or the features themselves and `text`. Scores are the columns that begin
with `score_`, or an object `scores`. A table with an `Address` is a crawler's export (`crawl.py`). A bad row affects no
other, is named with its line, and is never lost silently.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad_recipes.seo.crawl import ADDRESSES, find_fault, is_export, read_export
from steadygrad_recipes.seo.features import FEATURES, decode_page, parse_page
from steadygrad_recipes.tables import Numbered, read_csv, read_jsonl, require_text, resolve_inside

PREFIX = "score_"
RESERVED = ("file", "html", "text", "scores", "features")
TABLES = ("scores.csv", "scores.jsonl")
PAGES = (".html", ".htm")
TAG = re.compile(
    r"<(!doctype\s+html|html|head|body|title|meta|main|article|section|div|span|p|a|h[1-6]|ul|ol|table|img)\b",
    re.IGNORECASE,
)
"""A tag that only a page has."""
READERS: dict[str, Callable[[Path], Iterator[Numbered]]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
}
"""Ending of a table -> what reads it."""
LARGEST = 1e15
"""Largest score: the squares of larger ones leave float32."""


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
    return path.suffix.lower() in READERS


def require_html(path: Path) -> str:
    """Return the text of a page; raise UsageError for a file that is none."""
    try:
        return _require_page(decode_page(path.read_bytes()))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give another page.") from None
    except BadRow as bad:
        raise UsageError(
            f"{path} {bad}. Give a page, a folder of pages, or a .csv or .jsonl table of feature rows."
        ) from None


def _require_page(text: str) -> str:
    # A feed has titles and links too; XML is a page only as XHTML
    is_other = text.lstrip().startswith("<?xml") and "<html" not in text.lower()
    if "\0" in text[:4096] or is_other or not TAG.search(text):
        begins = text[:20].split("\n")[0].strip()
        reason = "is XML without <html>" if is_other else "has no HTML tag"
        raise BadRow(f"is not an HTML page: it begins with {begins!r} and {reason}")
    return text


def _read_folder(folder: Path) -> Rows:
    tables = [folder / name for name in TABLES if (folder / name).is_file()]
    if len(tables) != 1:
        have = f"both {' and '.join(TABLES)}" if tables else f"neither {' nor '.join(TABLES)}"
        raise UsageError(f"{folder} has {have}. Write one of them, with a row for each page: file, score_overall.")
    table = tables[0]
    read = _read_table(table)
    lines = [line for _, line in _read_lines(table) if isinstance(line, Mapping)]
    named = {os.path.normpath(str(line["file"])) for line in lines if line.get("file")}
    pages = sorted(page.relative_to(folder).as_posix() for page in folder.rglob("*") if page.suffix.lower() in PAGES)
    read.left_out += [f"{page}: has no row in {table.name}" for page in pages if page not in named]
    return read


def _read_table(table: Path) -> Rows:
    read = Rows()
    seen: dict[str, str] = {}
    for where, line in _read_lines(table):
        try:
            row = _read_row(line, table.parent)
            page = name_row(where, line)
            first = seen.setdefault(os.path.normpath(page) if line.get("file") else page, where)
            if first != where:  # the same page to train on and to validate
                raise BadRow(f"{page} has a row already, {first}")
            read.rows.append(row)
        except BadRow as bad:
            read.left_out.append(f"{where}: {bad}")
    return read


def _read_lines(table: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of a file; a ValueError for a row that cannot be read."""
    reader = READERS.get(table.suffix.lower())
    if reader is None:
        raise UsageError(
            f"{table} ends in {table.suffix!r}, which is not a table of pages. Use {', '.join(READERS)}, or a folder."
        )
    require_text(table)
    yield from ((f"{table.name}:{number}", line) for number, line in reader(table))


def _read_row(line: Any, folder: Path, *, needs_scores: bool = True) -> Row:
    if isinstance(line, ValueError):
        raise BadRow(str(line))
    if not isinstance(line, Mapping):
        raise BadRow(f"is {type(line).__name__}, not an object")
    scores = _read_scores(line, needs_scores=needs_scores)
    if is_export(line):
        fault = find_fault(line)
        if fault is not None:
            raise BadRow(f"{name_row('', line)} {fault}")
        try:
            return Row(*read_export(line, prefix=PREFIX), scores)
        except ValueError as error:
            raise BadRow(str(error)) from None
    html = _find_html(line, folder)
    if html is not None:
        page = parse_page(html)
        return Row(page.features, page.text, scores)
    given = line.get("features")
    if given is not None and not isinstance(given, Mapping):
        raise BadRow(f"features must be an object of name to number, found {type(given).__name__}")
    pairs = {n: v for n, v in line.items() if n and not _is_other(n)} if given is None else given
    # None is an empty cell, as in a CSV
    features = {str(name): _as_number(value, str(name)) for name, value in pairs.items() if value is not None}
    text = line.get("text") or ""
    if not isinstance(text, str):
        raise BadRow(f"text is {type(text).__name__}, not text")
    if not features and not text:
        raise BadRow("has neither file nor html nor features nor text")
    return Row(features, text, scores)


def _find_html(line: Mapping[str, Any], folder: Path) -> str | None:
    if line.get("html"):
        if not isinstance(line["html"], str):
            raise BadRow(f"html is {type(line['html']).__name__}, not text")
        try:
            return _require_page(line["html"])
        except BadRow as bad:
            raise BadRow(f"html {bad}") from None
    if not line.get("file"):
        return None
    try:
        return _require_page(decode_page(resolve_inside(folder, str(line["file"])).read_bytes()))
    except OSError as error:
        raise BadRow(f"file {line['file']} cannot be read: {error.strerror}") from None
    except (ValueError, BadRow) as bad:
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
    truth = next((name for name, value in pairs.items() if isinstance(value, bool)), None)
    if truth is not None:
        raise BadRow(f"{truth} is {pairs[truth]}, not a number")
    large = next((name for name, score in scores.items() if abs(score) > LARGEST), None)
    if large is not None:
        raise BadRow(f"{large} is {scores[large]:g}, too large a score")
    return scores


def _as_number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadRow(f"{name} is {str(value)[:40]!r}, not a number") from None
    except OverflowError:
        raise BadRow(f"{name} has more digits than a number can have") from None
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
