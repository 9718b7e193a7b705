"""Event: one finding with what was decided and done about it; the events of one step -> as few Incidents as tell it.

Pure: it decides nothing, and writes nothing down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from steadygrad.facts import Action, Cause, Finding, Incident, Outcome, Severity, Verdict

BY_REFLEX = (Action.NONE, Action.CLIP)
"""Verdicts that ask for nothing that would make an incident."""


@dataclass(frozen=True, slots=True)
class Event:
    """One finding, what was decided about it and what was done."""

    finding: Finding
    verdict: Verdict
    outcome: Outcome

    @property
    def is_notable(self) -> bool:
        """Whether it is an incident: it matters, or something was done about it."""
        return self.finding.severity is not Severity.INFO or self.verdict.action not in BY_REFLEX

    @property
    def when(self) -> int:
        """The step at which it was acted on; where it began when nothing was done."""
        return self.finding.step if self.finding.acted_at is None else self.finding.acted_at


def make_incidents(events: Sequence[Event], cause: Cause | None) -> list[Incident]:
    """The notable events of one step: one incident, or one for each thing that was done beyond the reflex."""
    return [_join(group, cause) for group in _group(events)]


def _group(events: Sequence[Event]) -> list[list[Event]]:
    """By what was done beyond the reflex; the headline of each group first."""
    acting = [event for event in events if event.outcome.action not in (*BY_REFLEX, Action.SKIP, Action.SANITIZE)]
    others = sorted((e for e in events if e not in acting), key=lambda e: (e.outcome.action in BY_REFLEX, -_rank(e)))
    if not acting:
        return [others] if others else []
    return [[acting[0], *others], *([event] for event in acting[1:])]


def _rank(event: Event) -> int:
    return event.finding.severity.rank


def _join(events: Sequence[Event], cause: Cause | None) -> Incident:
    """One incident. Where the cause is known its fixes say what to do, and the general advice is left out."""
    findings = [event.finding for event in events]
    if cause is not None and cause.fixes:
        findings = [dataclasses.replace(finding, advice="") for finding in findings]
    return Incident(
        step=findings[0].step,
        finding=findings[0],
        verdict=events[0].verdict,
        outcome=events[0].outcome,
        cause=cause,
        also=tuple(findings[1:]),
    )
