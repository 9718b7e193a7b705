"""Judged steps, epochs and the clock -> the lines that a training prints: how far it is, how long the rest takes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

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
        seconds = self.estimate_seconds(done, num_steps)
        left = "" if seconds is None else f", {spell_seconds(seconds)} left"
        return f"Step {done}{total}: {describe_step(record, num_skipped)}{left}"

    def estimate_seconds(self, done: int, num_steps: int | None) -> float | None:
        """Return how long the steps after `done` will take; None while that is unknown."""
        if num_steps is None or self._first is None or done <= self._first[0]:
            return None
        first, began = self._first
        return (time.monotonic() - began) / (done - first) * max(0, num_steps - done)


def describe_metrics(metrics: Mapping[str, Any]) -> str:
    """Format losses, validation, mean and maximum gradient norm where measured, learning rate and skipped steps."""
    losses = {name: value for name, value in metrics.items() if name == "loss" or name.startswith("val_")}
    skipped = f", skipped={metrics['num_skipped']:.0f}" if metrics["num_skipped"] else ""
    norms = f", grad avg={metrics['grad_norm_mean']:.4g} max={metrics['grad_norm_max']:.4g}"
    norms = "" if math.isnan(metrics["grad_norm_mean"]) else norms  # no step was measured; without a guard none ever is
    return f"{spell_numbers(losses)}{norms}, lr={metrics['learning_rate']:.4g}{skipped}"


def spell_numbers(numbers: Mapping[str, Any], prefix: str = "") -> str:
    """Format numbers as `loss=0.4312, r2=0.9134`."""
    return ", ".join(f"{prefix}{name}={value:.4f}" for name, value in numbers.items())
