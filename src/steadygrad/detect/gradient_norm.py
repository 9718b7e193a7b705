"""Rules about the size of the global gradient norm.

Absolute thresholds of the literature (100; five times the clip threshold) are `info`: a norm of 231 on the first step
is healthy in real runs. A warning needs distance from the run's own baseline, on the logarithm of the norm, because
norms spread over orders of magnitude. Non-finite steps belong to `nonfinite.py` and never enter a baseline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from steadygrad.config import DetectConfig
from steadygrad.detect.loss import Restarts
from steadygrad.detect.medians import Blocks
from steadygrad.detect.memory import Episode, Remembering, Streak
from steadygrad.facts import Fact, Finding, Reading, Severity
from steadygrad.stats import Baseline, median

EARLY_VALUES = 5
"""Norms before `exploding_early_ratio` judges."""
MOST = 1e6
"""Upper bound of scores: a baseline without any spread would give 1e300."""
RECENT = 16
"""Norms that must be as far below as the baseline: a norm that has grown there slowly belongs to `RisingNorm`."""


class ExplodingGradient(Remembering):
    """The norm is far above this run's own, or above a fixed bound."""

    name = "exploding_gradient"
    memory = ("_baseline", "_recent", "_largest", "_restarts", "_info", "_warning")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config
        self._baseline = Baseline(window=config.window, min_values=config.min_values, relative_floor=0.0)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._largest = 0.0
        self._restarts = Restarts(config.loss)
        self._info = Episode(config.repeat_after, quiet=100)
        self._warning = Episode(config.repeat_after)

    def passes(self, reading: Reading) -> bool:
        """Take in a norm that is below both bounds."""
        norm = reading.finite_grad_norm
        if not 0 < norm <= self._config.exploding_norm:
            return False
        if not self._baseline.passes(math.log(norm), self._config.exploding_score):
            return False
        self._restarts.feed(reading)
        self._recent.append(norm)
        if norm > self._largest:
            self._largest = norm
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning far above the baseline, an info above the absolute threshold."""
        if not isinstance(fact, Reading):
            return
        in_grace, norm = self._restarts.feed(fact), fact.finite_grad_norm
        if fact.is_nonfinite or not 0 < norm < math.inf:
            return
        value = math.log(norm)
        # NaN is never used: `_is_far` needs at least `EARLY_VALUES` norms
        middle = math.exp(self._baseline.median) if len(self._baseline) else math.nan
        score = min(self._baseline.score(value), MOST)
        # Judged before it is admitted: a value must not be part of what it is compared with
        far = self._is_far(norm, middle, score) and not in_grace
        self._baseline.admit(value)
        self._recent.append(norm)
        # An explosion must not raise the bar for the next one
        self._largest = max(self._largest, norm) if not far else self._largest
        if far and self._warning.is_due(fact.step, True):
            message = f"gradient norm {norm:.4g}, {norm / middle:.3g} times the run's median {middle:.3g}"
            yield self._make(
                Severity.WARNING, fact.step, message, {"grad_norm": norm, "median": middle, "score": score}
            )
        elif not far and self._info.is_due(fact.step, norm > self._config.exploding_norm):
            message = f"gradient norm {norm:.4g} is above {self._config.exploding_norm:g}"
            yield self._make(Severity.INFO, fact.step, message, {"grad_norm": norm, "score": score})

    def _is_far(self, norm: float, middle: float, score: float) -> bool:
        if not self._baseline.is_warm:
            enough = len(self._baseline) >= EARLY_VALUES
            return enough and norm > self._config.exploding_early_ratio * self._largest
        if score <= self._config.exploding_score:
            return False
        return norm > self._config.exploding_ratio * max(middle, median(sorted(self._recent)))

    def _make(self, severity: Severity, step: int, message: str, evidence: dict[str, float]) -> Finding:
        return Finding(
            kind=self.name,
            severity=severity,
            step=step,
            message=message,
            advice="Clip gradients, lower the learning rate, or look at this step's batch.",
            evidence=evidence,
        )


class HighGradientNorm(Remembering):
    """Early warning: the norm is several times the clip threshold, so clipping hides most of the gradient."""

    name = "high_gradient_norm"
    memory = ("_episode",)

    def __init__(self, config: DetectConfig, clip_threshold: float | None) -> None:
        self._factor, self._threshold = config.early_warning_factor, clip_threshold
        self._episode = Episode(config.repeat_after, quiet=100)

    def passes(self, reading: Reading) -> bool:
        """A norm below the bound leaves no trace."""
        return self._threshold is None or reading.finite_grad_norm <= self._factor * self._threshold

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an info when the norm exceeds `early_warning_factor` times the clip threshold."""
        if not isinstance(fact, Reading) or self._threshold is None or fact.is_nonfinite:
            return
        norm = fact.finite_grad_norm
        if self._episode.is_due(fact.step, norm > self._factor * self._threshold):
            yield Finding(
                kind=self.name,
                severity=Severity.INFO,
                step=fact.step,
                message=f"High gradient norm detected: {norm:.2f} (clipped to {self._threshold:g})",
                advice="If this keeps happening, lower the learning rate or the clip threshold.",
                evidence={"grad_norm": norm, "clip_threshold": self._threshold},
            )


class RisingNorm(Remembering):
    """The norm has been growing slowly for a long time, which often precedes an explosion.

    Norms also grow while a healthy loss falls, and after a restart of the learning rate, so this is an info, unless the
    loss rose meanwhile and the learning rate did not.
    """

    name = "rising_norm"
    memory = ("_norms", "_losses", "_last", "_loss", "_base", "_rising", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.habits
        self._norms, self._losses = Blocks(config.habits.rising_block), Blocks(config.habits.rising_block)
        self._last = math.inf
        self._loss: float | None = None
        self._base: list[float | None] = [None, None, None]  # norm, loss and learning rate where the growth began
        self._rising = Streak()
        self._episode = Episode(config.repeat_after, quiet=config.repeat_after)

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading that completes no block."""
        if self._norms.is_nearly_full or self._losses.is_nearly_full:
            return False
        if reading.loss is not None:
            self._losses.add(reading.step, reading.loss)
        self._norms.add(reading.step, reading.finite_grad_norm)
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a finding at the step where the growth began."""
        if not isinstance(fact, Reading) or fact.is_nonfinite:
            return
        loss = None if fact.loss is None else self._losses.add(fact.step, fact.loss)
        norm = self._norms.add(fact.step, fact.finite_grad_norm)
        self._loss = self._loss if loss is None else loss
        if norm is None:
            return
        rising = self._rising.feed(self._norms.start, norm > self._last)
        self._last = norm
        if not rising:
            self._base = [norm, self._loss, fact.learning_rate]
        base = self._base[0] or norm
        active = rising >= self._config.rising_blocks and norm > self._config.rising_ratio * base
        if self._episode.is_due(fact.step, active):
            yield self._describe(base, norm, rising, stuck=self._is_stuck(fact.learning_rate))

    def _is_stuck(self, rate: float | None) -> bool:
        _, base_loss, base_rate = self._base
        if self._loss is None or base_loss is None or (rate or 0.0) > 1.5 * (base_rate or math.inf):
            return False
        return self._loss > base_loss + 4.0 * self._losses.noise

    def _describe(self, base: float, norm: float, num_blocks: int, *, stuck: bool) -> Finding:
        return Finding(
            kind=self.name,
            severity=Severity.WARNING if stuck else Severity.INFO,
            step=self._rising.start,
            message=f"the gradient norm has grown from {base:.3g} to {norm:.3g} in "
            f"{num_blocks * self._config.rising_block} steps" + (" while the loss rose" if stuck else ""),
            advice="Lower the learning rate, add weight decay, or look for weights that grow without bound.",
            evidence={"from": base, "to": norm, "num_blocks": num_blocks},
        )
