"""Forecast: what the next loss should be, how far losses usually stray from that, and how far is too far.

Level: the median of the last few losses, moved by the usual distance between a loss and that median, so that a steady
decay or drift is not a distance. Spread: the MAD of those distances. Limit: `score` spreads in Gaussian noise, and
more when less is known or when the tail is heavy. Heaviness is the second largest score so far against what Gaussian
noise would have given by now; a constant limit has to choose between missing 10 sigma in clean runs (8 MAD: found in
97 %) and crying wolf in heavy-tailed ones (Student t with 3 degrees of freedom passes 20 MAD once in 10 000 steps).

Only finite values that are not spikes are admitted, so neither a NaN nor a spike changes what comes next.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from steadygrad.config import LossThresholds
from steadygrad.detect.memory import Remembering
from steadygrad.stats import MAD_TO_SIGMA, find_least_deviation, median, median_deviation

EARLY = 256
"""Values after which the limit comes near its final height; below, it grows with (EARLY / n) ** 1.5."""
EARLY_FACTOR = 3.0
"""The largest factor by which a short history raises the limit."""
TAIL_POWER, TAIL_SHARE = 3.0, 2e-5
"""The limit is the second largest score, times its heaviness to this power, at most as far as a tail with the index
of Student's t with 3 degrees of freedom reaches with this share of its values."""
TAIL_START = 64
"""Values before which scores say nothing about the tail: the spread is still that of the steepest decay."""
TAIL_BLOCK = 2048
"""Scores after which the older half of the tail is forgotten."""
PATIENCE = 32
"""Refused values in a row that make a new level."""
_GAUSS = NormalDist()


class Tail(Remembering):
    """The two largest scores of the last 2048 to 4096, and how many there were."""

    memory = ("_count", "_top", "_old_count", "_old_top")

    def __init__(self) -> None:
        self._count, self._old_count = 0, 0
        self._top: list[float] = []
        self._old_top: list[float] = []

    @property
    def count(self) -> int:
        """Scores remembered."""
        return self._count + self._old_count

    @property
    def floor(self) -> float:
        """Score up to which `add` would only count the next one."""
        return self._top[-1] if len(self._top) == 2 and self._count < TAIL_BLOCK else 0.0

    def add(self, score: float) -> None:
        """Remember one score."""
        if self._count == TAIL_BLOCK:
            self._old_count, self._old_top, self._count, self._top = self._count, self._top, 0, []
        self._count += 1
        if len(self._top) < 2 or score > self._top[-1]:
            self._top = sorted([*self._top, score], reverse=True)[:2]

    def reach(self) -> float:
        """Return how far a score may go, given the past: little beyond it in Gaussian noise, far in a heavy tail."""
        top = sorted(self._top + self._old_top, reverse=True)
        # With few scores the expected second largest is near 0, or undefined: inv_cdf needs 2 / count below 1
        if len(top) < 2 or self.count < 8:
            return 0.0
        expected = _GAUSS.inv_cdf(1.0 - 2.0 / self.count)
        # The second largest, so that a single score cannot raise the limit
        heaviness = max(1.0, top[1] / expected)
        farthest = (2.0 / (self.count * TAIL_SHARE)) ** (1.0 / 3.0)
        return float(top[1] * min(heaviness**TAIL_POWER, farthest))


class Forecast(Remembering):
    """One-step-ahead level, spread and limit of a noisy series."""

    memory = ("_recent", "_distances", "_tail", "_refused", "_num_values")

    def __init__(self, config: LossThresholds) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=config.level_window)
        self._ordered: list[float] | None = None  # the same in order; None when they have changed since
        self._distances: deque[float] = deque(maxlen=config.spread_window)
        self._sorted: list[float] = []  # the distances in order
        self._split: int | None = None  # where the last spread was found
        self._tail = Tail()
        self._refused: deque[float] = deque(maxlen=PATIENCE)
        self._num_values = 0

    @property
    def is_warm(self) -> bool:
        """Whether enough values are there to judge another one."""
        return len(self._recent) == self._recent.maxlen

    @property
    def level(self) -> float:
        """What the next value should be; NaN while there is none."""
        if not self._recent:
            return math.nan
        ordered = self._order()
        moved = median(ordered) + (median(self._sorted) if self._sorted else 0.0)
        return max(moved, 1.5 * ordered[0] - 0.5 * ordered[-1])  # a decay that slows down stays above its extrapolation

    @property
    def usual(self) -> float:
        """Median of the recent values, which is what they were; the level is what was expected next."""
        return median(self._order())

    @property
    def spread(self) -> float:
        """Robust standard deviation around the level, never below the mean deviation, nor `spike_floor` of the level.

        The mean is the larger one where most losses are the same, as with a margin loss; it holds no spike.
        """
        centre = median(self._sorted)
        floor = self._config.spike_floor * abs(median(self._order()))
        mad, self._split = median_deviation(self._sorted, centre, self._split)
        return max(MAD_TO_SIGMA * mad, _mean_deviation(self._sorted, centre), floor, 1e-300)

    @property
    def limit(self) -> float:
        """Score above which a value is a spike."""
        return max(self.least_limit, self._tail.reach())

    @property
    def least_limit(self) -> float:
        """Score below which no value is a spike, whatever the tail of the noise."""
        early = min(EARLY_FACTOR, 1.0 + math.pow(EARLY / max(1, self._num_values), 1.5))
        return self._config.spike_score * early

    def score(self, value: float) -> float:
        """Return the spreads above the level; 0 below it and while warming up, inf when the value is not finite."""
        if not math.isfinite(value):
            return math.inf
        above = value - self.level
        return above / self.spread if self.is_warm and above > 0 else 0.0

    def is_ordinary(self, value: float) -> bool:
        """Whether `score` would certainly be far below the limit and below what the tail remembers; needs no spread."""
        if not self.is_warm or not self._sorted:
            return False
        # The level, with its parts at hand: this runs at every step.
        ordered, usual = self._order(), median(self._sorted)
        above = value - max(median(ordered) + usual, 1.5 * ordered[0] - 0.5 * ordered[-1])
        if above <= 0:
            return True
        reach = min(self._config.spike_score, self._tail.floor)
        return above <= reach * find_least_deviation(self._sorted, usual)

    def _order(self) -> list[float]:
        """Return the recent values in order."""
        if self._ordered is None:
            self._ordered = sorted(self._recent)
        return self._ordered

    def log_score(self, value: float) -> float:
        """Return the same on the logarithm, for noise that grows with the loss; inf where a logarithm has no meaning.

        The spread is that of the differences between neighbours, which a steep decay does not widen.
        """
        if value <= 0 or min(self._recent) < 0:
            return math.inf
        logs = [math.log(v) for v in self._recent if v > 0]
        if len(logs) < 5:  # a margin loss that is satisfied most of the time has no usual size
            return 0.0
        moves = [b - a for a, b in itertools.pairwise(logs)]
        usual = median(sorted(moves))
        mad = median(sorted(abs(m - usual) for m in moves))
        # A difference of two values varies sqrt(2) times as much as one of them
        spread = max(MAD_TO_SIGMA * mad / math.sqrt(2.0), self._config.spike_floor)
        return (math.log(value) - median(sorted(logs[-5:]))) / spread

    def admit(self, value: float, score: float | None) -> None:
        """Admit a value that is not a spike; without a score (while the level is moving) the tail learns nothing."""
        self._refused.clear()
        self._num_values += 1
        if len(self._recent) >= 4:
            # Before the value joins them: a forecast must not know what it forecasts
            self._add_distance(value - median(self._order()))
        if score is not None and self._num_values > TAIL_START:
            self._tail.add(score)
        self._recent.append(value)
        self._ordered = None

    def refuse(self, value: float) -> None:
        """Keep a spike out; after `PATIENCE` in a row they are the new level."""
        self._refused.append(value)
        if len(self._refused) == PATIENCE:
            # With the default window of 17 nothing of the old level is left; the spread stays what it was
            self._recent.extend(self._refused)
            self._ordered = None
            self._refused.clear()

    def _add_distance(self, distance: float) -> None:
        if not math.isfinite(distance):  # two finite values can be further apart than a float reaches
            return
        if len(self._distances) == self._distances.maxlen:
            oldest = self._distances.popleft()
            # Both hold the same finite numbers: one NaN would leave the list without an order for good
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
        self._distances.append(distance)
        bisect.insort(self._sorted, distance)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        super().load_state_dict(state)
        # Derived, so not saved; `_split` is only where a search begins
        self._sorted, self._ordered = sorted(self._distances), None


def _mean_deviation(ordered: Sequence[float], centre: float) -> float:
    """Return the mean of |v - centre| of sorted values: two sums in C instead of a loop."""
    below = bisect.bisect_left(ordered, centre)
    num_above = len(ordered) - below
    total = sum(ordered[below:]) - sum(ordered[:below]) + centre * (below - num_above)
    if math.isfinite(total):
        # Rounding can leave the sums of equal values slightly below 0
        return max(0.0, total) / len(ordered)
    return math.fsum(abs(value - centre) / len(ordered) for value in ordered)  # the sums were too large for a float
