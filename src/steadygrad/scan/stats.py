"""A chunk of elements -> Stats: NaN, Inf and zeros counted, least, largest and sum of squares of what is finite.

A healthy chunk costs a pass for the extremes (NaN and Inf show in them), one for the squares and one for zeros, all
while it lies in the processor's cache; only a chunk that is not finite is looked at more closely. Stats of chunks
add up to those of their tensor, in any order but for the rounding of the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SQUARED = 1e15
"""Up to here a chunk's sum of squares stays below float32's 3e38, and down to its inverse above its smallest."""


@dataclass(slots=True)
class Stats:
    """What is known of some elements. `least` and `largest` are over finite ones: inf and -inf while there is none."""

    num_elements: int = 0
    num_nan: int = 0
    num_inf: int = 0
    num_zeros: int = 0
    least: float = math.inf
    largest: float = -math.inf
    sum_squares: float = 0.0

    @property
    def num_nonfinite(self) -> int:
        return self.num_nan + self.num_inf

    def add(self, other: Stats) -> None:
        """Take in the elements of another chunk."""
        self.num_elements += other.num_elements
        self.num_nan += other.num_nan
        self.num_inf += other.num_inf
        self.num_zeros += other.num_zeros
        self.least = min(self.least, other.least)
        self.largest = max(self.largest, other.largest)
        self.sum_squares += other.sum_squares


class ChunkMeter:
    """Measures flat chunks on the CPU. Memory for what is computed on the way is kept from one to the next: asking the
    system for a fresh megabyte each time can cost twenty times the measuring."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, device="cpu")

    def measure(self, chunk: Tensor) -> Stats:
        """Return the stats of a chunk; of complex elements the real and the imaginary parts are looked at."""
        values = self._as_floats(chunk)
        if values.numel() == 0:
            return Stats()
        low, high = (float(end) for end in torch.aminmax(values))  # NaN anywhere makes both NaN
        if not (math.isfinite(low) and math.isfinite(high)):
            return self._measure_bad(values)
        squares = _sum_squares(values, max(-low, high))
        num_zeros = self._count_zeros(values) if low <= 0.0 <= high else 0  # last: it may write over the values
        return Stats(values.numel(), 0, 0, num_zeros, low, high, squares)

    def _measure_bad(self, values: Tensor) -> Stats:
        # Both before the recursion, which may write over the scratch that `values` is a view of
        finite, num_nan = values[values.isfinite()], int(values.isnan().sum())
        stats = self.measure(finite)
        stats.num_elements, stats.num_nan = values.numel(), num_nan
        stats.num_inf = values.numel() - num_nan - finite.numel()
        return stats

    def _as_floats(self, chunk: Tensor) -> Tensor:
        if chunk.dtype in (torch.float32, torch.float64):
            return chunk
        if chunk.is_complex():
            return torch.view_as_real(chunk).reshape(-1)
        if chunk.is_floating_point() or chunk.element_size() == 1:
            return self._take_scratch(chunk.numel()).copy_(chunk)
        return chunk.to(torch.float64)

    def _count_zeros(self, values: Tensor) -> int:
        """Of finite values. Weights are seldom exactly 0; that there is none shows three times as fast as a count."""
        single = values.dtype == torch.float32
        sizes = torch.abs(values, out=self._take_scratch(values.numel())) if single else values.abs()
        if float(sizes.amin()) > 0.0:
            return 0
        return values.numel() - round(float(sizes.sign_().sum(dtype=torch.float64)))

    def _take_scratch(self, num_elements: int) -> Tensor:
        if self._scratch.numel() < num_elements:
            self._scratch = torch.empty(num_elements, device="cpu")
        return self._scratch[:num_elements]


def _sum_squares(values: Tensor, largest: float) -> float:
    if not 1.0 / LARGEST_SQUARED < largest < LARGEST_SQUARED:
        values = values.double()
    return float(torch.dot(values, values))
