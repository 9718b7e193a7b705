"""Names and symbols of everything that can happen at a step: one table for the page, the plot and the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from steadygrad.facts import Action


@dataclass(frozen=True, slots=True)
class Mark:
    """One row of the table."""

    words: str
    symbol: str
    """Its shape on the page; no two that may stand together share one, so that colour is never needed."""
    paint: str
    """Its colour on the page: a variable of the style sheet, so that it follows the theme."""
    color: str
    """Its colour in a plot."""
    is_turning_point: bool = False
    """Whether it is rare and changes everything after it: drawn as a line through the whole chart."""


MARKS: dict[str, Mark] = {
    "nonfinite": Mark("not finite", "cross", "--red", "#c8242f"),
    "spike": Mark("jumped", "peak", "--amber", "#96650a"),
    Action.SKIP: Mark("skipped", "bar", "--orange", "#c2570c"),
    Action.SANITIZE: Mark("sanitised", "diamond", "--teal", "#0b8a7d"),
    Action.SCALE_LR: Mark("learning rate changed", "down", "--blue", "#2563c9", True),
    Action.SCALE_WEIGHT_DECAY: Mark("weight decay changed", "up", "--teal", "#0b8a7d", True),
    Action.TIGHTEN_CLIP: Mark("clip threshold changed", "tall", "--amber", "#96650a", True),
    Action.ROLLBACK: Mark("rolled back", "left", "--purple", "#8b2fc9", True),
    Action.HALT: Mark("halted", "square", "--red", "#c8242f", True),
    Action.CLIP: Mark("clipped", "circle", "--soft", "#6b7280"),
}
"""All are actions except a non-finite step and a loss or norm that jumped."""


def find_mark(action: str) -> Mark:
    """Return the row of an action; an unknown one, from a newer version, is shown under its own name."""
    return MARKS.get(action) or Mark(action, "circle", "--soft", "#6b7280")
