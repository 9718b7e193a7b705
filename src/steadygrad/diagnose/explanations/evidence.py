"""The numbers that belong to a reason, as a few words: '17 of 4096 elements are 0'.

Each function makes an `Evidence`; it gives an empty string when the number is not known, so that a text never says more
than was measured.
"""

from __future__ import annotations

import math

from steadygrad.diagnose.explanations.conditions import LARGEST, Key, find_operand, largest_magnitude
from steadygrad.diagnose.explanations.entry import Evidence
from steadygrad.diagnose.situation import PLAIN_NAMES, Operand, Situation


def count_zeros(key: Key = 0) -> Evidence:
    """Return how many elements of the operand are 0."""
    return lambda situation: _count(find_operand(situation, key), "num_zeros", "0")


def count_negatives(key: Key = 0) -> Evidence:
    """Return how many elements of the operand are negative."""
    return lambda situation: _count(find_operand(situation, key), "num_negative", "negative")


def count_infs(key: Key = 0) -> Evidence:
    """Return how many elements of the operand are infinite."""
    return lambda situation: _count(find_operand(situation, key), "num_inf", "infinite")


def count_nonfinite(key: Key = 0) -> Evidence:
    """Return how many elements of the operand are NaN and how many infinite."""
    return join(lambda situation: _count(find_operand(situation, key), "num_nan", "NaN"), count_infs(key))


def show_range(key: Key = 0) -> Evidence:
    """Return the smallest and largest finite element of the operand."""

    def show(situation: Situation) -> str:
        operand = find_operand(situation, key)
        if operand is None or operand.minimum is None or operand.maximum is None:
            return ""
        return f"{operand.title} lies between {operand.minimum:g} and {operand.maximum:g}"

    return show


def show_largest(*keys: Key) -> Evidence:
    """Return the largest magnitude among the operands, and what the result's dtype can hold."""

    def show(situation: Situation) -> str:
        operands = [find_operand(situation, key) for key in keys or (0,)]
        magnitudes = [
            f"{operand.title} reaches {m:g}" for operand in operands if operand and (m := largest_magnitude(operand))
        ]
        dtype = situation.output.dtype if situation.output else ""
        limit = f"{dtype} ends at {LARGEST[dtype]:g}" if dtype in LARGEST else ""
        return ", ".join([*magnitudes, limit] if limit else magnitudes)

    return show


def show_gradient(situation: Situation) -> str:
    """Return the largest magnitude of the gradient that arrived."""
    magnitude = largest_magnitude(situation.grad) if situation.grad else None
    return "" if magnitude is None else f"the gradient that arrived reaches {magnitude:g}"


def show_shape(key: Key = 0) -> Evidence:
    """Return the operand's shape."""

    def show(situation: Situation) -> str:
        operand = find_operand(situation, key)
        return f"{operand.title} has shape {tuple(operand.shape)}" if operand else ""

    return show


def show_scalar(name: str) -> Evidence:
    """Return a scalar argument and its value."""
    return lambda situation: f"{name} is {situation.scalars[name]}" if name in situation.scalars else ""


def show_nonfinite_numbers(situation: Situation) -> str:
    """Return the numbers among the arguments that are NaN or Inf."""
    found = [(n, v) for n, v in situation.scalars.items() if isinstance(v, float) and not math.isfinite(v)]
    return ", ".join(f"{PLAIN_NAMES.get(name, name)} is {value}" for name, value in found)


def join(*evidence: Evidence) -> Evidence:
    """Return several, without those that are not known."""
    return lambda situation: ", ".join(found for show in evidence if (found := show(situation)))


def _count(operand: Operand | None, field: str, what: str) -> str:
    if operand is None or not getattr(operand, field):
        return ""
    return f"{getattr(operand, field)} of {operand.numel} elements of {operand.title} are {what}"
