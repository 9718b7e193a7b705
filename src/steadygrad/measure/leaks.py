"""LeakWatch: the labels of a classification and the columns of its input table -> a LeakedLabel.

A column that follows the labels exactly, scaled or not, is the label itself, left in the table. Sums of the first
batches tell: a correlation of 1 over hundreds of rows. Regressions are left out, where a target may well be a function
of one input. Cost: a few small reductions in the first four backwards, and up to 64 only if a column looks like it;
one asynchronous copy. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import LeakedLabel
from steadygrad.measure.loss_graph import Labels, find_losses, shorten
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.saved import read_saved
from steadygrad.measure.transfer import Transfer
from steadygrad.state.tree import find_tensors

NUM_FIRST, NUM_ALL = 4, 64
"""Batches after which most programs are done, and after which the result is final."""
FEWEST_ROWS, FEWEST_OF_CLASS = 512, 16
"""Rows, and rows with the rarer of the first label and the others, below which a column may follow it by chance."""
UNEXPLAINED = 1e-6
"""Share of a column's variance that the label may leave: rounding of float32 leaves 1e-12, of bfloat16 1e-6."""
SUSPICIOUS = 0.01
"""The same after the first batches."""
MOST_COLUMNS = 4096
BINARY = frozenset(("BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"))


class LeakWatch:
    """Adds up the first batches; `take` returns a column that holds the labels."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._first: Tensor | None = None
        self._sums: Tensor | None = None
        self._name = ""
        self._num_batches = 0
        self._pending: tuple[int, PendingRows] | None = None
        self.wants_more = True
        """Whether the next backward is to be looked at."""

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return self._pending is not None

    def note(
        self, step: int, loss: Tensor, labels: Sequence[Labels], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Add a batch: the arguments of the model's call, and the labels of its only loss."""
        self.wants_more = False  # should this batch be unlike the others, or fail
        found = _find_table(_find_labels(loss, labels), args, kwargs)
        if found is None or (self._sums is not None and found[1].shape[1] + 1 != len(self._sums)):
            return
        self._name, table, target = found
        with torch.no_grad():
            values = torch.cat([table.detach().double(), target.detach().double()[:, None]], 1)
            self._first = values[0] if self._first is None else self._first
            sums = _add_up(values - self._first)
        self._sums = sums if self._sums is None else self._sums + sums
        self._num_batches += 1
        if self._num_batches in (NUM_FIRST, NUM_ALL):
            self._pending = step, send_rows({"leak": _find_closest(self._sums)}, self._transfer)
        self.wants_more = self._num_batches < NUM_ALL

    def take(self, step: int) -> list[LeakedLabel]:
        """Return the column, once it is certain."""
        if self._pending is None or self._pending[0] > step:
            return []
        (when, rows), self._pending = self._pending, None
        column, unexplained, num_rows, num_others = rows.read()["leak"]
        if self._num_batches < NUM_ALL:
            # `not >`: NaN, where all labels have been the same so far, may still become a number.
            self.wants_more &= not unexplained > SUSPICIOUS
            return []
        is_enough = num_rows >= FEWEST_ROWS and num_others >= FEWEST_OF_CLASS
        if not is_enough or not unexplained <= UNEXPLAINED:
            return []
        return [LeakedLabel(step=when, tensor=self._name, column=int(column), num_rows=int(num_rows))]


def _find_labels(loss: Tensor, labels: Sequence[Labels]) -> Tensor | None:
    """Return the labels of the only loss, one for each sample."""
    if len(labels) == 1:
        return labels[0].target if labels[0].target.dim() == 1 and labels[0].ignore_index < 0 else None
    nodes = list(find_losses(loss.grad_fn))
    if labels or len(nodes) != 1 or shorten(nodes[0]) not in BINARY:
        return None
    target = read_saved(nodes[0], "target")
    return target.flatten() if target is not None and target.dim() and target.numel() == len(target) else None


def _find_table(
    target: Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, Tensor, Tensor] | None:
    """Return the only input, if it is a table with a row for each label."""
    inputs = list(find_tensors(args, kwargs))
    if target is None or len(inputs) != 1 or not is_readable(target):
        return None
    name, table = inputs[0]
    fits = table.dim() == 2 and len(table) == len(target) and 1 < table.shape[1] <= MOST_COLUMNS
    if not fits or not table.is_floating_point() or not is_readable(table) or table.device != target.device:
        return None
    return name, table, target


@torch.no_grad()
def _add_up(values: Tensor) -> Tensor:
    """Return [columns, 5]: sums of values, squares and products with the label, rows, and rows with the first label.

    `values` are relative to the first row, as squares of large numbers lose their digits; the label is the last column.
    """
    labels = values[:, -1:]
    num, same = torch.full_like(values[0], len(values)), (labels == 0).sum(0).expand(values.shape[1])
    return torch.stack([values.sum(0), values.square().sum(0), (values * labels).sum(0), num, same], 1)


@torch.no_grad()
def _find_closest(sums: Tensor) -> Tensor:
    """Return the column nearest to the labels, the share of its variance they leave, rows, and rows with the rarer of
    the first label and the others."""
    totals, squares, products, (num, *_), (same, *_) = sums.unbind(1)
    variances = squares / num - (totals / num) ** 2
    together = products / num - totals * totals[-1] / num**2
    unexplained = (1 - together**2 / (variances * variances[-1])).abs()[:-1]
    unexplained = torch.where(variances[:-1] > 0, unexplained, torch.inf)  # NaN where all labels are the same
    least, best = unexplained.min(0)  # not unexplained[argmin]: an index on the device would wait for it
    return torch.stack([best.double(), least, num, torch.minimum(same, num - same)])
