"""Indicators: Readings, one after the other -> a few numbers that move before a run becomes unstable.

Each is relative to the run's own past, so that it means the same in every model, task and unit of the loss: logarithms
of norm, loss and rate, compared with exponential averages over about 4, 16 and 64 steps. Constant work a step; no list
grows. A step that was skipped or is not finite is counted as such and enters no average. What is measured periodically
(Adam's ratio, the update) counts for `STALE` steps, and is 0 when it was never measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Reading

# forecast_model.json holds positions in this tuple: after any change run benchmarks/forecast/fit.py again
NAMES = (
    "norm_trend",
    "norm_slow_trend",
    "norm_volatility",
    "norm_volatility_rise",
    "norm_oscillation",
    "norm_kurtosis",
    "norm_above_lowest",
    "norm_above_first",
    "norm_jump",
    "norm_peak",
    "gradient_over_moment",
    "loss_trend",
    "loss_slow_trend",
    "loss_volatility",
    "loss_volatility_rise",
    "loss_oscillation",
    "loss_above_best",
    "loss_above_first",
    "loss_jump",
    "loss_peak",
    "loss_learnt",
    "loss_up_share",
    "loss_with_norm",
    "clip_share",
    "clip_depth",
    "rate_rise",
    "rate_above_first",
    "rate_below_highest",
    "skip_share",
    "scale_fall",
    "adam_rms",
    "update_ratio",
    "update_rise",
)
"""The names of what `Indicators.values` returns, in order."""

WORDS = {
    "norm_trend": "the gradient norm is rising",
    "norm_slow_trend": "the gradient norm has been rising for a while",
    "norm_volatility": "the gradient norm varies a lot from step to step",
    "norm_volatility_rise": "the gradient norm varies more than it used to",
    "norm_oscillation": "the gradient norm swings up and down",
    "norm_kurtosis": "the gradient norm makes rare large moves",
    "norm_above_lowest": "the gradient norm is far above its lowest",
    "norm_above_first": "the gradient norm is above that of the first steps",
    "norm_jump": "the last gradient was large",
    "norm_peak": "the gradient norm peaked recently",
    "gradient_over_moment": "the gradient outgrows its second moment",
    "loss_trend": "the loss is rising",
    "loss_slow_trend": "the loss has stopped falling",
    "loss_volatility": "the loss varies a lot from step to step",
    "loss_volatility_rise": "the loss varies more than it used to",
    "loss_oscillation": "the loss swings up and down",
    "loss_above_best": "the loss is above its best",
    "loss_above_first": "the loss is still close to its first value",
    "loss_jump": "the last loss was high",
    "loss_peak": "the loss peaked recently",
    "loss_learnt": "there is much progress to lose",
    "loss_up_share": "the loss rises at most steps",
    "loss_with_norm": "loss and gradient norm move together",
    "clip_share": "most steps are clipped",
    "clip_depth": "clipping takes away most of the gradient",
    "rate_rise": "the learning rate is rising",
    "rate_above_first": "the learning rate is above that of the first step",
    "rate_below_highest": "the learning rate is at its highest",
    "skip_share": "steps were skipped",
    "scale_fall": "the loss scale has fallen",
    "adam_rms": "Adam's second moment lags behind (RMS of g^2/v)",
    "update_ratio": "updates are large for the weights",
    "update_rise": "updates are growing",
}
"""Each indicator in words, phrased as trouble."""

FAST, MIDDLE, SLOW = 0.75, 0.9375, 0.984375
"""Decays of averages over about 4, 16 and 64 steps."""
PEAK = 0.97
"""Decay of the last peak: half of it is forgotten in 23 steps."""
WARM_UP = 16
"""Finite steps before the indicators say anything."""
STALE = 32
"""Steps for which a number that is measured periodically still counts."""
BOUND = 20.0
"""No indicator is larger: beyond it, a logarithm says nothing more."""
FLOOR = 1e-3
"""Share of the first loss below which differences do not matter: asinh is a line there, and a logarithm above."""


class Averages(Remembering):
    """Exponential averages of one number over about 4, 16 and 64 steps, right from the first value on."""

    memory = ("fast", "middle", "slow", "weights")

    def __init__(self) -> None:
        self.fast = self.middle = self.slow = 0.0
        self.weights = [0.0, 0.0, 0.0]

    def add(self, value: float) -> None:
        """Add one value."""
        w = self.weights
        # w is 1 - decay ** n, as in Adam's bias correction: the first value is the average, not a share of it
        w[0] += (1.0 - w[0]) * (1.0 - FAST)
        w[1] += (1.0 - w[1]) * (1.0 - MIDDLE)
        w[2] += (1.0 - w[2]) * (1.0 - SLOW)
        self.fast += (value - self.fast) * (1.0 - FAST) / w[0]
        self.middle += (value - self.middle) * (1.0 - MIDDLE) / w[1]
        self.slow += (value - self.slow) * (1.0 - SLOW) / w[2]


class Series(Remembering):
    """A logarithm over time: its level, its moves, how they follow each other."""

    memory = ("last", "level", "moves", "squares", "turns", "fourth", "first", "lowest", "peak", "_before", "_count")

    def __init__(self) -> None:
        self.last = self.first = self.lowest = self.peak = self._before = 0.0
        self.level, self.moves, self.squares, self.turns, self.fourth = (Averages() for _ in range(5))
        self._count = 0

    def add(self, value: float) -> float:
        """Add one value; return how far it moved."""
        move = value - self.last if self._count else 0.0
        # Against the level before this value enters it
        self.peak = max(PEAK * self.peak, value - self.level.slow) if self._count else 0.0
        self.level.add(value)
        if self._count:
            square = move * move
            self.moves.add(abs(move))
            self.squares.add(square)
            self.fourth.add(min(square * square, 1e12))
            self.turns.add(move * self._before)
        self._before, self.last = move, value
        self._count += 1
        if self._count <= 8:
            self.first = self.level.slow
        self.lowest = self.level.fast if self._count <= 4 else min(self.lowest, self.level.fast)
        return move

    @property
    def oscillation(self) -> float:
        """Minus the correlation of a move with the one before: 1 when each undoes the last."""
        return -self.turns.middle / (self.squares.middle + 1e-8)

    @property
    def kurtosis(self) -> float:
        """Logarithm of the moves' fourth moment over the square of their second."""
        return math.log((self.fourth.slow + 1e-12) / (self.squares.slow**2 + 1e-12))

    @property
    def volatility_rise(self) -> float:
        """Logarithm of how much larger moves are than they used to be."""
        return math.log((self.moves.fast + 1e-4) / (self.moves.slow + 1e-4))


class Sometimes(Remembering):
    """A number that is measured periodically."""

    memory = ("value", "before", "_age")

    def __init__(self) -> None:
        self.value = self.before = 0.0
        self._age = STALE + 1

    def tick(self, value: float | None) -> None:
        """One step, with the number or without."""
        self._age = min(self._age + 1, STALE + 1)
        if value is not None and 0.0 < value < math.inf:
            fresh = math.log(value)
            self.before = self.value if self._age <= STALE else fresh
            self.value, self._age = fresh, 0

    @property
    def level(self) -> float:
        """The logarithm, 0 when it is too old."""
        return self.value if self._age <= STALE else 0.0

    @property
    def rise(self) -> float:
        """How much it grew since the time before."""
        return self.value - self.before if self._age <= STALE else 0.0


class Indicators(Remembering):
    """The indicators of one run."""

    memory = (
        *("_norm", "_loss", "_moment", "_ups", "_together", "_clips", "_depths", "_rates", "_skips"),
        *(
            "_adam",
            "_ratio",
            "_update",
            "_unit",
            "_first_rate",
            "_highest_rate",
            "_highest_scale",
            "_scale",
            "num_finite",
        ),
    )

    def __init__(self) -> None:
        self._norm, self._loss = Series(), Series()
        self._moment, self._ups, self._together = Averages(), Averages(), Averages()
        self._clips, self._depths, self._rates, self._skips = (Averages() for _ in range(4))
        self._adam, self._ratio, self._update = Sometimes(), Sometimes(), Sometimes()
        self._unit = 0.0
        self._first_rate = 0.0
        self._highest_rate = -math.inf
        self._highest_scale = self._scale = 0.0
        self.num_finite = 0
        """Steps that entered the averages."""

    @property
    def is_warm(self) -> bool:
        """Whether enough steps were seen for the numbers to mean anything."""
        return self.num_finite >= WARM_UP

    def observe(self, reading: Reading) -> None:
        """Add one step."""
        self._skips.add(float(reading.skipped))
        if reading.loss_scale is not None and 0.0 < reading.loss_scale < math.inf:
            self._scale = math.log2(reading.loss_scale)
            self._highest_scale = max(self._highest_scale, self._scale)
        self._adam.tick(None if reading.skipped else _largest(reading.adam_rms))
        self._ratio.tick(None if reading.skipped else _middle(reading.update_ratios))
        self._update.tick(None if reading.skipped else reading.update_norm)
        if not reading.skipped and not reading.is_nonfinite and math.isfinite(reading.finite_grad_norm):
            self._take_finite(reading)

    def _take_finite(self, reading: Reading) -> None:
        self.num_finite += 1
        # Bounded so that a norm of 0 has a logarithm, and its square (exp below) stays far from overflow
        norm = math.log(min(max(reading.finite_grad_norm, 1e-30), 1e30))
        moved = self._norm.add(norm)
        self._moment.add(math.exp(2.0 * norm))
        coefficient = reading.clip_coefficient
        self._clips.add(float(coefficient < 1.0))
        self._depths.add(-math.log(min(max(coefficient, 1e-9), 1.0)) if math.isfinite(coefficient) else 0.0)
        rate = reading.learning_rate
        if rate is not None and 0.0 < rate < math.inf:
            if self._highest_rate == -math.inf:
                self._first_rate = math.log(rate)
            self._rates.add(math.log(rate))
            self._highest_rate = max(self._highest_rate, math.log(rate))
        if reading.loss is not None:
            # A first loss of exactly 0 gives no unit: the first one that is not 0 does
            if self._unit == 0.0:
                self._unit = FLOOR * abs(reading.loss)
            unit = self._unit if self._unit > 0.0 else 1.0
            # asinh: a logarithm that also takes zero and negative losses; the quotient may overflow to inf
            rose = self._loss.add(math.asinh(max(-1e300, min(1e300, reading.loss / unit))))
            self._ups.add(float(rose > 0.0))
            self._together.add(rose * moved)

    def values(self) -> tuple[float, ...]:
        """Return one number for each of `NAMES`, finite, between -20 and 20."""
        norm, loss = self._norm, self._loss
        spread = math.sqrt(norm.squares.middle * loss.squares.middle) + 1e-8
        # One for each of NAMES, in that order: nothing else ties a number to its name
        raw = (
            norm.level.fast - norm.level.middle,
            norm.level.middle - norm.level.slow,
            math.log(norm.moves.middle + 1e-4),
            norm.volatility_rise,
            norm.oscillation,
            norm.kurtosis,
            norm.level.fast - norm.lowest,
            norm.level.fast - norm.first,
            norm.last - norm.level.middle,
            norm.peak,
            2.0 * norm.last - math.log(self._moment.slow) if self._moment.slow > 0.0 else 0.0,
            loss.level.fast - loss.level.middle,
            loss.level.middle - loss.level.slow,
            math.log(loss.moves.middle + 1e-4),
            loss.volatility_rise,
            loss.oscillation,
            loss.level.fast - loss.lowest,
            loss.level.fast - loss.first,
            loss.last - loss.level.middle,
            loss.peak,
            loss.first - loss.lowest,
            self._ups.middle,
            self._together.middle / spread,
            self._clips.middle,
            self._depths.fast,
            self._rates.fast - self._rates.slow,
            self._rates.fast - self._first_rate,
            self._rates.fast - self._highest_rate if self._highest_rate > -math.inf else 0.0,
            self._skips.slow,
            self._highest_scale - self._scale,
            self._adam.level,
            self._ratio.level,
            self._update.rise,
        )
        return tuple([max(-BOUND, min(BOUND, value)) for value in raw])


def _largest(numbers: Mapping[str, float] | None) -> float | None:
    """Return the largest finite value; None when there is none."""
    return max((v for v in numbers.values() if math.isfinite(v)), default=None) if numbers else None


def _middle(numbers: Mapping[str, float] | None) -> float | None:
    """Return the median, the upper one of two."""
    values = sorted(v for v in numbers.values() if math.isfinite(v)) if numbers else []
    return values[len(values) // 2] if values else None
