"""Baseline: what is normal for this run, as a rolling median and spread.

Statistic, decision and side effect are three objects; this is only the statistic. It admits finite values only and
keeps outliers out of its history, so neither one NaN nor one spike can blind the rule that uses it. A level that
really has changed is accepted after `patience` outliers in a row: otherwise a baseline would reject a new normal
forever.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.config.checks import is_number, is_whole, require, require_whole

MAD_TO_SIGMA = 1.4826
"""Scale that makes the median absolute deviation of Gaussian noise equal its standard deviation."""


class Baseline:
    """Rolling median and MAD over the last `window` admitted values.

    >>> baseline = Baseline(window=16, min_values=8)
    >>> for i in range(16):
    ...     _ = baseline.admit(1.0 + 0.01 * (i % 3))
    >>> baseline.score(1.02) < 3 and baseline.score(5.0) > 100
    True
    """

    def __init__(
        self,
        *,
        window: int = 128,
        min_values: int = 32,
        outlier_score: float = 8.0,
        relative_floor: float = 1e-3,
        patience: int = 32,
    ) -> None:
        self.window, self.min_values = window, min_values
        self.outlier_score, self.relative_floor, self.patience = outlier_score, relative_floor, patience
        self._check()
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._refused: deque[float] = deque(maxlen=patience)
        self._spread: float | None = None  # cached; None when the history has changed since
        self._split: int | None = None  # where the last spread was found

    def _check(self) -> None:
        hint = "Use 128 unless steps are very slow."
        require_whole(self, "window", least=8, hint=hint, why=" to estimate a spread")
        fits = is_whole(self.min_values) and 2 <= self.min_values <= self.window
        rule = f"be a whole number between 2 and the window ({self.window})"
        require(fits, self, "min_values", rule, "Use a quarter of the window.")
        fits = is_number(self.outlier_score) and self.outlier_score > 0
        require(fits, self, "outlier_score", "be a number above 0", "8 is a good value.")
        fits = is_number(self.relative_floor) and 0 <= self.relative_floor < math.inf
        require(fits, self, "relative_floor", "be a finite number, not negative", "Use 1e-3.")
        require_whole(self, "patience", least=1, hint="Use 32.")

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_warm(self) -> bool:
        """Whether there are enough values to judge another one."""
        return len(self._values) >= self.min_values

    @property
    def median(self) -> float:
        """Median of the history; NaN while it is empty."""
        return median(self._sorted)

    @property
    def spread(self) -> float:
        """Robust standard deviation, never below `relative_floor` of the median: a flat history is not certainty."""
        if self._spread is None:
            centre = median(self._sorted)
            mad, self._split = median_deviation(self._sorted, centre, self._split)
            # 1e-300: a history of zeros has no spread, and `score` divides by it
            self._spread = max(MAD_TO_SIGMA * mad, self.relative_floor * abs(centre), 1e-300)
        return self._spread

    def score(self, value: float) -> float:
        """Return the robust z-score of `value`; inf if it is not finite, 0 while warming up."""
        if not math.isfinite(value):
            return math.inf
        if len(self._values) < self.min_values:
            return 0.0
        return (value - median(self._sorted)) / self.spread

    def admit(self, value: float) -> bool:
        """Add `value` to the history unless it is not finite or an outlier; return whether it was added."""
        if not math.isfinite(value):
            return False
        # Scored against the history without it: one that is admitted first would widen its own spread
        if abs(self.score(value)) > self.outlier_score:
            self._refused.append(value)
            if len(self._refused) < self.patience:
                return False
            self._start_again(list(self._refused))  # a new level, not an outlier
            return True
        self._refused.clear()
        self._append(value)
        return True

    def passes(self, value: float, score: float) -> bool:
        """Admit `value` if its score is certainly at most `score` in size, and no outlier's; return whether it was."""
        if len(self._values) < self.min_values:
            return False
        centre = median(self._sorted)
        reach = min(score, self.outlier_score) * find_least_deviation(self._sorted, centre)
        if not abs(value - centre) <= reach:
            return False
        self._refused.clear()
        self._append(value)
        return True

    def _start_again(self, values: list[float]) -> None:
        self._values.clear()
        self._sorted.clear()
        self._refused.clear()
        self._spread = None  # also where `values` is empty: the old spread belongs to no history
        for value in values[-self.window :]:
            self._append(value)

    def _append(self, value: float) -> None:
        if len(self._values) == self.window:
            oldest = self._values.popleft()
            # `_sorted` holds the numbers of `_values` in order; a NaN in it would break every later search
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
        self._values.append(value)
        bisect.insort(self._sorted, value)
        self._spread = None

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain lists."""
        return {"values": list(self._values), "refused": list(self._refused)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the history of `state_dict()`; non-finite values are refused as always."""
        # The run may go on with a shorter window than it was saved with: only the last values are taken
        self._start_again([float(v) for v in state["values"] if math.isfinite(v)])
        self._refused.extend(float(v) for v in state["refused"] if math.isfinite(v))


def median(ordered: Sequence[float]) -> float:
    """Return the median of sorted values; NaN if there are none."""
    n = len(ordered)
    if n == 0:
        return math.nan
    middle = n // 2
    return ordered[middle] if n % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


def find_least_deviation(ordered: Sequence[float], centre: float) -> float:
    """Return a number that `median_deviation` about the median is not below; quicker. The values are sorted.

    Less than half of them lie closer to the centre than the nearer quartile does.
    """
    quarter = len(ordered) // 4
    below, above = centre - ordered[quarter], ordered[-1 - quarter] - centre
    return below if below < above else above


def median_deviation(ordered: Sequence[float], centre: float, near: int | None = None) -> tuple[float, int]:
    """Return the median of |v - centre| of sorted values, and how many of the smaller half lie below the centre.

    The distances on each side are sorted already, so the two sides are only split: from `near`, which saves nearly all
    of the work where it is the split of the step before. The result does not depend on it. NaN without values.
    """
    n = len(ordered)
    if n == 0:
        return math.nan, 0
    right = bisect.bisect_left(ordered, centre)  # the first value that is not below the centre
    wanted = n // 2 + 1  # so many smallest distances reach the middle one
    last = right + wanted - 1
    least, most = max(0, last + 1 - n), min(right, wanted)
    # `low` of the `wanted` smallest distances lie left of the centre, the others right of it; the loops move the split
    # until no distance left out is smaller than one taken in
    low = min(max(wanted // 2 if near is None else near, least), most)
    while low < most and centre - ordered[right - 1 - low] < ordered[last - low] - centre:
        low += 1
    while low > least and centre - ordered[right - low] >= ordered[last + 1 - low] - centre:
        low -= 1
    below = centre - ordered[right - low] if low else -math.inf  # the largest of the chosen distances on each side
    above = ordered[last - low] - centre if low < wanted else -math.inf
    largest = below if below > above else above
    if n % 2:
        return largest, low
    if below > above:
        second = max(above, centre - ordered[right - low + 1]) if low > 1 else above
    else:
        second = max(below, ordered[last - low - 1] - centre) if wanted - low > 1 else below
    return 0.5 * (second + largest), low
