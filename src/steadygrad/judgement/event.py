"""Event: one finding with its decision and action; the events of one step -> as few Incidents as describe them.

Pure: it decides nothing and records nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from steadygrad.facts import Action, Cause, Finding, Incident, Outcome, Severity, Verdict

BY_REFLEX = (Action.NONE, Action.CLIP)
"""Verdicts that call for no action worth an incident."""


@dataclass(frozen=True, slots=True)
class Event:
    """One finding, the decision about it and the action taken."""

    finding: Finding
    verdict: Verdict
    outcome: Outcome

    @property
    def is_notable(self) -> bool:
        """Whether it is an incident: it matters, or an action was taken on it."""
        return self.finding.severity is not Severity.INFO or self.verdict.action not in BY_REFLEX

    @property
    def when(self) -> int:
        """The step at which it was acted on; the step where it began if no action was taken."""
        return self.finding.step if self.finding.acted_at is None else self.finding.acted_at


def make_incidents(events: Sequence[Event], cause: Cause | None) -> list[Incident]:
    """Return the notable events of one step as one incident, or one for each action beyond the reflex."""
    return [_join(group, cause) for group in _group(events)]


def _group(events: Sequence[Event]) -> list[list[Event]]:
    """Group events by the action beyond the reflex, the headline of each group first."""
    acting = [event for event in events if event.outcome.action not in (*BY_REFLEX, Action.SKIP, Action.SANITIZE)]
    others = sorted((e for e in events if e not in acting), key=lambda e: (e.outcome.action in BY_REFLEX, -_rank(e)))
    if not acting:
        return [others] if others else []
    return [[acting[0], *others], *([event] for event in acting[1:])]


def _rank(event: Event) -> int:
    return event.finding.severity.rank


def _join(events: Sequence[Event], cause: Cause | None) -> Incident:
    """Join events into one incident. If the cause is known, its fixes replace the general advice."""
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
