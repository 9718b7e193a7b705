"""Parts -> one HTML document. Styles and scripts are inline, and a policy in its head forbids everything else.

So the browser itself enforces two promises: only our scripts run, identified by their hashes, and nothing is fetched.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib.resources import files

from steadygrad._version import __version__
from steadygrad.view.render.html import Html, join, tag


@functools.cache
def read_asset(name: str) -> str:
    """Return the text of a file next to this one."""
    return files("steadygrad.view.render").joinpath("assets", name).read_text(encoding="utf-8")


SCRIPTS = ("series.js", "chart.js", "page.js")
"""What every page with charts runs, in this order."""


def make_document(title: str, body: Html, *, data: Html) -> str:
    """Return a self-contained document; `data` is JSON for the scripts."""
    scripts = [read_asset(name) for name in SCRIPTS]
    # Of the very text that is embedded: one changed character, and the browser runs nothing
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        *make_head(title),
        tag("style", Html(read_asset("page.css"))),
    ]
    # Not escaped: a script element holds raw text. So no script of ours may contain its end tag
    run = [tag("script", Html(script)) for script in scripts]
    numbers = tag("script", data, type="application/json", id="data")
    page = tag("body", render_top(title), tag("main", body, id="main"), render_foot(), numbers, *run)
    return f"<!doctype html>\n{tag('html', tag('head', *head), page, lang='en')}\n"


def make_head(title: str) -> list[Html]:
    """Return the elements that every page's head has."""
    return [
        tag("title", title),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
    ]


def render_top(title: str, *more: Html, has_charts: bool = True) -> Html:
    """Render the bar at the top of every page; without charts the key hints are left out."""
    theme = tag("button", "Light / dark", type="button", id="theme", title="Key: t")
    hint = "n, p: next and previous incident · l: logarithmic loss · t: light or dark"
    keys = tag("span", hint, class_="keys") if has_charts else None
    skip = tag("a", "Skip to content", href="#main", class_="skip")
    return tag("header", skip, tag("h1", title), *more, keys, theme)


def render_foot() -> Html:
    """Render the line that says what made the page."""
    return tag("footer", join([f"steadygrad {__version__}"]))


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
