"""Leading indicators: what rises before the loss does.

The RMS of g^2/v says that Adam's second moment lags behind the gradient: loss spikes come 1 to 8 steps after it passes
2.3 (arXiv 2304.13013). The norm of the update was seen to spike before loss and gradient norm (marin#1368). Both are
measured every N steps only. The absolute bound is an `info`; a warning needs distance from the tensor's own baseline.
One odd batch lifts a ratio far above its baseline too, and in 40,000 healthy steps with small batches a few do: the
ratio of the same tensor must be that far off twice in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Episode, Keyed, Remembering
from steadygrad.facts import Fact, Finding, Reading, Severity
from steadygrad.stats import Baseline

ADVICE = (
    "A loss spike may follow. Lower Adam's beta2 (0.95), clip the update (StableAdamW), or lower the learning rate."
)


class AdamRms(Remembering):
    """The gradient of a tensor outgrew the second moment that should normalise it; a warning if it stays so."""

    name = "adam_rms"
    hears_plain = False
    memory = ("_baselines", "_info", "_warning", "_far")

    def __init__(self, config: DetectConfig) -> None:
        layers = self._config = config.layers
        self._baselines = Keyed(lambda: Baseline(window=64, min_values=layers.min_values, relative_floor=0.0))
        self._info = Episode(config.repeat_after, quiet=100)
        self._warning = Episode(config.repeat_after)
        self._far: list[str] = []  # tensors that were far above their baselines when last measured

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Look at the steps at which it was measured, and name the worst tensor."""
        if not isinstance(fact, Reading) or not fact.adam_rms or fact.is_nonfinite:
            return
        before, self._far = self._far, []
        high: dict[str, tuple[bool, float, float]] = {}
        for name, rms in fact.adam_rms.items():
            if not 0 < rms < math.inf:  # NaN fails this too
                continue
            baseline, size = self._baselines[name], math.log(rms)
            if rms > self._config.adam_rms:
                # Scored before it is admitted: a value must not be part of what it is compared with
                score, usual = baseline.score(size), math.exp(baseline.median) if len(baseline) else math.inf
                if score > self._config.outlier_score and rms > self._config.adam_rms_ratio * usual:
                    self._far.append(name)
                high[name] = (name in self._far and name in before, rms, usual)
            baseline.admit(size)
        if not high:
            return
        worst = max(high, key=lambda name: high[name][:2])
        far, rms, usual = high[worst]
        if (self._warning if far else self._info).is_due(fact.step, True):
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING if far else Severity.INFO,
                step=fact.step,
                message=f"the RMS of g^2/v of {worst} is {rms:.3g}" + (f", usually {usual:.2g}" if far else ""),
                advice=ADVICE,
                evidence={"parameter": worst, "rms": rms, "num_high": len(high)},
            )


class UpdateNorm(Remembering):
    """The optimizer's update is far larger than usual for this learning rate."""

    name = "update_norm"
    hears_plain = False
    memory = ("_baseline", "_episode")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.layers
        self._baseline = Baseline(window=64, min_values=config.layers.min_values, relative_floor=0.0)
        self._episode = Episode(config.repeat_after)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return a warning at a measured step whose update is an outlier."""
        if not isinstance(fact, Reading) or fact.skipped or not fact.update_norm or not fact.learning_rate:
            return
        value = math.log(fact.update_norm / fact.learning_rate)
        # The baseline is per unit of learning rate, so that a warm-up is not a rise; inf: nothing exceeds it yet
        usual = math.exp(self._baseline.median) * fact.learning_rate if len(self._baseline) else math.inf
        score = self._baseline.score(value)
        self._baseline.admit(value)
        far = score > self._config.outlier_score and fact.update_norm > self._config.outlier_ratio * usual
        if self._episode.is_due(fact.step, far):
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING,
                step=fact.step,
                message=f"the update has norm {fact.update_norm:.3g}, {fact.update_norm / usual:.3g} times the usual",
                advice=ADVICE,
                evidence={"update_norm": fact.update_norm, "usual": usual, "score": score},
            )
