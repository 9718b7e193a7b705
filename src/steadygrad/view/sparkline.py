"""Numbers -> rows of block characters. A column shows its largest number, so that a spike is never lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_bars(values: Sequence[float], width: int, height: int, *, log: bool = False) -> list[str]:
    """Return `height` lines of at most `width` characters; empty if there is nothing to draw."""
    known = [math.log10(max(value, 1e-30)) if log else value for value in values if math.isfinite(value)]
    if not known or width < 1 or height < 1:
        return []
    columns = squeeze(known, width)
    low, high = min(known), max(columns)
    span = (high - low) or 1.0  # a flat curve
    eighths = [1 + round((value - low) / span * (8 * height - 1)) for value in columns]
    return ["".join(BLOCKS[min(8, max(0, one - 8 * row))] for one in eighths) for row in reversed(range(height))]


def squeeze(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` numbers: the largest of each stretch."""
    if len(values) <= width:
        return list(values)
    # No stretch is empty: there are more values than columns here
    edges = [i * len(values) // width for i in range(width + 1)]
    return [max(values[first:last]) for first, last in pairwise(edges)]
