"""Runs -> the documents of the live page: the list, and one run. What they hold is the report's; events fill it in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from urllib.parse import quote

from steadygrad.view.read.run import RunReader
from steadygrad.view.render.document import make_head, render_foot, render_top
from steadygrad.view.render.html import Html, make_table, tag
from steadygrad.view.render.parts import render_run
from steadygrad.view.serve.live import RunGlance
from steadygrad.words import spell_duration

KEY = "run0"


def make_list_page(glances: Sequence[RunGlance], title: str) -> str:
    """The page that lists the runs."""
    content = tag("div", render_list(glances), data_part="list")
    return _make_page(title, tag("h2", "Runs"), content, events="/events", scripts=("page.js", "live.js"))


def make_run_page(reader: RunReader, name: str) -> str:
    """The page of one run, with as much as was read of it; the charts come as events."""
    back = tag("a", "all runs", href="/")
    events = f"/events/{quote(name)}"
    return _make_page(
        name, render_run(reader, KEY), events=events, scripts=("plotly.js", "page.js", "live.js"), top=back
    )


def render_list(glances: Sequence[RunGlance]) -> Html:
    """A row for each run."""
    if not glances:
        return tag("p", "There is no run in this folder yet.", class_="calm")
    now = time.time()
    rows = [
        [
            tag("a", one.name, href=f"/runs/{quote(one.name)}"),
            tag("span", "live" if one.is_live else "at rest", class_="badge live" if one.is_live else "badge"),
            "-" if one.last_step is None else f"{one.last_step:,}",
            one.loss,
            "some" if one.num_incident_bytes else "none",
            spell_duration(one.written, now),
        ]
        for one in glances
    ]
    return make_table(("run", "", "last step", "its loss", "incidents", "written"), rows)


def _make_page(title: str, *content: Html, events: str, scripts: tuple[str, ...], top: Html | None = None) -> str:
    head = [
        tag("meta", charset="utf-8"),
        *make_head(f"{title} · steadygrad"),
        tag("link", rel="stylesheet", href="/assets/page.css"),
        *(tag("script", src=f"/assets/{name}", defer=True) for name in scripts),
    ]
    bar = render_top(title, *([top] if top is not None else []), has_charts="plotly.js" in scripts)
    body = tag(
        "body", tag("div", id="reading"), bar, tag("main", *content, id="main"), render_foot(), data_events=events
    )
    return f"<!doctype html>\n{tag('html', tag('head', *head), body, lang='en')}\n"
