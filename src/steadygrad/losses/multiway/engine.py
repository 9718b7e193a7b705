"""What a sweep asks of an implementation: the sums of one panel of logits, and the pull of their gradient.

An engine may cut a panel into tiles; it must return the same numbers whatever the cut, and keep nothing of the panel's
size beyond the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from steadygrad.losses.multiway.precision import Precision


@dataclass(frozen=True)
class Side:
    """For each row (or column) of a panel: no logit is above `peak`; dLoss/dL holds exp(L - peak) * weight."""

    peak: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Diagonal:
    """The places of the positives in a panel: (row + j * row_step, column + j * column_step) for j < num.

    They are left out of every sum. What is left is a sum of negatives, and the loss softplus(sum - positive): never
    below zero, exact where it is tiny, and the positive's own weight never goes through a rounded matmul.
    """

    row: int
    row_step: int
    column: int
    column_step: int
    num: int


@dataclass(frozen=True)
class Panel:
    """All logits between some rows of P and all rows of Q: curve(unit * p q^T), less those of samples with themselves.

    Both are contiguous. `unit` is there if the halves were multiplied by something: see `precision.Gains`. With
    `num_low` the halves begin with that many low parts, see `layout`: p q^T is then low * high + high * low + the rest.
    """

    p: Tensor
    q: Tensor
    positives: Diagonal
    unit: Tensor | None = None
    num_low: int = 0
    highest: Tensor | None = None
    """Where the sums keep the highest logit of all panels, a number that is at least MASKED before."""


class Engine(Protocol):
    """`tiled.TiledEngine` on any device, `triton.TritonEngine` on CUDA."""

    @property
    def fuses(self) -> bool:
        """Whether `fused.sum_combinations` can run on it, in place of `sweep.sum_combinations`."""
        ...

    @property
    def precision(self) -> Precision:
        """What the halves are rounded to."""
        ...

    def count_rows(self, num_columns: int, depth: int, *, pull: bool) -> int:
        """Return how many rows a panel may have when summed, or pulled, so that what the engine holds stays small."""
        ...

    def sum_rows(self, panel: Panel) -> Tensor:
        """Return the first of `sum_panel` alone."""
        ...

    def sum_panel(self, panel: Panel) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp of each row and of each column; about MASKED if empty."""
        ...

    def pull_panel(self, panel: Panel, rows: Side, columns: Side | None, grad_q: Tensor) -> Tensor:
        """Return grad_p of the panel; grad_q is added to in place.

        W = (exp(L - rows.peak) * rows.weight + exp(L - columns.peak) * columns.weight) * slope, 0 at the
        positives; grad_p = W q, grad_q += W^T p. Without `columns` their term is zero.
        """
        ...
