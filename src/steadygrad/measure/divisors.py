"""The divisors of a graph -> Divisions: how small is the smallest? Queued without a wait, for the first step only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.facts.program import Divisions
from steadygrad.measure.rows import PendingRows, is_readable, send_rows


class PendingDivisions:
    """A scan of divisors whose number is still being copied."""

    def __init__(self, rows: PendingRows) -> None:
        self._rows = rows

    def read(self, step: int) -> Divisions:
        """Return the number as that of `step`."""
        numbers = [row[0] for row in self._rows.read().values()]
        return Divisions(step=step, smallest=min(numbers, default=math.inf))


@torch.no_grad()
def scan_divisors(divisors: Sequence[Tensor]) -> PendingDivisions:
    """Queue a scan of these tensors."""
    rows = {
        str(i): divisor.detach().abs().amin().double().reshape(1)
        for i, divisor in enumerate(divisors)
        if divisor.numel() and is_readable(divisor) and not divisor.is_complex()
    }
    return PendingDivisions(send_rows(rows) if rows else PendingRows())
