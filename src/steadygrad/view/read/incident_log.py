"""IncidentLog: lines of incidents.jsonl -> counts by kind, marks for the charts, and the ones to show in full.

A run can have a hundred thousand incidents. The first and last few of each kind are kept in full, all are counted, and
the first step of an action in each bucket is kept as its mark. A field that is missing or of an unexpected type is
shown as it is: the file may be older or newer than this reader.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from steadygrad.facts import Severity
from steadygrad.view.read.curve import Share
from steadygrad.view.read.tail import Row

KEPT_FIRST, KEPT_LAST = 12, 4
"""Number of incidents of a kind to show in full, from the beginning and from the end."""
MAX_KINDS = 100
"""Most kinds to distinguish; custom rules can have any name."""
MAX_MARKS = 400
OTHER = "(other kinds)"
SEVERITIES = [one.value for one in Severity]


@dataclass
class KindTotal:
    """All incidents of one kind."""

    kind: str
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    severity: str = ""
    """The worst severity among them."""
    actions: Counter[str] = field(default_factory=Counter)
    first: list[Row] = field(default_factory=list)
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=KEPT_LAST))

    def add(self, incident: Row) -> None:
        step = find_step(incident)
        self.first_step = step if self.count == 0 else min(self.first_step, step)
        self.last_step = max(self.last_step, step)
        self.count += 1
        severity = str(look(incident, "finding", "severity") or "")
        if _rank(severity) > _rank(self.severity):
            self.severity = severity
        self.actions[find_action(incident)] += 1
        (self.first if len(self.first) < KEPT_FIRST else self.last).append(incident)


class IncidentLog:
    """Incidents of a run, all counted and some kept in full."""

    def __init__(self) -> None:
        self.kinds: dict[str, KindTotal] = {}
        self.count = 0
        self.severities: Counter[str] = Counter()
        self.marks: dict[str, Share] = {}
        """Action -> where it was taken."""
        self.first_cause: Row | None = None
        """The first incident with a known cause."""
        self.halt: Row | None = None
        """The last incident that ended the run."""

    def add(self, incident: Row) -> None:
        """Count one, and keep it if it is among the first or last of its kind."""
        self.count += 1
        kind = str(look(incident, "finding", "kind") or "unknown")
        if kind not in self.kinds and len(self.kinds) >= MAX_KINDS:
            kind = OTHER
        self.kinds.setdefault(kind, KindTotal(kind)).add(incident)
        self.severities[str(look(incident, "finding", "severity") or "unknown")] += 1
        action = find_action(incident)
        if action != "none":
            self.marks.setdefault(action, Share(max_buckets=MAX_MARKS)).extend([find_acted(incident)], [True])
        if self.first_cause is None and isinstance(incident.get("cause"), dict):
            self.first_cause = incident
        if action == "halt":
            self.halt = incident

    def shown(self) -> list[Row]:
        """Return the incidents to show in full, in the order in which they were noticed."""
        kept = [one for total in self.kinds.values() for one in (*total.first, *total.last)]
        return sorted(kept, key=find_noticed)

    def num_at_least(self, severity: Severity) -> int:
        """Return the number of incidents of this severity or worse."""
        return sum(n for name, n in self.severities.items() if _rank(name) >= severity.rank)

    def num_actions(self, action: str) -> int:
        """Return how often this action was taken."""
        return sum(total.actions.get(action, 0) for total in self.kinds.values())


def look(row: Any, *path: str) -> Any:
    """Return the value at a path of keys; None if there is none."""
    for key in path:
        if not isinstance(row, dict):
            return None
        row = row.get(key)
    return row


def find_step(incident: Row) -> int:
    """Return the step where it happened; -1 if unknown."""
    for value in (incident.get("step"), look(incident, "finding", "step")):
        if type(value) is int:
            return value
    return -1


def find_noticed(incident: Row) -> int:
    """Return the step at which it was noticed or, if not recorded, where it began."""
    noticed = look(incident, "finding", "noticed_at")
    return noticed if type(noticed) is int else find_step(incident)


def find_acted(incident: Row) -> int:
    """Return the step at which it was acted on or, if not recorded, noticed."""
    acted = look(incident, "finding", "acted_at")
    return acted if type(acted) is int else find_noticed(incident)


def find_action(incident: Row) -> str:
    """Return the action taken: the outcome's or, failing that, the verdict's."""
    return str(look(incident, "outcome", "action") or look(incident, "verdict", "action") or "none")


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1
