"""Rules about the size of the global gradient norm.

Absolute thresholds of the literature (100; five times the clip threshold) are `info`: a norm of 231 on the first step
is healthy in real runs. A warning needs distance from the run's own baseline, on the logarithm of the norm, because
norms spread over orders of magnitude. Non-finite steps belong to `nonfinite.py` and never enter the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.config import DetectConfig
from steadygrad.facts import Finding, Reading, Severity
from steadygrad.stats import Baseline


class ExplodingGradient:
    """The norm is far above this run's own, or above a fixed bound."""

    name = "exploding_gradient"

    def __init__(self, config: DetectConfig) -> None:
        self._config = config
        self._baseline = Baseline(window=config.window, min_values=config.min_values, relative_floor=0.0)

    def observe(self, reading: Reading) -> Iterable[Finding]:
        """A warning far above the baseline, an info above the absolute threshold."""
        norm = reading.finite_grad_norm
        if reading.is_nonfinite or norm <= 0:
            return
        config, median = self._config, math.exp(self._baseline.median) if len(self._baseline) else math.nan
        score = self._baseline.score(math.log(norm))
        self._baseline.admit(math.log(norm))
        far = score > config.exploding_score and norm > config.exploding_ratio * median
        if far or norm > config.exploding_norm:
            against = f", {norm / median:.3g} times the run's median {median:.3g}" if far else ""
            yield Finding(
                kind=self.name,
                severity=Severity.WARNING if far else Severity.INFO,
                step=reading.step,
                message=f"gradient norm {norm:.4g}{against}" + ("" if far else f" is above {config.exploding_norm:g}"),
                advice="Clip gradients, lower the learning rate, or look at this step's batch.",
                evidence={"grad_norm": norm, "median": median if far else -1.0, "score": score},
            )

    def state_dict(self) -> dict[str, Any]:
        """The baseline."""
        return {"baseline": self._baseline.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the baseline."""
        self._baseline.load_state_dict(state["baseline"])


class HighGradientNorm:
    """Early warning: the norm is several times the clip threshold, so clipping hides most of the gradient."""

    name = "high_gradient_norm"

    def __init__(self, config: DetectConfig, clip_threshold: float | None) -> None:
        self._factor, self._threshold = config.early_warning_factor, clip_threshold

    def observe(self, reading: Reading) -> Iterable[Finding]:
        """An info when the norm exceeds `early_warning_factor` times the clip threshold."""
        norm = reading.finite_grad_norm
        if self._threshold is None or reading.is_nonfinite or norm <= self._factor * self._threshold:
            return
        yield Finding(
            kind=self.name,
            severity=Severity.INFO,
            step=reading.step,
            message=f"High gradient norm detected: {norm:.2f} (clipped to {self._threshold:g})",
            advice="If this keeps coming, lower the learning rate or the clip threshold.",
            evidence={"grad_norm": norm, "clip_threshold": self._threshold},
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""
