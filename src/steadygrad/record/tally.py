"""Tally: totals over the run, kept as Readings and Outcomes come by. Plain numbers, bounded, resumable."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from steadygrad.facts import NUM_COLUMNS, Action, Outcome, Reading

MAX_NORMS = 4096
"""Norms remembered for quantiles."""
MAX_RATIOS = 512
"""Update ratios remembered."""


class Tally:
    """Counts and sums; norms of non-finite steps are left out."""

    COUNTS = ("num_steps", "num_skipped", "num_clipped", "num_dropped_microbatches", "num_measured")

    def __init__(self) -> None:
        self.num_steps = self.num_skipped = self.num_clipped = self.num_dropped_microbatches = self.num_measured = 0
        self.norm_sum = self.norm_max = 0.0
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        """Of the finite steps."""
        self.best_loss: tuple[float, int] | None = None
        """The lowest loss, and its step."""
        self.norms: deque[float] = deque(maxlen=MAX_NORMS)
        self.ratios: deque[float] = deque(maxlen=MAX_RATIOS)
        """Update / weight of the median parameter, at the steps at which that was measured."""
        self.dominated: Counter[str] = Counter()
        """Parameter -> clipped steps in which its gradient was the largest."""
        self.nonfinite: Counter[str] = Counter()
        """Parameter -> steps in which its gradient was not finite."""
        self.actions: Counter[str] = Counter()
        """Action -> how often it was taken beyond the reflex."""

    def add(self, reading: Reading) -> None:
        """Count one judged step."""
        self.num_steps += 1
        self.num_skipped += reading.skipped
        self.num_clipped += reading.clipped
        self.num_dropped_microbatches += reading.num_dropped_microbatches
        # One NaN in norm_sum would stay for the rest of the run, and in every resumed one.
        if reading.is_nonfinite:
            self.nonfinite.update(list(reading.gradients.nonfinite()))
            return
        self.num_measured += 1
        self._add_loss(reading.loss, reading.step)
        self.norm_sum += reading.grad_norm
        self.norm_max = max(self.norm_max, reading.grad_norm)
        self.norms.append(reading.grad_norm)
        if reading.update_ratios:
            self.ratios.append(statistics.median(reading.update_ratios.values()))
        if reading.clipped and reading.gradients:
            norms = reading.gradients.cells[::NUM_COLUMNS]
            self.dominated[reading.gradients.names[norms.index(max(norms))]] += 1

    def _add_loss(self, loss: float | None, step: int) -> None:
        if loss is None or not math.isfinite(loss):
            return
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss
        if self.best_loss is None or loss < self.best_loss[0]:
            self.best_loss = (loss, step)

    def add_outcome(self, outcome: Outcome) -> None:
        """Count what was done about a finding."""
        if outcome.action not in (Action.NONE, Action.CLIP, Action.SKIP):
            self.actions[outcome.action.value] += 1

    @property
    def norm_mean(self) -> float:
        """Mean gradient norm of the finite steps; 0 before the first."""
        return self.norm_sum / max(1, self.num_measured)

    def norm_quantile(self, share: float) -> float:
        """Return the norm below which `share` of the remembered steps lie; 0 before the first."""
        ordered = sorted(self.norms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the totals, as plain numbers, lists and dicts."""
        counts = {name: getattr(self, name) for name in self.COUNTS}
        counters = {name: dict(getattr(self, name)) for name in ("dominated", "nonfinite", "actions")}
        return {
            **counts,
            **counters,
            "norm_sum": self.norm_sum,
            "norm_max": self.norm_max,
            "losses": [self.first_loss, self.last_loss, *(self.best_loss or (None, None))],
            "norms": list(self.norms),
            "ratios": list(self.ratios),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the totals of `state_dict()`."""
        for name in (*self.COUNTS, "norm_sum", "norm_max"):
            setattr(self, name, state[name])
        for name in ("dominated", "nonfinite", "actions"):
            setattr(self, name, Counter(state[name]))
        # `get`: states saved before these were kept have neither.
        self.first_loss, self.last_loss, best, step = state.get("losses", (None,) * 4)
        self.best_loss = None if best is None else (best, int(step))
        self.norms = deque(state["norms"], maxlen=MAX_NORMS)
        self.ratios = deque(state.get("ratios", ()), maxlen=MAX_RATIOS)
