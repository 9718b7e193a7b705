"""Rules about steps that come to nothing: updates lost to rounding, and a loss that pushes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Fact, Finding, Severity
from steadygrad.facts.program import LostUpdates

LOST_SHARE = 0.8
"""Share of elements that may stay as they were."""
FEWEST_STEPS = 32
"""Steps after which elements that have not moved are lost and not slow."""


class LostHalfUpdates(Remembering):
    """Weights in half precision do not move: each update is below half the gap between two numbers, and rounds to none.

    Not judged while a learning rate rises: in a warm-up the first updates are small on purpose.
    """

    name = "lost_updates"
    hears = (LostUpdates,)
    memory = ("_told",)

    def __init__(self) -> None:
        self._told = False

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report once, with the share."""
        if not isinstance(fact, LostUpdates) or self._told or fact.rate_rose or fact.num_steps < FEWEST_STEPS:
            return
        if fact.unchanged_share < LOST_SHARE:
            return
        self._told = True
        yield Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=max(0, fact.step - fact.num_steps + 1),
            message=f"{fact.unchanged_share:.0%} of the {fact.dtype} weights that have a gradient are bit for bit what "
            f"they were {fact.num_steps} steps ago: their updates are lost to rounding",
            advice="Keep the weights in float32 and use autocast; else a larger learning rate, or an optimizer with "
            "float32 master weights, stochastic rounding or Kahan summation.",
            evidence={
                "unchanged_share": fact.unchanged_share,
                "num_steps": fact.num_steps,
                "num_elements": fact.num_elements,
            },
        )
