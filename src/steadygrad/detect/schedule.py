"""Rules about the learning rate's schedule, from the rates of the Readings alone. Cost: two comparisons a step."""

from __future__ import annotations

from collections.abc import Iterable

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Fact, Finding, ParameterScan, Reading, Severity

VANISHED = 1.000001e-6
"""Share of its maximum at which a rate is as good as 0. Six decays by 10 come to this, rounding included."""
FEWEST = 50
"""Steps in a row that it must last: warm-ups begin at 0, and cosine schedules end there."""
TAIL = 0.25
"""... and the share of the steps before it: a decay to 0 is below a millionth in its last steps only (0.06 % of a
cosine, 3 % of a polynomial of degree 4)."""


class VanishedRate(Remembering):
    """The learning rate has been 0 since the first step, or a millionth of what it was for a good part of the run.

    Typical: an integer division in a warm-up; a schedule meant for epochs that is stepped for every batch. An optimizer
    that finds its step lengths itself may leave the rate at 0: then the weights move all the same.
    """

    name = "vanished_rate"
    hears = (Reading, ParameterScan)
    memory = ("_largest", "_num_before", "_num_vanished", "_first", "_told")

    def __init__(self) -> None:
        self._largest, self._first, self._told = 0.0, 0, False
        self._num_before, self._num_vanished = 0, 0

    def passes(self, reading: Reading) -> bool:
        """Take in a plain Reading at an ordinary rate, no larger than the largest so far."""
        rate = None if reading.learning_rate is None else abs(reading.learning_rate)
        if rate is None:
            return True
        if self._num_vanished or self._told or not VANISHED * self._largest < rate <= self._largest:
            return False
        self._num_before += 1
        return True

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Report once, and again after the rate has come back."""
        if isinstance(fact, ParameterScan) and fact.num_changed and not self._largest:
            self._told = True
        if not isinstance(fact, Reading) or fact.skipped or fact.learning_rate is None:
            return
        rate = abs(fact.learning_rate)  # negative: ascent
        self._largest = max(self._largest, rate)
        if rate > VANISHED * self._largest:
            # The rate came back, so the low steps were part of a schedule: they count as steps before the next fall
            self._num_before += 1 + self._num_vanished
            self._num_vanished, self._told = 0, False
            return
        if not self._num_vanished:
            self._first = fact.step
        self._num_vanished += bool(fact.finite_grad_norm)
        if self._told or self._num_vanished < max(FEWEST, TAIL * self._num_before):
            return
        self._told = True
        yield self._make(rate)

    def _make(self, rate: float) -> Finding:
        if not self._largest:
            message = f"the learning rate has been 0 for {self._num_vanished} steps, since the first one"
            advice = "Check the warm-up: an integer division (step // 1000) stays 0 for a long time."
        else:
            message = (
                f"the learning rate has been at most {rate:.2g} for {self._num_vanished} steps; its maximum was "
                f"{self._largest:.2g}, and nothing more is learnt"
            )
            advice = "A schedule that counts epochs must be stepped once per epoch, not after every batch."
        return Finding(
            kind=self.name,
            severity=Severity.WARNING,
            step=self._first,
            message=message,
            advice=advice,
            evidence={"learning_rate": rate, "largest": self._largest, "num_steps": self._num_vanished},
        )
