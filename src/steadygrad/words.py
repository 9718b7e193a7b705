"""Numbers, times and names -> short words that messages and views spell alike.

It knows nothing but the values that it is given, so that a rule and a page can both use it. Nothing that a file holds
may steer a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def spell_number(value: float | None, digits: int = 4) -> str:
    """A few digits; NaN and Inf by their names, a dash for nothing."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return f"{value:.{digits}g}"


def spell_count(count: int, noun: str) -> str:
    """'1 step', '12,000 steps', 'no step'."""
    return f"no {noun}" if count == 0 else f"{count:,} {noun}{'' if count == 1 else 's'}"


def spell_share(part: int, whole: int) -> str:
    """A percentage that never rounds something to nothing."""
    share = part / whole if whole else 0.0
    return "0 %" if part == 0 else "<0.1 %" if share < 0.001 else f"{100 * share:.3g} %"


def spell_seconds(seconds: float) -> str:
    """'12 s', '3 min', '2 h 5 min', '4 days'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.0f} days"


def spell_value(value: Any) -> str:
    """Any value of a record, as one line of text."""
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
    """How long ago something was written."""
    return "never" if written is None else f"{spell_seconds(max(0.0, now - written))} ago"


def make_printable(text: str) -> str:
    """The text with every character that could steer a terminal spelled out."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
