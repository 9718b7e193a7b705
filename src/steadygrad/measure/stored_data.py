"""StoredDataWatch: inputs that drift -> whether the dataset itself is being changed, as StoredDataChanges.

Drifting inputs alone are normal (a curriculum, a policy that improves). Only when they drift are the datasets of live
DataLoaders looked up, and a sample of the arrays they keep is compared over time: data that is only read must not
change. An array that is overwritten (a replay buffer) has new values, unrelated to the old ones; one transformed in
place has values that still follow the old ones. Two samples one step apart tell whether reading changes it, row by row,
or the program changes all of it at once, as a curriculum does. Cost: mean and spread of a sample of the input every
4th step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.facts.program import StoredDataChange
from steadygrad.measure.loaders import list_loaders
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer

EVERY, MANY_STEPS = 4, 256
"""Steps between two measurements of the input, of the first steps; later ones are less frequent."""
SAMPLE = 1024
NUM_FIRST, NUM_LAST = 6, 4
"""Measurements that are averaged: at the start, and now."""
DRIFT = 0.5
"""How far the mean must have moved, in standard deviations of the first inputs, or the log of their spread."""
GAP = 48
"""Steps between two looks at the stored data."""
MOST_LOOKS = 8
NUM_ROWS, NUM_COLUMNS = 128, 16
EXACT = 0.9999
"""Correlation within a row above which it is a linear function of the old row."""
MAX_DEPTH = 3


class StoredDataWatch:
    """Notes the inputs; looks at datasets only when those drift."""

    def __init__(self, transfer: Transfer | None = None) -> None:
        self._transfer = transfer
        self._pending: list[tuple[int, PendingRows]] = []
        self._first: list[tuple[float, float]] = []
        self._last: list[tuple[float, float]] = []
        self._samples: dict[str, tuple[Tensor, Tensor]] = {}
        self._unread: dict[str, Tensor] = {}  # samples of the last look, until the step after it
        self._by_rows: set[str] = set()
        self._next_look, self._num_looks = -1, 0
        self._is_over = False

    @property
    def has_news(self) -> bool:
        """Whether `take` may return something."""
        return bool(self._pending) or self._next_look >= 0

    def is_due(self, step: int) -> bool:
        """Whether the batch of `step` is to be noted."""
        every = EVERY if step < MANY_STEPS else MANY_STEPS // 4
        return not self._is_over and step % every == 0 and self._next_look < 0

    def note_batch(self, step: int, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Note the first floating-point tensor of a batch."""
        try:
            for _, tensor in tensors:
                if tensor.is_floating_point() and tensor.numel() > 1 and tensor.dim() > 1 and is_readable(tensor):
                    self._pending.append((step, send_rows({"input": _describe(tensor)}, self._transfer)))
                    return
        except Exception:  # an unusual batch: the watch ends, the training goes on
            self._is_over = True

    def take(self, step: int) -> list[StoredDataChange]:
        """Return changes of stored data that have shown by `step`."""
        if self._is_over:
            return []
        try:
            waiting, self._pending = self._pending, [one for one in self._pending if one[0] > step]
            for when, rows in waiting:
                if when <= step:
                    self._admit(*rows.read()["input"])
            if self._next_look < 0 and self._drifts():
                self._next_look = step
            if self._unread and step > self._next_look - GAP:
                self._compare_rows()
            return list(self._look(step)) if 0 <= self._next_look <= step else []
        except Exception:  # an unusual dataset: likewise
            self._is_over = True
            return []

    def _admit(self, mean: float, std: float) -> None:
        if not (math.isfinite(mean) and math.isfinite(std)):
            return
        if len(self._first) < NUM_FIRST:
            self._first.append((mean, std))
        else:
            self._last = [*self._last[1 - NUM_LAST :], (mean, std)]

    def _drifts(self) -> bool:
        if len(self._last) < NUM_LAST:
            return False
        mean, std = (sum(column) / NUM_FIRST for column in zip(*self._first))
        now, spread = (sum(column) / NUM_LAST for column in zip(*self._last))
        if std <= 0:
            return False
        return abs(now - mean) > DRIFT * std or abs(math.log(max(spread, 1e-30) / std)) > DRIFT

    def _compare_rows(self) -> None:
        """Note the arrays of which one step has changed some rows, and not all."""
        before, self._unread = self._unread, {}
        for name, array in find_stored():
            sample, last = _take_sample(array), before.get(name)
            if sample is None or last is None or last.shape != sample.shape:
                continue
            has_changed = (sample != last).any(1)
            if bool(has_changed.any()) and not bool(has_changed.all()):
                self._by_rows.add(name)

    def _look(self, step: int) -> Iterator[StoredDataChange]:
        """Compare samples of the stored arrays with those of the look before."""
        self._next_look, self._num_looks = step + GAP, self._num_looks + 1
        self._is_over = self._num_looks == MOST_LOOKS
        before, self._samples = self._samples, {}
        for name, array in find_stored():
            sample = _take_sample(array)
            if sample is None:
                continue
            first, last = before.get(name, (sample, sample))
            self._samples[name], self._unread[name] = (first, sample), sample
            if last.shape != sample.shape or torch.equal(last, sample):
                continue
            yield StoredDataChange(
                step=step,
                name=name,
                changed_share=float((last != sample).double().mean()),
                correlation=_correlate(last, sample),
                mean=(float(first.mean()), float(sample.mean())),
                std=(float(first.std()), float(sample.std())),
                by_rows=name in self._by_rows,
            )
        self._is_over |= not self._samples


def find_stored() -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point arrays that datasets of live DataLoaders keep in this process, under their names."""
    seen: set[int] = set()
    for loader in list_loaders():
        yield from _open(loader.dataset, type(loader.dataset).__name__, seen, MAX_DEPTH)


def _open(holder: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if id(holder) in seen or not depth:
        return
    seen.add(id(holder))
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        for i, item in enumerate(value[:4] if isinstance(value, list | tuple) else [value]):
            where = f"{path}.{name}" if not isinstance(value, list | tuple) else f"{path}.{name}[{i}]"
            if isinstance(item, Tensor):
                yield where, item
            elif type(item).__module__ == "numpy" and getattr(getattr(item, "dtype", None), "kind", "") == "f":
                yield where, torch.as_tensor(item, device="cpu")
            elif isinstance(item, torch.utils.data.Dataset):
                yield from _open(item, where, seen, depth - 1)


def _take_sample(array: Tensor) -> Tensor | None:
    """Return a few columns of some rows: [rows, columns]; None if it cannot be read."""
    if not array.is_floating_point() or array.numel() < 2 or not array.dim() or not is_readable(array):
        return None
    if array.device.type != "cpu":
        return None
    rows = array.detach()[:: max(1, len(array) // NUM_ROWS)].reshape(
        -(-len(array) // max(1, len(array) // NUM_ROWS)), -1
    )
    # clone(): float() of a float32 array is the array itself, which the program goes on changing.
    return rows[:, :: max(1, rows.shape[1] // NUM_COLUMNS)].float().clone()


def _correlate(one: Tensor, other: Tensor) -> float:
    """Return how closely new values follow the old ones: over the rows of each column, or within each row.

    Rows that were transformed a different number of times follow their own old values alone, and exactly.
    """
    within = (
        _correlation(one, other, 1).abs().median()
        if one.shape[1] >= NUM_COLUMNS // 2
        else torch.zeros((), device="cpu")
    )
    over = _correlation(one, other, 0).abs().median()
    return float(max(over, within if within > EXACT else torch.zeros((), device="cpu")))


def _correlation(one: Tensor, other: Tensor, dim: int) -> Tensor:
    a, b = one - one.mean(dim, keepdim=True), other - other.mean(dim, keepdim=True)
    scale = a.norm(dim=dim) * b.norm(dim=dim)
    # Constant values follow the old ones by definition; the clamp keeps the other branch from 0 / 0.
    return torch.where(scale > 0, (a * b).sum(dim) / scale.clamp(min=1e-30), 1.0)


@torch.no_grad()
def _describe(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    values = values[: max(1, 8 * SAMPLE * len(values) // values.numel())].reshape(-1)
    values = values[:: max(1, values.numel() // SAMPLE)].double()
    return torch.stack([values.mean(), values.std(correction=0)])
