"""Numbers, times and names -> short text, formatted the same way in messages and views.

It depends only on the values passed to it, so that a rule and a page can both use it. Nothing read from a file may
control a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def spell_number(value: float | None, digits: int = 4) -> str:
    """Format a number with a few digits; NaN and Inf by name, None as a dash."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return f"{value:.{digits}g}"


def spell_count(count: int, noun: str) -> str:
    """Format a count as '1 step', '12,000 steps' or 'no step'."""
    return f"no {noun}" if count == 0 else f"{count:,} {noun}{'' if count == 1 else 's'}"


def spell_share(part: int, whole: int) -> str:
    """Format a percentage, never rounding a non-zero share to zero."""
    share = part / whole if whole else 0.0
    return "0 %" if part == 0 else "<0.1 %" if share < 0.001 else f"{100 * share:.3g} %"


def spell_seconds(seconds: float) -> str:
    """Format a time as '12 s', '3 min', '2 h 5 min' or '4 days'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.0f} days"


def spell_value(value: Any) -> str:
    """Format any value of a record as one line of text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return spell_number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {spell_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(spell_value, value))
    return "-" if value is None else str(value)


def spell_duration(written: float | None, now: float) -> str:
    """Format how long ago something was written."""
    return "never" if written is None else f"{spell_seconds(max(0.0, now - written))} ago"


def make_printable(text: str) -> str:
    """Return the text with every character that could control a terminal escaped."""
    # Escape sequences in a parameter name or a path could otherwise rewrite the screen of the person who reads the log
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
