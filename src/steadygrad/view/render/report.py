"""Run directories -> one HTML file that opens offline. Written to a temporary name and renamed, so never partial."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from steadygrad.errors import UsageError
from steadygrad.view.read.run import RunReader, list_parts, open_run
from steadygrad.view.render.about import render_comparison
from steadygrad.view.render.charts import describe_charts
from steadygrad.view.render.document import make_document, read_asset, read_plotly
from steadygrad.view.render.html import Html, join, tag, to_script_json
from steadygrad.view.render.parts import render_compared_charts, render_run


def write_report(paths: Sequence[str | Path], target: str | Path) -> list[RunReader]:
    """Read the runs, write the report, and return what was read."""
    target = Path(target)
    plotly = read_plotly()  # a missing package should fail before minutes of reading
    if target.is_dir():
        raise UsageError(f"{target} is a folder. Name the file that the report is written to: -o report.html.")
    if not target.parent.is_dir():
        raise UsageError(f"There is no folder {target.parent} to write {target.name} to. Make it, or name another.")
    runs = [open_run(part) for path in paths for part in list_parts(Path(path))]
    for run, name in zip(runs, tell_apart([run.path for run in runs])):
        run.read_all().name = name
    text = render_report(runs, plotly)
    aside = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(target)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}. Name another place: -o FILE.") from None
    finally:
        aside.unlink(missing_ok=True)
    return runs


def render_report(runs: Sequence[RunReader], plotly: str) -> str:
    """Render the whole document."""
    keys = [f"run{i}" for i in range(len(runs))]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    data = {"runs": {key: describe_charts(run) for key, run in zip(keys, runs)}}
    body = join([_compare(runs, keys) if len(runs) > 1 else None, *map(render_run, runs, keys)])
    scripts = (plotly, read_asset("page.js"))
    return make_document(f"{title} · steadygrad", body, data=to_script_json(data), scripts=scripts)


def tell_apart(paths: Sequence[Path]) -> list[str]:
    """Return each run's name, with as many parent folders as needed to make it unique."""
    whole = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, whole))):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(set(whole)):
            return names
    return [str(path) for path in paths]


def _compare(runs: Sequence[RunReader], keys: Sequence[str]) -> Html:
    links = tag("nav", *(tag("a", run.name, href=f"#{key}") for run, key in zip(runs, keys)), aria_label="Runs")
    return tag("section", tag("h2", "Comparison"), links, render_comparison(runs), render_compared_charts())
