"""Tally: totals over the run, kept as Readings come by. Plain numbers, resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steadygrad.facts import Reading


@dataclass(slots=True)
class Tally:
    """Counts and sums; norms of non-finite steps are left out."""

    num_steps: int = 0
    num_skipped: int = 0
    num_clipped: int = 0
    num_dropped_microbatches: int = 0
    num_measured: int = 0
    norm_sum: float = 0.0
    norm_max: float = 0.0

    def add(self, reading: Reading) -> None:
        """Count one judged step."""
        self.num_steps += 1
        self.num_skipped += reading.skipped
        self.num_clipped += reading.clipped
        self.num_dropped_microbatches += reading.num_dropped_microbatches
        if not reading.is_nonfinite:
            self.num_measured += 1
            self.norm_sum += reading.grad_norm
            self.norm_max = max(self.norm_max, reading.grad_norm)

    @property
    def norm_mean(self) -> float:
        """Mean gradient norm of the finite steps; 0 before the first."""
        return self.norm_sum / max(1, self.num_measured)

    def state_dict(self) -> dict[str, Any]:
        """The totals."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the totals of `state_dict()`."""
        for name, value in state.items():
            setattr(self, name, value)
