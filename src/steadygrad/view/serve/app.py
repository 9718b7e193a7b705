"""LiveRuns -> a web application: pages, their assets, and a stream of events for each. Every route only reads.

Files are read in separate threads, so that a long run does not keep other pages waiting. A stream ends when its client
disconnects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad.record.encode import to_json
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.document import make_head, read_asset, read_plotly, render_foot, render_top
from steadygrad.view.render.html import Html, make_table, tag
from steadygrad.view.render.parts import render_run
from steadygrad.view.serve.live import LiveRuns, RunGlance, find_changes
from steadygrad.view.serve.protect import Gate
from steadygrad.words import spell_duration

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
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.routing import Route

    pages = Pages(LiveRuns(root), is_ending)
    routes = [
        Route("/", pages.list_runs),
        Route("/runs/{name:path}", pages.show_run),
        Route("/events", pages.follow_list),
        Route("/events/{name:path}", pages.follow_run),
        Route("/assets/{name}", pages.give_asset),
    ]
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
        await asyncio.to_thread(run.look)
        return HTMLResponse(await asyncio.to_thread(run.ask, lambda reader: make_run_page(reader, name)))

    async def follow_run(self, request: Request) -> Response:
        run = await asyncio.to_thread(self._runs.find, request.path_params["name"])
        return _refuse() if run is None else self._stream(request, run.look)

    async def follow_list(self, request: Request) -> Response:
        return self._stream(request, lambda: {"part:list": to_json(render_list(self._runs.list())), "progress": "1"})

    async def give_asset(self, request: Request) -> Response:
        from starlette.responses import Response

        name = request.path_params["name"]
        if name == "plotly.js":
            return Response(await asyncio.to_thread(read_plotly), media_type="text/javascript", headers=_KEEP)
        if name in ("page.js", "live.js", "page.css"):
            kind = "text/css" if name.endswith(".css") else "text/javascript"
            return Response(read_asset(name), media_type=kind)
        return _refuse()

    def _stream(self, request: Request, look: Callable[[], dict[str, str]]) -> Response:
        from starlette.responses import StreamingResponse

        return StreamingResponse(_send_changes(request, look, self._is_ending), media_type="text/event-stream")


_KEEP = {"cache-control": "private, max-age=3600"}  # five megabytes that do not change


def _refuse() -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("There is no such run in this folder.", status_code=404)


async def _send_changes(
    request: Any, look: Callable[[], dict[str, str]], is_ending: Callable[[], bool]
) -> AsyncIterator[str]:
    sent: dict[str, str] = {}
    quiet = 0.0
    while not is_ending() and not await request.is_disconnected():
        pieces = await asyncio.to_thread(look)
        changes = find_changes(pieces, sent)
        if changes is not None:
            sent, quiet = pieces, 0.0
            yield f"data: {changes}\n\n"
        elif quiet >= BEAT_SECONDS:
            quiet = 0.0
            yield ": nothing new\n\n"
        pause = PAUSE_SECONDS if float(pieces["progress"]) >= 1 else 0.05
        quiet += pause
        await asyncio.sleep(pause)


# --- pages --------------------------------------------------------------------------------------------------------
# Runs -> the documents of the live page: the list, and one run. They use the report's parts; events fill them in.


KEY = "run0"


def make_list_page(glances: Sequence[RunGlance], title: str) -> str:
    """Render the page that lists the runs."""
    content = tag("div", render_list(glances), data_part="list")
    return _make_page(title, tag("h2", "Runs"), content, events="/events", scripts=("page.js", "live.js"))


def make_run_page(reader: RunReader, name: str) -> str:
    """Render the page of one run, with what has been read so far; the charts arrive as events."""
    back = tag("a", "all runs", href="/")
    events = f"/events/{quote(name)}"
    return _make_page(
        name, render_run(reader, KEY), events=events, scripts=("plotly.js", "page.js", "live.js"), top=back
    )


def render_list(glances: Sequence[RunGlance]) -> Html:
    """Render a row for each run."""
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
