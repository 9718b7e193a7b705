"""Proof: the result of the paired test whether the current weights are worse than earlier ones.

Same batches, same random numbers, two sets of weights: whatever the data or the objective did affects both. The test
can also end without an answer, and then it says why.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Answer(enum.StrEnum):
    """How a paired test ended."""

    DAMAGED = "damaged"
    """The earlier weights do clearly better on every batch: the current ones were harmed."""
    UNHARMED = "unharmed"
    """They do not: the data, the objective or the schedule changed, and the weights are fine."""
    NONFINITE = "nonfinite"
    """The run is no longer finite, which needs no test."""
    UNKNOWN = "unknown"
    """The step could not be run again, or there was nothing to compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One paired test, or two that agree."""

    answer: Answer
    step: int
    """The step after which the test was made."""
    reference: int | None = None
    """The earlier weights are those from before this step."""
    now: tuple[float, ...] = ()
    """The loss of each batch under the current weights."""
    then: tuple[float, ...] = ()
    """... and under the earlier ones."""
    first: float | None = None
    """Mean loss of the initial weights on these batches, where it was measured."""
    rate_factor: float | None = None
    """The earlier losses are those of the earlier weights trained on the same batches at this share of the rate."""
    reason: str = ""
    """Why there is no answer."""
    remedy: str = ""
    """What to change to get an answer; empty if nothing would help."""

    @property
    def mean_now(self) -> float:
        """Mean loss of the current weights."""
        return sum(self.now) / len(self.now)

    @property
    def mean_then(self) -> float:
        """Mean loss of the earlier weights."""
        return sum(self.then) / len(self.then)

    def describe(self) -> str:
        """Describe the numbers in words, or why there are none."""
        if self.answer is Answer.UNKNOWN:
            return f"no proof that the weights were harmed: {self.reason}"
        num = len(self.now)
        on = "on this batch" if num == 1 else f"on the last {num} batches"
        start = "the initial weights" if self.reference == 0 else f"the weights of step {self.reference}"
        if self.rate_factor is not None:
            rate = "" if self.rate_factor == 1 else f" with {self.rate_factor:.3g} of the learning rate"
            return (
                f"{on} the run has a loss of {self.mean_now:.4g}; repeated from {start}{rate}, the same steps have "
                f"{self.mean_then:.4g}"
            )
        return f"{on} {start} have a loss of {self.mean_then:.4g}, the current ones {self.mean_now:.4g}"

    def to_evidence(self) -> dict[str, int | float | str | Sequence[int | float | str]]:
        """Return plain numbers for a Finding's evidence."""
        if self.answer is Answer.UNKNOWN:
            return {"proof": self.answer.value, "proof_reason": self.reason}
        return {
            "proof": self.answer.value,
            "reference_step": -1 if self.reference is None else self.reference,
            **({} if self.first is None else {"loss_first": self.first}),
            **({} if self.rate_factor is None else {"rate_factor": self.rate_factor}),
            "tested_at": self.step,
            "loss_now": self.mean_now,
            "loss_then": self.mean_then,
            "losses_now": list(self.now),
            "losses_then": list(self.then),
        }
