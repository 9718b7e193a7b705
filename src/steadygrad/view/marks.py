"""Names and symbols of everything that can happen at a step: one table for the page, the plot and the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from steadygrad.facts import Action


@dataclass(frozen=True, slots=True)
class Mark:
    """One row of the table."""

    words: str
    symbol: str
    """Its symbol on the page."""
    paint: str
    """Its colour on the page: a variable of the style sheet, so that it follows the theme."""
    color: str
    """Its colour in a plot."""
    is_turning_point: bool = False
    """Whether it is rare and changes everything after it: drawn as a line through the whole chart."""


MARKS: dict[str, Mark] = {
    "nonfinite": Mark("not finite", "x-thin", "--red", "#c8242f"),
    Action.SKIP: Mark("skipped", "line-ns", "--orange", "#c2570c"),
    Action.SANITIZE: Mark("sanitised", "diamond", "--teal", "#0b8a7d"),
    Action.SCALE_LR: Mark("learning rate changed", "triangle-down", "--blue", "#2563c9", True),
    Action.SCALE_WEIGHT_DECAY: Mark("weight decay changed", "triangle-up", "--teal", "#0b8a7d", True),
    Action.TIGHTEN_CLIP: Mark("clip threshold changed", "diamond-tall", "--amber", "#96650a", True),
    Action.ROLLBACK: Mark("rolled back", "triangle-left", "--purple", "#8b2fc9", True),
    Action.HALT: Mark("halted", "square", "--red", "#c8242f", True),
    Action.CLIP: Mark("clipped", "circle", "--soft", "#6b7280"),
}
"""In the order of the page's rows; all are actions except a non-finite step."""


def find_mark(action: str) -> Mark:
    """Return the row of an action; an unknown one, from a newer version, is shown under its own name."""
    return MARKS.get(action) or Mark(action, "circle", "--soft", "#6b7280")
