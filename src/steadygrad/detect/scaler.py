"""A rule about the loss scale: it searches by overflowing, and must find something."""

from __future__ import annotations

from collections.abc import Iterable

from steadygrad.config import DetectConfig
from steadygrad.detect.memory import Remembering, Streak
from steadygrad.facts import Fact, Finding, Reading, Severity


class ScalerCollapse(Remembering):
    """The loss scale keeps falling: gradients are never cleared, or the model overflows at any scale.

    Overflows before the first good step are the search; a scale that worked and then overflows five times in a row, or
    an overflow at a scale below 1, is not. GradScaler halves the scale each time, without a lower limit.
    """

    name = "scaler_collapse"
    hears_plain = False
    memory = ("_worked", "_streak", "_told")

    def __init__(self, config: DetectConfig) -> None:
        self._config = config.habits
        self._worked: float | None = None
        self._streak = Streak()
        self._told = False

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return an error at the first overflow of the fall."""
        if not isinstance(fact, Reading) or fact.loss_scale is None or fact.loss_is_nonfinite:
            return
        # A Reading with a loss scale is never plain, so the row has no gaps although `hears_plain` is off
        length = self._streak.feed(fact.step, fact.num_nonfinite > 0)
        if not length:
            self._worked, self._told = fact.loss_scale, False
            return
        collapsed = self._worked is not None and length >= self._config.scaler_overflows
        collapsed = collapsed or fact.loss_scale < self._config.least_scale
        if collapsed and not self._told:
            self._told = True
            yield Finding(
                kind=self.name,
                severity=Severity.ERROR,
                step=self._streak.start,
                message=f"{length} overflows in a row, the loss scale is down to {fact.loss_scale:g}",
                advice="Clear gradients after a skipped step too (zero_grad), look for Inf that does not depend on the "
                "scale, or use bfloat16, which needs none.",
                evidence={
                    "loss_scale": fact.loss_scale,
                    "scale_that_worked": -1.0 if self._worked is None else self._worked,
                    "num_overflows": length,
                },
            )
