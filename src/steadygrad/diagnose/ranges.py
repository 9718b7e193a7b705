"""RangeTable: tensors as they are made -> smallest and largest value of each, read together at the end.

One reduction a tensor on its own device, no mask, no host read until `read()`: NaN anywhere makes both numbers NaN, an
infinity is one of them. So a few bytes a tensor tell NaN, +Inf and -Inf apart, and nothing of the tensor is kept alive.
Integers are not looked at. Reads only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.measure.rows import is_readable


@dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest element; NaN when one is."""

    low: float = 0.0
    high: float = 0.0

    @property
    def has_nan(self) -> bool:
        """Whether an element is NaN; then nothing is known about infinities."""
        return math.isnan(self.low) or math.isnan(self.high)

    @property
    def is_nonfinite(self) -> bool:
        """Whether an element is NaN or Inf."""
        return not (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def has_only_minus_inf(self) -> bool:
        """Whether the only values that are not finite are -Inf, as in a mask."""
        return self.low == -math.inf and self.high < math.inf  # a NaN fails both

    @property
    def max_abs(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))


FINITE = Range()
NO_SLOT = -1
"""The slot of what cannot hold a NaN: integers, tensors without elements."""


class RangeTable:
    """Add tensors while they live; read all ranges once."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._places: list[tuple[tuple[torch.device, torch.dtype], int]] = []
        self._ranges: list[Range] = []

    def add(self, tensor: Tensor) -> int:
        """Return the slot of `tensor`'s range. Call it outside any dispatch mode."""
        values = _as_reals(tensor)
        if values is None:
            return NO_SLOT
        # Propagates NaN. The results are new tensors of one element: nothing refers to `values` afterwards.
        low, high = torch.aminmax(values)
        key = (low.device, low.dtype)
        some = self._pairs.setdefault(key, [])
        some += (low, high)
        self._places.append((key, len(some) - 2))
        return len(self._places) - 1

    def read(self) -> None:
        """Bring all ranges to the host: one read for each device and dtype."""
        numbers = {key: torch.stack(pairs).double().tolist() for key, pairs in self._pairs.items()}
        self._ranges = [Range(numbers[key][at], numbers[key][at + 1]) for key, at in self._places]
        self._pairs, self._places = {}, []

    def __getitem__(self, slot: int) -> Range:
        return FINITE if slot == NO_SLOT else self._ranges[slot]

    def any_nonfinite(self, slots: Sequence[int]) -> bool:
        """Whether one of `slots` holds a NaN or an Inf."""
        return any(self[slot].is_nonfinite for slot in slots)


def _as_reals(tensor: Tensor) -> Tensor | None:
    """Return a strided floating view of the elements; None when there is nothing to look at."""
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    if not is_readable(tensor) or tensor.numel() == 0:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.element_size() == 1:  # float8 has few operators
        tensor = tensor.float()
    return tensor
