"""Judged steps and the clock -> a line that says how far a training is, and how long the rest will take."""

from __future__ import annotations

import time

from steadygrad.facts import StepRecord
from steadygrad.view.progress import describe_step
from steadygrad.words import spell_seconds


class Pace:
    """Measures how long steps take in this process; steps before a resume do not count."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def begin(self, step: int) -> None:
        """Start the clock before step `step`, unless it runs."""
        if self._first is None:
            self._first = step, time.monotonic()

    def describe(self, record: StepRecord, num_steps: int | None, num_skipped: int) -> str:
        """Format the line: 'Step 300/1150: loss=0.42, grad=0.81, lr=0.001, 1.2 min left'."""
        done = record.step + 1
        total = "" if num_steps is None else f"/{num_steps}"
        return f"Step {done}{total}: {describe_step(record, num_skipped)}{self._spell_left(done, num_steps)}"

    def _spell_left(self, done: int, num_steps: int | None) -> str:
        if num_steps is None or self._first is None or done <= self._first[0]:
            return ""
        first, began = self._first
        left = (time.monotonic() - began) / (done - first) * max(0, num_steps - done)
        return f", {spell_seconds(left)} left"
