"""LiveRuns -> a web application: pages, their assets, and a stream of events for each. Every route only reads.

Files are read in separate threads, so that a long run does not keep other pages waiting. A stream ends when its client
disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.record.encode import to_json
from steadygrad.view.read.glance import RunGlance
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.about import render_search
from steadygrad.view.render.document import SCRIPTS, make_head, read_asset, render_foot, render_top
from steadygrad.view.render.html import Html, join, make_table, tag
from steadygrad.view.render.parts import render_compared_charts, render_controls, render_run, render_state, render_time
from steadygrad.view.serve.compare import LiveComparison, render_compared
from steadygrad.view.serve.live import KEY, LiveRuns, find_changes
from steadygrad.view.serve.protect import Gate
from steadygrad.words import spell_number

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

PAUSE_SECONDS = 0.5
"""Pause between two reads of a run that has been read to its end."""
BEAT_SECONDS = 15
"""Interval at which a comment is sent while nothing changes, so that a lost connection is noticed."""


def make_app(root: Path, *, token: str | None = None, is_ending: Callable[[], bool] = lambda: False) -> Gate:
    """Build the application for one folder; a token, if set, is required. `is_ending` ends every stream."""
    import_extra("view", "starlette", what="the live page", error=UsageError)
    # Imported here: starlette is an optional extra, and this module must import without it
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.routing import Route

    pages = Pages(LiveRuns(root), is_ending)
    routes = [
        Route("/", pages.list_runs),
        Route("/runs/{name:path}", pages.show_run),
        Route("/compare", pages.compare),
        Route("/compare/events", pages.follow_comparison),
        Route("/events", pages.follow_list),
        Route("/events/{name:path}", pages.follow_run),
        Route("/assets/{name}", pages.give_asset),
    ]
    # Gate outermost: nothing is routed before it has let a request in. Starlette's gzip leaves event streams alone,
    # which it would hold back otherwise
    return Gate(Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=4096)]), token=token)


class Pages:
    """The routes."""

    def __init__(self, runs: LiveRuns, is_ending: Callable[[], bool]) -> None:
        self._runs, self._is_ending = runs, is_ending

    async def list_runs(self, request: Request) -> Response:  # noqa: ARG002
        from starlette.responses import HTMLResponse

        glances = await asyncio.to_thread(self._runs.list)
        return HTMLResponse(make_list_page(glances, self._runs.root.name or "runs"))

    async def show_run(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        name = request.path_params["name"]
        run = await asyncio.to_thread(self._runs.find, name)
        if run is None:
            return _refuse()
        # In a thread, like all that reads files or waits for a run's lock: the event loop serves every other page
        await asyncio.to_thread(run.look)
        return HTMLResponse(await asyncio.to_thread(run.ask, lambda reader: make_run_page(reader, name)))

    async def follow_run(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._runs.find, request.path_params["name"])
        return _refuse() if run is None else self._stream(request, run.look)

    async def compare(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse, RedirectResponse

        # Bounded, because each one opens files and keeps curves in memory
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
        if not names:
            return RedirectResponse("/", status_code=303)
        found = await asyncio.to_thread(self._find_all, names)
        if found is None:
            return _refuse()
        return HTMLResponse(await asyncio.to_thread(lambda: make_comparison_page(found.read_on(), names)))

    async def follow_comparison(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
        found = await asyncio.to_thread(self._find_all, names)
        return _refuse() if found is None else self._stream(request, found.look)

    def _find_all(self, names: Sequence[str]) -> LiveComparison | None:
        runs = {name: run for name in names if (run := self._runs.open_apart(name)) is not None}
        return LiveComparison(runs) if len(runs) == len(names) else None

    async def follow_list(self, request: Request) -> Response:
        return self._stream(request, lambda: {"part:list": to_json(render_list(self._runs.list())), "progress": "1"})

    async def give_asset(self, request: Request) -> Response:
        from starlette.responses import Response

        name = request.path_params["name"]
        # A fixed list: the name never becomes part of a path unless it is in it
        if name in (*SCRIPTS, "live.js", "page.css"):
            kind = "text/css" if name.endswith(".css") else "text/javascript"
            return Response(read_asset(name), media_type=kind)
        return _refuse()

    def _stream(self, request: Request, look: Callable[[], dict[str, str]]) -> Response:
        from starlette.responses import StreamingResponse

        return StreamingResponse(_send_changes(request, look, self._is_ending), media_type="text/event-stream")


def _refuse() -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("There is no such run in this folder.", status_code=404)


async def _send_changes(
    request: Any, look: Callable[[], dict[str, str]], is_ending: Callable[[], bool]
) -> AsyncIterator[str]:
    sent: dict[str, str] = {}
    quiet = 0.0
    # uvicorn waits for open streams when it shuts down, and these have no end of their own
    while not is_ending() and not await request.is_disconnected():
        pieces = await asyncio.to_thread(look)
        changes = find_changes(pieces, sent)
        if changes is not None:
            sent, quiet = pieces, 0.0
            yield f"data: {changes}\n\n"  # to_json leaves no newline in it, which would end the event
        elif quiet >= BEAT_SECONDS:
            quiet = 0.0
            yield ": nothing new\n\n"
        pause = PAUSE_SECONDS if float(pieces["progress"]) >= 1 else 0.05
        quiet += pause
        await asyncio.sleep(pause)


# --- pages --------------------------------------------------------------------------------------------------------
# Runs -> the documents of the live page: the list, and one run. They use the report's parts; events fill them in.


MAX_COMPARED = 100
"""Most runs in one comparison."""


def make_list_page(glances: Sequence[RunGlance], title: str) -> str:
    """Render the page that lists the runs; those that are ticked can be compared."""
    bar = tag("div", render_search(), tag("button", "Compare the ticked runs", type="submit"), class_="bar")
    form = tag("form", bar, tag("div", render_list(glances), data_part="list"), action="/compare", method="get")
    return _make_page(title, tag("h2", "Runs"), form, events="/events", has_charts=False)


def make_run_page(reader: RunReader, name: str) -> str:
    """Render the page of one run, with what has been read so far; the charts arrive as events."""
    back = tag("a", "all runs", href="/")
    return _make_page(name, render_run(reader, KEY), events=f"/events/{quote(name)}", top=back)


def make_comparison_page(readers: Sequence[RunReader], names: Sequence[str]) -> str:
    """Render the page of several runs in the same charts."""
    table = tag("div", render_compared(readers, names), data_part="comparison")
    query = urlencode([("run", name) for name in names])
    content = (tag("h2", "Comparison"), render_search(), table, render_controls(), render_compared_charts())
    back = tag("a", "all runs", href="/")
    return _make_page(f"{len(names)} runs", *content, events=f"/compare/events?{query}", top=back)


def render_list(glances: Sequence[RunGlance]) -> Html:
    """Render a row for each run."""
    if not glances:
        return tag("p", "No runs in this folder yet.", class_="calm")
    rows = [
        [
            join([_render_tick(one.name), " ", tag("a", one.name, href=f"/runs/{quote(one.name)}")]),
            render_state(one.state) or "-",
            "-" if one.last_step is None else f"{one.last_step:,}",
            spell_number(one.loss),
            f"{one.num_incidents:,}" if one.num_incidents else "none",
            render_time(one.written) or "never",
        ]
        for one in glances
    ]
    header = ("run", "state", "last step", "last loss", "incidents", "last written")
    return make_table(header, rows, label="Runs", class_="listed", sortable=True)


def _render_tick(name: str) -> Html:
    return tag("input", type="checkbox", name="run", value=name, aria_label=f"Compare {name}")


def _make_page(title: str, *content: Html, events: str, top: Html | None = None, has_charts: bool = True) -> str:
    scripts = (*SCRIPTS, "live.js")
    head = [
        tag("meta", charset="utf-8"),
        *make_head(f"{title} · steadygrad"),
        tag("link", rel="stylesheet", href="/assets/page.css"),
        *(tag("script", src=f"/assets/{name}", defer=True) for name in scripts),
    ]
    bar = render_top(title, *([top] if top is not None else []), has_charts=has_charts)
    body = tag(
        "body", tag("div", id="reading"), bar, tag("main", *content, id="main"), render_foot(), data_events=events
    )
    return f"<!doctype html>\n{tag('html', tag('head', *head), body, lang='en')}\n"
