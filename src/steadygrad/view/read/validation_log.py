"""ValidationLog: evaluations -> a curve for each number: all of `metrics.jsonl`, the loss of `validations.jsonl`.

Trainer and recipes write the first, every Guard that received a validation loss the second; if both exist, the first
counts. After a resume a step may appear twice, and the later line counts. Memory is bounded: of very many evaluations
every second one is kept. A non-finite value gets no point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.view.read.tail import Row, as_number

LOSS = "val_loss"
MAX_METRICS = 24
"""Most names that get a curve; the first ones do."""
MAX_POINTS = 4000
NOT_METRICS = ("step", "epoch", "stage", "time", "time_seconds")
PREFIXES = ("val_", "val/", "valid_", "validation_", "eval_", "eval/")


def is_validation(name: str) -> bool:
    """Return whether a number passed to `guard.log` comes from an evaluation."""
    return name.startswith(PREFIXES)


class ValidationLog:
    """The numbers of each evaluation, by name."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}
        self._told: dict[int, float] = {}  # by guard.validate
        self.num_left_out = 0
        """Count of numbers without a curve, because there were too many names."""

    def extend(self, rows: Sequence[Row]) -> None:
        """Add lines of metrics.jsonl."""
        for row in rows:
            step = row.get("step")
            if type(step) is not int or step < 0:
                continue
            for name, value in row.items():
                number = None if name in NOT_METRICS else as_number(value)
                if number is None or not math.isfinite(number):
                    continue
                if name not in self._points and len(self._points) >= MAX_METRICS:
                    self.num_left_out += 1
                    continue
                _set(self._points.setdefault(name, {}), step, number)

    def extend_validated(self, rows: Sequence[Row]) -> None:
        """Add lines of validations.jsonl."""
        for row in rows:
            step, loss = row.get("step"), as_number(row.get("loss"))
            if type(step) is int and step >= 0 and loss is not None and math.isfinite(loss):
                _set(self._told, step, loss)

    @property
    def losses(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return name -> steps and values, for losses."""
        return {name: points for name, points in self._all().items() if is_loss(name)}

    @property
    def metrics(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return name -> steps and values, for other metrics: accuracies, errors, ranks."""
        return {name: points for name, points in self._all().items() if not is_loss(name)}

    def _all(self) -> dict[str, tuple[list[int], list[float]]]:
        known: Mapping[str, dict[int, float]] = self._points
        if self._told and LOSS not in known:
            known = {LOSS: self._told, **known}
        return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in known.items()}

    def __bool__(self) -> bool:
        return bool(self._points) or bool(self._told)


def is_loss(name: str) -> bool:
    """Return whether it can be drawn with the training loss."""
    return name.rpartition("/")[2].endswith("loss")


def _set(points: dict[int, Any], step: int, value: float) -> None:
    points[step] = value
    if len(points) > MAX_POINTS:
        for other in sorted(points)[1:-1:2]:  # the last one stays: it is the newest
            del points[other]
