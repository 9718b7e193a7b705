"""BreakdownWatch: Readings and Findings of an attempt, step by step -> is it still training, or has it broken down?

A non-finite loss, non-finite weights, a loss well above its starting level, an error reported by the rules: each is a
breakdown. Findings about the data or the program, rather than the settings, are ignored. Pure: it takes no action and
holds only a few numbers.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from steadygrad.facts import Finding, Reading, Severity
from steadygrad.facts.kinds import find_kind
from steadygrad.stats import MAD_TO_SIGMA

NUM_LAST = 3
"""Number of recent losses whose median must be above the start: a single batch can be, by chance."""
NUM_OVERFLOWS = 6
"""Consecutive overflows that a loss scaler's search for its scale no longer explains: a factor of 2 ** 6."""
RISE_SCORE = 4.0
"""The loss has left its starting level when it is this many standard deviations of the first losses above them."""
RISE_SHARE = 0.1
"""... and at least this fraction of their level."""


class BreakdownWatch:
    """Finds the step at which an attempt breaks down, and why."""

    def __init__(self, *, num_first: int, level: float | None = None, spread: float = 0.0) -> None:
        """`num_first`: how many losses make up the start; `level` and `spread` reuse the start of another attempt."""
        self._first: list[float] = []
        self._num_first = num_first if level is None else 0
        self._level, self._spread = level, spread
        self._last: deque[float] = deque(maxlen=NUM_LAST)
        self._num_overflows = 0

    @property
    def start(self) -> tuple[float, float] | None:
        """Level and spread of the first losses; None until enough have been seen."""
        return None if self._level is None else (self._level, self._spread)

    def observe(self, reading: Reading, findings: Sequence[Finding], change: float | None = None) -> str | None:
        """Return why the attempt broke down at this step, or None if it did not.

        `change`: how much the loss differs from what the same batch gave at the start, where that is known.
        """
        if any(finding.kind == "nonfinite_input" and _matters(finding) for finding in findings):
            return None
        if reading.loss_is_nonfinite:
            return "the loss was not finite"
        if reading.num_nonfinite:
            self._num_overflows += 1
            if reading.loss_scale is None or self._num_overflows >= NUM_OVERFLOWS:
                return "the gradients were not finite"
            return None
        self._num_overflows = 0
        severe = [f for f in keep_reporting(findings) if f.severity.rank >= Severity.ERROR.rank]
        if severe:
            return severe[0].message
        if reading.loss is None:
            return None
        # The change of one batch against itself, without the noise between batches.
        fair = reading.loss if change is None or self._level is None else self._level + change
        return self._look_at_loss(reading.loss, fair)

    def _look_at_loss(self, loss: float, fair: float) -> str | None:
        if len(self._first) < self._num_first:
            self._first.append(loss)
            if len(self._first) == self._num_first:
                self._level = statistics.median(self._first)
                self._spread = MAD_TO_SIGMA * statistics.median(abs(x - self._level) for x in self._first)
            return None
        self._last.append(fair)
        assert self._level is not None
        limit = self._level + max(RISE_SCORE * self._spread, RISE_SHARE * abs(self._level))
        now = statistics.median(self._last)
        if len(self._last) < NUM_LAST or now <= limit:
            return None
        return f"the loss rose to {now:.4g}, from {self._level:.4g} at the start"


def keep_reporting(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings above info that the settings may have caused."""
    return [finding for finding in findings if _matters(finding) and find_kind(finding.kind).of_settings]


def _matters(finding: Finding) -> bool:
    return finding.severity is not Severity.INFO
