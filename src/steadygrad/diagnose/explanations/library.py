"""A Situation -> the Explanation of the entry that fits it best.

The most specific match wins: one that names the op before one that does not, then the one with more conditions, then
the one that stands first. There is always an answer.
"""

from __future__ import annotations

from steadygrad.diagnose.explanations import (
    division,
    exponentials,
    fallbacks,
    growth,
    indexing,
    inputs,
    linear_algebra,
    logarithms,
    losses,
    normalization,
    optimizer,
    precision,
    probability,
    reductions,
    roots_and_powers,
    softmax,
    trigonometry,
)
from steadygrad.diagnose.explanations.entry import Entry, Explanation
from steadygrad.diagnose.situation import Situation

FAMILIES = (
    roots_and_powers,
    logarithms,
    exponentials,
    division,
    trigonometry,
    softmax,
    linear_algebra,
    normalization,
    losses,
    reductions,
    probability,
    indexing,
    precision,
    inputs,
    optimizer,
    growth,
    fallbacks,
)
"""In the order in which an equally specific match is looked for."""

ENTRIES: tuple[Entry, ...] = tuple(entry for family in FAMILIES for entry in family.ENTRIES)


def choose_entry(situation: Situation) -> Entry:
    """Return the most specific entry that matches."""
    matching = (entry for entry in ENTRIES if entry.matches(situation))
    # max() returns the first of equals: the order of FAMILIES, and of entries in a file, decides.
    return max(matching, key=lambda entry: entry.rank, default=fallbacks.LAST)


def explain(situation: Situation) -> Explanation:
    """Return why it happened, with this failure's numbers, and what to write instead."""
    return choose_entry(situation).explain(situation)
