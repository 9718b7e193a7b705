"""Causes and losses -> the demo's lines: the cause with the source around its line; curves of block characters."""

from __future__ import annotations

import linecache
import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise

from steadygrad.facts import Cause
from steadygrad.view.sparkline import BLOCKS

LEFT = " " * 14
"""Column at which the text next to a step begins."""
WIDTH = 110
"""Maximum width of a text: longer lines are hard to read."""
CURVE_WIDTH = 72
AROUND = 1
"""Number of source lines shown before and after the failing one."""


def describe_step(step: int) -> str:
    """Format the left column."""
    return f"   step {step:4d} ".ljust(len(LEFT))


def indent(text: str) -> str:
    """Format a line next to the left column."""
    return LEFT + text


def describe_cause(cause: Cause, width: int = WIDTH) -> Iterator[tuple[str, str]]:
    """Format the cause: lines of at most `width` characters, each with its style."""
    if cause.phase == "input":
        value = cause.kind.replace("nan", "NaN")
        yield indent(f"cause: the batch: {cause.name} held {value} before any op ran"), "bold"
    else:
        yield indent(f"cause: {_spell_place(cause)}"), "bold"
        yield from _quote_source(cause)
    rows = {
        "why": cause.explanation,
        "text": cause.samples_note,
        "fix": cause.fixes[0] if cause.fixes else "",
        "kept": f"the batch, as {cause.batch} of its run" if cause.batch else "",
    }
    for name, value in rows.items():
        if value:
            yield from ((line, "") for line in _wrap(name, value, width))


def _spell_place(cause: Cause) -> str:
    if cause.file is None:
        return cause.headline
    file = (cause.file or "").replace("\\", "/").rpartition("/")[2]
    way = "the derivative of " if cause.phase == "backward" else ""
    module = f", in module {cause.module}" if cause.module else ""
    return f"{file} line {cause.line}{module}: {way}{cause.op}"


def _quote_source(cause: Cause) -> Iterator[tuple[str, str]]:
    """Format the line and its neighbours, as an editor shows them."""
    if cause.file is None or cause.line is None:
        return
    numbers = range(max(1, cause.line - AROUND), cause.line + AROUND + 1)
    lines = {number: linecache.getline(cause.file, number).rstrip() for number in numbers}
    shown = textwrap.dedent("\n".join(lines.values())).splitlines()
    for number, text in zip(lines, shown):
        guilty = number == cause.line
        yield indent(f"    {'>' if guilty else ' '} {number:4d} | {text}"), "bold red" if guilty else "dim"


def _wrap(name: str, text: str, width: int) -> list[str]:
    first = f"{LEFT}{name + ':':<7}"
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )


def shorten(text: str, width: int = WIDTH) -> str:
    """Shorten to one line next to the left column."""
    return textwrap.shorten(text, width - len(LEFT), placeholder=" ...")


def draw_losses(runs: Sequence[Sequence[float]], width: int = CURVE_WIDTH) -> list[list[str]]:
    """Draw two rows of block characters for each run, on one logarithmic scale; × where no loss is finite."""
    columns = [_squeeze(losses, width) for losses in runs]
    known = [math.log(value) for row in columns for value in row if value > 0]  # drops NaN too
    low, high = min(known, default=0.0), max(known, default=1.0)
    eighths = [[_scale(value, low, high) for value in row] for row in columns]
    return [[_draw_row(row, 8, " "), _draw_row(row, 0, "×")] for row in eighths]


def _squeeze(losses: Sequence[float], width: int) -> list[float]:
    """Return the largest finite loss of each stretch; NaN where there is none."""
    num = min(width, len(losses))
    edges = [i * len(losses) // max(1, num) for i in range(num + 1)]
    stretches = (losses[first:last] for first, last in pairwise(edges))
    return [max((x for x in stretch if math.isfinite(x)), default=math.nan) for stretch in stretches]


def _scale(value: float, low: float, high: float) -> int | None:
    """Return 1 to 16; None for a loss that is not a number."""
    if math.isnan(value):
        return None
    return 1 + round(15 * (math.log(max(value, math.exp(low))) - low) / ((high - low) or 1.0))


def _draw_row(eighths: Sequence[int | None], below: int, lost: str) -> str:
    return "".join(lost if one is None else BLOCKS[min(8, max(0, one - below))] for one in eighths)
