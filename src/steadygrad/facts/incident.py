"""One event: what a rule says (`Finding`), what to do and why (`Verdict`), what was done (`Outcome`).

An `Incident` joins them with the `Cause` for the record. `Severity` and `Action` are the words that settings, records
and messages share.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from steadygrad.facts.card import show_card
from steadygrad.facts.cause import Cause

Number = int | float
Evidence = Mapping[str, "Number | str | Sequence[Number | str]"]


class Severity(enum.StrEnum):
    """How much a Finding matters. A healthy run has none above `info`."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """Position in the order of declaration, so that severities can be compared."""
        return list(Severity).index(self)


class Action(enum.StrEnum):
    """What a Verdict can ask for. `RAISE` is another name for `HALT`."""

    NONE = "none"
    CLIP = "clip"
    SKIP = "skip"
    SANITIZE = "sanitize"
    SCALE_LR = "scale_lr"
    SCALE_WEIGHT_DECAY = "scale_weight_decay"
    TIGHTEN_CLIP = "tighten_clip"
    ROLLBACK = "rollback"
    HALT = "halt"
    RAISE = "halt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a rule says: `kind` and `severity`, the step where it began, numbers as evidence, what to do."""

    kind: str
    severity: Severity
    step: int
    """The step where it began, which a rule may know only later."""
    message: str
    advice: str = ""
    evidence: Evidence = field(default_factory=dict)
    noticed_at: int | None = None
    """The step at which the rule had seen enough; None if unknown."""
    acted_at: int | None = None
    """The step at which it was acted on; None if it was not."""

    @property
    def when(self) -> str:
        """The step at which it was noticed, and those at which it began and was acted on if they differ."""
        noticed = self.step if self.noticed_at is None else self.noticed_at
        parts = [f"step {noticed}"]
        if self.step != noticed:
            parts.append(f"began at {self.step}")
        if self.acted_at is not None and self.acted_at != noticed:
            parts.append(f"acted on at {self.acted_at}")
        return parts[0] if len(parts) == 1 else f"{parts[0]} ({', '.join(parts[1:])})"

    def _repr_html_(self) -> str:
        return show_card(f"{self.when}: {self.kind}", self.severity, _list_finding(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do about a Finding, and why."""

    action: Action
    reason: str
    factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was done: the numbers before and after."""

    action: Action
    message: str
    before: Mapping[str, Number] = field(default_factory=dict)
    after: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Everything about one event, as it is recorded: one headline, and what else was found at the same step."""

    step: int
    """Where it began."""
    finding: Finding
    """The headline: what was acted on, or the most severe."""
    verdict: Verdict
    outcome: Outcome
    cause: Cause | None = None
    also: tuple[Finding, ...] = ()
    """The other findings above info of the same step."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The headline and the others."""
        return (self.finding, *self.also)

    def _repr_html_(self) -> str:
        rows = [] if self.cause is None else self.cause.rows()
        also = [("also", f"{other.kind}: {other.message}") for other in self.also]
        done = [("done", self.outcome.message), ("reason", self.verdict.reason)]
        title = f"{self.finding.when}: {self.finding.kind}"
        return show_card(title, self.finding.severity, [*rows, *_list_finding(self.finding), *done, *also])


def _list_finding(finding: Finding) -> list[tuple[str, str]]:
    return [("found", finding.message), ("advice", finding.advice)]
