"""A rule about gradients of 1 / eps: a vector of length zero was normalised.

`x / max(norm(x), eps)` is 0 at 0, and its derivative is 1 / eps: finite, and 1e12 with torch's default. Adam remembers
the square of such a gradient for tens of thousands of steps, in which these parameters barely move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Fact, Finding, Reading, Severity
from steadygrad.facts.program import Divisions
from steadygrad.stats import median

HUGE = 1e8
"""Norm of a gradient, as a multiple of the loss, that no step of a network explains."""
DROP = 1e4
"""How many times the usual norm that is, when later steps are usual."""
NUM_LATER = 8
TINY = 1e-6
"""Divisors up to this size explain it."""


class EpsGradient(Remembering):
    """A gradient is as large as 1 / eps, and either the graph divides by eps or the steps after it are usual again."""

    name = "eps_gradient"
    hears = (Divisions, Reading)
    memory = ("_smallest", "_at", "_norm", "_later", "_told")

    def __init__(self) -> None:
        self._smallest = math.inf
        self._at, self._norm = -1, 0.0
        self._later: list[float] = []
        self._told = False

    def passes(self, reading: Reading) -> bool:
        """A norm below any that is huge matters only after one that was."""
        return self._told or (self._at < 0 and reading.finite_grad_norm < HUGE)

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report once: at once if the first graph divides by something tiny, otherwise a few steps later."""
        if isinstance(fact, Divisions):
            self._smallest = fact.smallest
        if not isinstance(fact, Reading) or self._told or fact.is_nonfinite:
            return
        norm = fact.finite_grad_norm
        if self._at < 0 and norm >= HUGE * max(1.0, abs(fact.loss or 0.0)):
            self._at, self._norm = fact.step, norm
            # Divisions describes the graph of the first step only, so it explains no later gradient
            if fact.step == 0 and self._smallest <= TINY:
                yield self._report(f"; the graph divides by {self._smallest:.1g}")
        elif self._at >= 0:
            self._later.append(norm)
            if len(self._later) == NUM_LATER:
                usual = median(sorted(self._later))
                if self._norm > DROP * usual:
                    yield self._report(f"; the steps after it have {usual:.2g}")
                self._at, self._later = -1, []

    def _report(self, why: str) -> Finding:
        self._told = True
        return Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=self._at,
            message=f"a gradient of norm {self._norm:.2g}{why}: a vector of zeros was normalised, and the derivative "
            "there is 1 / eps",
            advice="Add a small number under the root, x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6), or "
            "leave zero vectors out; do not initialise the layer before it with zeros.",
            evidence={"grad_norm": self._norm, "smallest_divisor": self._smallest},
        )
