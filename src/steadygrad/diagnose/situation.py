"""What is known about the op that failed, in plain numbers: what explanations are chosen by.

Made by the replay from live tensors, read by `explanations/`; no torch here, so that an explanation can be tested from
numbers alone and an incident can be explained again from its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Scalar = bool | int | float | str | None

LONGEST_TITLE = 60
PLAIN_NAMES = {"self": "the first operand", "other": "the second operand"}
"""Names in schemas that say nothing to a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One tensor that went into an op or came out of it. Ranges are over its finite elements."""

    name: str
    """The argument's name in the op's schema: 'self', 'other', 'weight'."""
    source: str = ""
    """The program's own expression for it; empty where its line does not show one."""
    dtype: str
    """As torch prints it without the prefix: 'float32'."""
    shape: tuple[int, ...]
    minimum: float | None = None
    maximum: float | None = None
    """None when no element is finite, or there is none."""
    smallest: float | None = None
    """Smallest magnitude that is not zero."""
    num_zeros: int = 0
    num_negative: int = 0
    """-inf counts."""
    num_nan: int = 0
    num_inf: int = 0
    """Of either sign."""
    upstream: tuple[str, ...] | None = None
    """The ops that made it, nearest first; None where that is not known."""

    @property
    def title(self) -> str:
        """What a reader knows it by."""
        if self.source:
            return self.source if len(self.source) <= LONGEST_TITLE else f"{self.source[: LONGEST_TITLE - 3]}..."
        return PLAIN_NAMES.get(self.name, self.name)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The op where a non-finite value was born, and what surrounds it."""

    op: str
    """'aten.sqrt'; in backward the forward op whose derivative failed."""
    phase: str
    """'forward', 'loss', 'backward', 'optimizer', 'input', 'parameter'."""
    kind: str
    """'nan' or 'inf': what was born first."""
    operands: tuple[Operand, ...] = ()
    """The forward op's tensor inputs, in backward too."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """The op's other arguments by their names in the schema: exponent, dim, eps, correction."""
    output: Operand | None = None
    """What the forward op gave."""
    grad: Operand | None = None
    """In backward: the gradient that arrived at the op."""
    upstream: tuple[str, ...] = ()
    """The ops that made the operands, nearest first: 'aten.masked_fill', 'aten.sum'."""
    downstream: tuple[str, ...] = ()
    """The ops that took the result, nearest first."""
    module_type: str | None = None
    """Class name of the innermost module: 'BatchNorm1d'."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The program's own expressions for the operands."""
        return tuple(operand.source for operand in self.operands)
