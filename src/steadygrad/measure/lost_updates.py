"""LostUpdatesWatch: half-precision weights before and after some steps -> LostUpdates: does rounding swallow them?

A step of a thousandth of a weight's size is lost in bfloat16, which has three digits, and is lost again at every step.
A few hundred elements of each parameter are copied before the first step and compared after 8, 32 and 96. Cost: nothing
for float32; otherwise one small kernel a parameter at these steps, sent without waiting. Reads only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.facts.program import LostUpdates
from steadygrad.measure.gradients import is_dtensor
from steadygrad.measure.rows import PendingRows, send_rows
from steadygrad.measure.transfer import Transfer

LOOKS = (8, 32, 96)
"""Steps after which the weights are compared with their start."""
SAMPLE = 512
MOST_PARAMETERS = 64
HALVES = (torch.bfloat16, torch.float16)


class LostUpdatesWatch:
    """Holds samples of the weights as they were before the first step."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], transfer: Transfer | None = None) -> None:
        halves = [p for _, p in named if p.dtype in HALVES and p.numel() and not is_dtensor(p)]
        self._parameters = halves[:: max(1, len(halves) // MOST_PARAMETERS)]
        self._transfer = transfer
        self._start: list[Tensor] = []
        self._num_steps = 0
        self._first_rate = 0.0
        self._pending: list[tuple[int, int, int, bool, PendingRows]] = []

    def begin(self) -> None:
        """Copy the samples."""
        self._start = [_take(p).clone() for p in self._parameters]
        self._num_steps = 0

    @torch.no_grad()
    def after_optimizer(self, step: int, rate: float) -> None:
        """Compare after some of the steps, while the gradients are there; `rate`: the largest learning rate."""
        if not self._start:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._first_rate = rate
        if self._num_steps not in LOOKS:
            return
        counts = [_count(p, start) for p, start in zip(self._parameters, self._start) if p.grad is not None]
        if counts:
            row = torch.stack([number.to(counts[0][0].device) for pair in counts for number in pair])
            sums = torch.stack([row[::2].sum(), row[1::2].sum()]).double()
            rose = rate > 1.01 * self._first_rate
            rows = send_rows({"lost": sums}, self._transfer)
            self._pending.append((step, self._num_steps, sum(map(len, self._start)), rose, rows))
        if self._num_steps == LOOKS[-1]:
            self._start = []

    def take(self, step: int) -> list[LostUpdates]:
        """Return the comparisons made by `step`."""
        if not self._pending:
            return []
        waiting, self._pending = self._pending, [one for one in self._pending if one[0] > step]
        facts = []
        for when, num_steps, num_elements, rose, rows in waiting:
            if when <= step:
                same, pushed = rows.read()["lost"]
                facts.append(
                    LostUpdates(
                        step=when,
                        num_steps=num_steps,
                        unchanged_share=same / pushed if pushed else 0.0,
                        num_elements=num_elements,
                        dtype=str(self._parameters[0].dtype).removeprefix("torch."),
                        rate_rose=rose,
                    )
                )
        return facts


def _take(parameter: Tensor) -> Tensor:
    values = parameter.detach().reshape(-1)
    return values[:: max(1, len(values) // SAMPLE)][:SAMPLE]


def _count(parameter: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many sampled elements have a gradient and are as they were, and how many have a gradient."""
    assert parameter.grad is not None
    pushed = _take(parameter.grad) != 0
    return (pushed & (_take(parameter) == start)).sum(), pushed.sum()
