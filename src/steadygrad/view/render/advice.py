"""What a run advises for the next one -> a list; nothing where it advises nothing."""

from __future__ import annotations

from steadygrad.view.advice import advise, see_run
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.html import Html, tag


def render_advice(run: RunReader) -> Html:
    """A line for each setting, with its reason."""
    found = advise(see_run(run))
    if not found:
        return Html("")
    lines = (tag("li", tag("strong", str(one).partition(": ")[0]), f": {one.reason}") for one in found)
    return tag("section", tag("h3", "For the next run"), tag("ul", *lines, class_="notes"))
