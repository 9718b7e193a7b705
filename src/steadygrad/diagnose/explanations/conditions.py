"""What an entry may ask of the numbers: small predicates over a Situation, put together in the entries.

Where no operand was measured nothing is refuted, and a condition on one holds. About surroundings (the ops before and
after, the module, a scalar argument) nothing is assumed: what is not known does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from steadygrad.diagnose.explanations.entry import Condition, plain_name
from steadygrad.diagnose.situation import Operand, Scalar, Situation

Key = int | str

LARGEST = {"float16": 65504.0, "bfloat16": 3.38953e38, "float32": 3.40282e38, "float64": 1.79769e308}
"""Largest finite value of each dtype."""
HALF = ("float16",)
VIEWS = (
    "detach",
    "alias",
    "view",
    "unsafe_view",
    "reshape",
    "expand",
    "squeeze",
    "unsqueeze",
    "t",
    "transpose",
    "permute",
)
"""Ops that give the same numbers in another shape."""
COMPLEX = ("complex32", "complex64", "complex128")


def find_operand(situation: Situation, key: Key) -> Operand | None:
    """The operand at that place, or of that name; None when it was not measured."""
    if isinstance(key, int):
        return situation.operands[key] if -len(situation.operands) <= key < len(situation.operands) else None
    # By the name in the op's schema; for a tensor from outside, by its name in the model.
    return next((operand for operand in situation.operands if operand.name == key), None)


def largest_magnitude(operand: Operand) -> float | None:
    """Return the largest absolute value among the finite elements; None when there is none."""
    if operand.minimum is None or operand.maximum is None:
        return None
    return max(abs(operand.minimum), abs(operand.maximum))


def drop_views(ops: tuple[str, ...]) -> tuple[str, ...]:
    """The plain names of those that compute something."""
    return tuple(name for op in ops if (name := plain_name(op)) not in VIEWS)


def about(key: Key, test: Callable[[Operand], bool]) -> Condition:
    """Whether the operand passes `test`; holds when no operand was measured."""

    def holds(situation: Situation) -> bool:
        operand = find_operand(situation, key)
        return not situation.operands if operand is None else test(operand)

    return holds


def has_zeros(key: Key = 0) -> Condition:
    """Whether an element of the operand is 0."""
    return about(key, lambda operand: operand.num_zeros > 0)


def has_negatives(key: Key = 0) -> Condition:
    """Whether an element of the operand is negative."""
    return about(key, lambda operand: operand.num_negative > 0)


def has_infs(key: Key = 0) -> Condition:
    """Whether an element of the operand is infinite."""
    return about(key, lambda operand: operand.num_inf > 0)


def is_single(key: Key = 0) -> Condition:
    """Whether the operand is one number."""
    return about(key, lambda operand: operand.numel == 1)


def is_empty(key: Key = 0) -> Condition:
    """Whether the operand has no element."""
    return about(key, lambda operand: operand.numel == 0)


def reaches(bound: float, key: Key = 0) -> Condition:
    """Whether an element's magnitude is at least `bound`."""

    def test(operand: Operand) -> bool:
        magnitude = largest_magnitude(operand)
        return operand.num_inf > 0 or (magnitude is not None and magnitude >= bound)

    return about(key, test)


def in_dtype(*dtypes: str) -> Condition:
    """Whether the result, or an operand where the result is not known, has one of these dtypes."""

    def holds(situation: Situation) -> bool:
        if situation.output is not None:
            return situation.output.dtype in dtypes
        return any(operand.dtype in dtypes for operand in situation.operands)

    return holds


def takes_dtype(*dtypes: str) -> Condition:
    """Whether an operand, and so the gradient that is computed for it, has one of these dtypes."""
    return lambda situation: any(operand.dtype in dtypes for operand in situation.operands)


def gradient_has_zeros() -> Condition:
    """Whether a gradient of 0 arrived somewhere: the value there was not used."""
    return lambda situation: situation.grad is not None and situation.grad.num_zeros > 0


def is_named(*parts: str, key: Key = 0) -> Condition:
    """Whether the operand's name holds one of `parts`; False when it was not measured."""

    def holds(situation: Situation) -> bool:
        operand = find_operand(situation, key)
        return operand is not None and any(part in operand.name for part in parts)

    return holds


def is_op(*ops: str) -> Condition:
    """Whether the op is one of these: for entries of several."""
    return lambda situation: plain_name(situation.op) in ops


def is_written(*parts: str, key: Key = 0) -> Condition:
    """Whether the program's own expression for the operand holds one of `parts`; False when it is not known."""

    def holds(situation: Situation) -> bool:
        operand = find_operand(situation, key)
        return operand is not None and any(part in operand.source.lower() for part in parts)

    return holds


def comes_from(*ops: str, within: int | None = None, key: Key | None = None) -> Condition:
    """Whether one of these is among the last `within` ops before, or among all that are known.

    `key`: among those that made this operand, where they are known apart from the others'.
    """

    def holds(situation: Situation) -> bool:
        operand = None if key is None else find_operand(situation, key)
        upstream = situation.upstream if operand is None or operand.upstream is None else operand.upstream
        return any(op in ops for op in drop_views(upstream)[:within])

    return holds


def made_by(*ops: str) -> Condition:
    """Whether the last op before is one of these."""
    return comes_from(*ops, within=1)


def comes_from_backward() -> Condition:
    """Whether an operand was itself made by a derivative, as in a gradient penalty."""
    return lambda situation: any(plain_name(op).endswith("_backward") for op in situation.upstream)


def goes_to(*ops: str) -> Condition:
    """Whether one of these ops took the result."""
    return lambda situation: any(op in ops for op in drop_views(situation.downstream))


def feeds(*ops: str, within: int = 1) -> Condition:
    """Whether one of these is among the first `within` ops that took the result."""
    return lambda situation: any(op in ops for op in drop_views(situation.downstream)[:within])


def in_module(*types: str) -> Condition:
    """Whether the innermost module is of one of these classes."""
    return lambda situation: situation.module_type in types


def has_scalar(name: str, test: Callable[[float], bool]) -> Condition:
    """Whether the op was called with a number of that name, and it passes `test`."""

    def holds(situation: Situation) -> bool:
        value: Scalar = situation.scalars.get(name)
        return isinstance(value, int | float) and test(float(value))

    return holds


def has_nonfinite_number(situation: Situation) -> bool:
    """Whether the op was called with a number that is NaN or Inf."""
    return any(isinstance(value, float) and not math.isfinite(value) for value in situation.scalars.values())


def either(*conditions: Condition) -> Condition:
    """Whether at least one of them holds."""
    return lambda situation: any(holds(situation) for holds in conditions)


def both(*conditions: Condition) -> Condition:
    """Whether all of them hold; they count as one."""
    return lambda situation: all(holds(situation) for holds in conditions)


def unless(condition: Condition) -> Condition:
    """It does not hold."""
    return lambda situation: not condition(situation)
