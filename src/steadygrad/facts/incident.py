"""One event: what a rule says (`Finding`), what to do and why (`Verdict`), what was done (`Outcome`).

An `Incident` joins them with the `Cause` for the record. `Severity` and `Action` are the words that settings, records
and messages share.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    """What a rule says: `kind` and `severity`, the step where it happened, numbers as evidence, what to do."""

    kind: str
    severity: Severity
    step: int
    message: str
    advice: str = ""
    evidence: Evidence = field(default_factory=dict)


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
    """Everything about one event, as it is written down."""

    step: int
    finding: Finding
    verdict: Verdict
    outcome: Outcome
    cause: Cause | None = None
