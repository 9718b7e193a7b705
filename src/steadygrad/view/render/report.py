"""Run directories -> one HTML file that opens offline. Written to a temporary name and renamed, so never partial."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from steadygrad.errors import UsageError
from steadygrad.view.read.curve import MAX_BUCKETS
from steadygrad.view.read.run import RunReader, find_runs, is_run, list_parts, open_run
from steadygrad.view.render.about import render_comparison, render_search
from steadygrad.view.render.charts import describe_charts
from steadygrad.view.render.document import make_document
from steadygrad.view.render.html import Html, join, tag, to_script_json
from steadygrad.view.render.parts import render_compared_charts, render_controls, render_run

MAX_IN_FULL = 12
"""With more runs than this, only their comparison is written."""
MIN_BUCKETS = 300
"""Stretches of each curve in a report of very many runs."""


def write_report(paths: Sequence[str | Path], target: str | Path) -> list[RunReader]:
    """Read the runs, write the report, and return what was read; a folder of runs stands for all of them."""
    target = Path(target)
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Name the file that the report is written to: -o report.html.")
    if target.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{target} does not end in .html, and a report is a page: -o {target.with_suffix('.html')}.")
    if not target.parent.is_dir():
        raise UsageError(f"There is no folder {target.parent} to write {target.name} to. Create it, or name another.")
    found = list_named_runs(paths)
    buckets = max(MIN_BUCKETS, MAX_BUCKETS // len(found))
    runs = [open_run(path, max_buckets=buckets) for path in found]
    for run, name in zip(runs, name_apart([run.path for run in runs])):
        run.read_all().name = name
    text = render_report(runs)
    # In the same folder, because a rename is atomic only within one file system; the process number keeps two writers
    # apart
    aside = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        # Names of files that are not UTF-8 are shown with escapes: a report must not fail on them
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
        aside.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}. Name another place: -o FILE.") from None
    finally:
        aside.unlink(missing_ok=True)  # gone already after the rename
    return runs


def list_named_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Return the runs that the user named, those of a folder of runs included, each once."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [] if path.is_file() or is_run(path) else find_runs(path)
        found += inside or list_parts(path)  # one that is not a run is refused when it is opened
    # Each once by where it really is, under the name that the user gave
    return list({path.resolve(): path for path in found}.values())


def render_report(runs: Sequence[RunReader]) -> str:
    """Render the whole document."""
    keys = [f"run{i}" for i in range(len(runs))]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = {"runs": {key: describe_charts(run) for key, run in zip(keys, runs)}}
    is_full = len(runs) <= MAX_IN_FULL
    if not is_full:  # their maps would make the file large, and nothing would show them
        data = {"runs": {key: {**one, "norms": None, "ratios": None} for key, one in data["runs"].items()}}
    made, is_only = time.time(), len(runs) == 1
    shown = zip(runs, keys) if is_full else ()
    full = [render_run(run, key, has_controls=is_only, made=made) for run, key in shown]
    body = join([_compare(runs, keys) if len(runs) > 1 else None, *full])
    return make_document(f"{title} · steadygrad", body, data=to_script_json(data))


def name_apart(paths: Sequence[Path]) -> list[str]:
    """Return each run's name, with as many parent folders as needed to make it unique."""
    whole = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, whole))):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return [str(path) for path in paths]


def _compare(runs: Sequence[RunReader], keys: Sequence[str]) -> Html:
    note = None
    if len(runs) > MAX_IN_FULL:
        note = tag("p", "A report of fewer runs shows each of them in full: steadygrad report RUN.", class_="note")
    links = [f"#{key}" if note is None else None for key in keys]
    table = tag("div", render_comparison(runs, keys, links), data_part="comparison")
    return tag(
        "section", tag("h2", "Comparison"), note, render_search(), table, render_controls(), render_compared_charts()
    )
