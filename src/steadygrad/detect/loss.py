"""Rules about single losses: a spike, and a loss of exactly zero.

A non-finite loss belongs to `nonfinite.py` and enters no history here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from steadygrad.config import DetectConfig, LossThresholds
from steadygrad.detect.forecast import Forecast
from steadygrad.detect.memory import Episode, Remembering, Streak
from steadygrad.facts import Fact, Finding, Flush, Reading, Severity
from steadygrad.stats import median

START = 16
"""Losses whose median is where the run began."""


SMALL = 0.01
"""Share of the first losses below which a jump is harmless: a loss of 1e-5 may well become 1e-3 for a while."""
LOG_SHARE = 0.4
"""Share of the limit that a spike must reach on the logarithm as well."""


class Restarts(Remembering):
    """Knows whether the learning rate was raised a moment ago: then the loss may rise, and norms may jump."""

    memory = ("_rate", "_until", "_first", "began_at")

    def __init__(self, config: LossThresholds) -> None:
        self._config = config
        self._rate: float | None = None
        self._until = -1
        self._first: list[float] = []
        self.began_at = math.nan
        """Median of the run's first losses; NaN until they are there."""

    def feed(self, reading: Reading) -> bool:
        """Return whether this step is in the grace period after a restart."""
        rate = reading.learning_rate
        if rate == self._rate and len(self._first) == START and self._config.restart_ratio > 1:
            return reading.step < self._until
        # `rate > 0`: a rate that stays at 0 is at least twice 0
        if rate is not None and self._rate is not None and rate >= self._config.restart_ratio * self._rate and rate > 0:
            self._until = reading.step + self._config.restart_grace
        self._rate = self._rate if rate is None else rate
        loss = reading.loss
        if len(self._first) < START and loss is not None and math.isfinite(loss):
            self._first.append(loss)
            self.began_at = median(sorted(self._first))
        return reading.step < self._until

    def forgive(self, loss: float, in_grace: bool) -> bool:
        """Whether a loss is harmless however far it jumped: in the grace period below the first ones, else near 0."""
        # began_at is NaN before the first loss, and every comparison with NaN fails: nothing is forgiven
        return loss <= self.began_at if in_grace else 0.0 <= loss <= SMALL * self.began_at


class LossSpike(Remembering):
    """A loss far above the recent level: median + k MAD, where k follows the tail of the run's own noise.

    The peers' rules stand in `benchmarks/detectors.py`; their defects that this one must not have: a NaN or a spike in
    the window blinds the next ones (OLMo-core), three times the mean is far too much (Lightning, llm-foundry), ten
    times the first losses cannot be reached (Megatron-LM). A spike must also stand out on the logarithm, because the
    noise of small batches grows with the loss. One finding for each excursion.
    """

    name = "loss_spike"
    memory = ("_forecast", "_restarts", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        self._forecast = Forecast(config.loss)
        self._restarts = Restarts(config.loss)
        self._episode = Episode(config.repeat_after)

    def passes(self, reading: Reading) -> bool:
        """Take in a loss that lies far below every limit."""
        loss = reading.loss
        if loss is None:
            return True
        if not self._forecast.is_ordinary(loss):
            return False
        in_grace = self._restarts.feed(reading)
        self._forecast.admit(loss, None if in_grace else 0.0)  # a score that the tail would not remember either
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning when the loss is a spike."""
        if not isinstance(fact, Reading) or fact.loss is None:
            return
        in_grace = self._restarts.feed(fact)
        if not math.isfinite(fact.loss):
            return
        forecast, loss = self._forecast, fact.loss
        score = forecast.score(loss)
        # The tail is only looked at beyond the least limit: at nearly all steps the score alone decides
        limit = forecast.limit if score > 0 and score > forecast.least_limit else math.inf
        spike = score > limit and forecast.log_score(loss) > LOG_SHARE * limit
        if spike and self._restarts.forgive(loss, in_grace):
            spike = False
        if not spike:
            forecast.admit(loss, None if in_grace else score)
        else:
            if self._episode.is_due(fact.step, True):
                yield self._describe(fact.step, loss, score, limit)
            # After the description, whose evidence is the level judged by: refusing may make the spikes the new one
            forecast.refuse(loss)

    def _describe(self, step: int, loss: float, score: float, limit: float) -> Finding:
        level, spread = self._forecast.level, self._forecast.spread
        return Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=step,
            message=f"the loss jumped from {self._forecast.usual:.4g} to {loss:.4g}, {score:.1f} robust standard "
            f"deviations (limit {limit:.1f})",
            advice="Look at this step's batch. If spikes keep coming, lower the learning rate or Adam's beta2, or "
            "lengthen the warm-up.",
            evidence={
                "loss": loss,
                "level": level,
                "spread": spread,
                "score": score,
                "limit": limit,
                "highest": level + limit * spread,
            },
        )


FEWEST = 16
"""Steps of a whole run, all with loss and gradient exactly 0, that prove that it learns nothing."""
NEVER = 1000
"""The same for a run that goes on. A reward that comes late looks alike: up to 250 steps in our healthy runs."""


NOT_IN_THIS_BATCH = (
    "Check that this batch has labels that are not masked (-100), and that the loss depends on the model's output."
)
NOT_AT_ALL = (
    "Check that rewards differ within a group (equal ones give advantages of 0), that labels are not all masked "
    "(-100), and that the loss depends on the model's output."
)


class ZeroLoss(Remembering):
    """The loss is exactly zero and so is the gradient: nothing is learnt from this step.

    Seen when every label of a batch is masked and the mean is guarded against 0/0. A loss that has come down to zero,
    or a margin loss that is satisfied, is healthy: an info. One that was never near zero before is a warning.

    Zero from the first step on is an info too while the run goes on: a reward that never comes (advantages that are
    all zero, because all rewards of a group are the same) looks the same as one that was not found yet. It becomes a
    warning when the program asks for the findings at its end and no step has learnt anything, or after `NEVER` steps.
    """

    name = "zero_loss"
    hears = (Reading, Flush)
    memory = ("_first", "_recent", "_streak", "_seen", "_info", "_has_learnt", "_has_warned")

    def __init__(self, config: DetectConfig) -> None:
        self._patience = config.loss.zero_patience
        self._has_learnt = self._has_warned = False
        self._recent: deque[float] = deque(maxlen=8)
        self._first: float | None = None
        self._streak = Streak()
        self._seen = False
        self._info = Episode(config.repeat_after, quiet=100)

    def passes(self, reading: Reading) -> bool:
        """Take in a loss that is not zero."""
        loss = reading.loss
        if loss is None or loss == 0.0:
            return loss is None
        self._streak.length, self._has_learnt = 0, True
        self._recent.append(abs(loss))
        self._first = self._first or abs(loss)
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning when zero comes out of the blue or was all there is, an info when it stays."""
        if isinstance(fact, Flush):
            yield from self._judge_run(FEWEST)
        elif isinstance(fact, Reading) and fact.loss is not None and not fact.is_nonfinite:
            yield from self._judge_step(fact, fact.loss)

    def _judge_step(self, fact: Reading, loss: float) -> Iterable[Finding]:
        zero = loss == 0.0 and fact.finite_grad_norm == 0.0
        length = self._streak.feed(fact.step, zero)
        # Before this loss enters `_seen`
        sudden = zero and not self._seen and self._was_far_from_zero()
        self._seen = self._seen or loss == 0.0
        self._has_learnt |= not zero
        if loss != 0.0:
            self._recent.append(abs(loss))
            self._first = self._first or abs(loss)
        if sudden or self._info.is_due(fact.step, length >= self._patience):
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING if sudden else Severity.INFO,
                step=fact.step if sudden else self._streak.start,
                message="loss and gradient are exactly 0" + (f" for {length} steps" if length > 1 else ""),
                advice=NOT_IN_THIS_BATCH if self._has_learnt else NOT_AT_ALL,
                evidence={"num_steps": length},
            )
        yield from self._judge_run(NEVER)

    def _judge_run(self, fewest: int) -> Iterable[Finding]:
        """Warn once if none of at least `fewest` steps has learnt anything."""
        length = self._streak.length
        if self._has_learnt or self._has_warned or length < fewest:
            return
        self._has_warned = True
        yield Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=self._streak.start,
            message=f"loss and gradient are exactly 0 for {length} steps, from the first one on: nothing is learnt",
            advice=NOT_AT_ALL,
            evidence={"num_steps": length},
        )

    def _was_far_from_zero(self) -> bool:
        """The last losses were of one size, and not small: margin losses on their way to zero vary far more."""
        if self._first is None or len(self._recent) < 3:
            return False
        return max(self._recent) < 1.5 * min(self._recent) and min(self._recent) > 0.2 * self._first
