"""Medians of one block of values after another: the slow trend of a noisy series."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from steadygrad.detect.memory import Remembering
from steadygrad.stats import MAD_TO_SIGMA, median, median_deviation


class Blocks(Remembering):
    """Collects values and gives the median of each full block; non-finite values are left out."""

    memory = ("_values", "_opened", "start", "noise")

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: list[float] = []
        self._opened = 0
        self.start = 0
        """Step at which the last full block began."""
        self.noise = 0.0
        """Robust standard error of the last full block's median."""

    @property
    def is_nearly_full(self) -> bool:
        """Whether the next value completes the block."""
        return len(self._values) + 1 >= self._size

    def add(self, step: int, value: float) -> float | None:
        """Return the median of the block that this value completes, else None."""
        # One NaN would leave `sorted` without an order and spoil the whole block
        if not math.isfinite(value):
            return None
        if not self._values:
            self._opened = step
        self._values.append(value)
        if len(self._values) < self._size:
            return None
        ordered, self._values = sorted(self._values), []
        self.start, middle = self._opened, median(ordered)
        mad, _ = median_deviation(ordered, middle)
        self.noise = 1.2533 * MAD_TO_SIGMA * mad / math.sqrt(self._size)  # sqrt(pi / 2): a median's, not a mean's
        return middle

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned; an earlier version did not save where the open block began."""
        super().load_state_dict({"opened": state.get("start", 0) + self._size, **state})
