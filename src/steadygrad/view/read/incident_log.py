"""IncidentLog: lines of incidents.jsonl -> problems, counts by kind, marks for the charts, the ones to show in full.

A run can have a hundred thousand incidents and three things that went wrong: those with the same cause are one
`Problem`. All are counted, the first and last few of each kind are kept in full, and the first step of an action in
each bucket is kept as its mark. A field that is missing or of an unexpected type is
shown as it is: the file may be older or newer than this reader.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from steadygrad.facts import Severity
from steadygrad.facts.kinds import find_kind
from steadygrad.view.read.curve import Share
from steadygrad.view.read.tail import Row

KEPT_FIRST, KEPT_LAST = 12, 4
"""Number of incidents of a kind to show in full, from the beginning and from the end."""
MAX_KINDS = 100
"""Most kinds to distinguish; custom rules can have any name."""
MAX_MARKS = 400
MAX_PROBLEMS = 100
"""Most problems to distinguish; further ones are only counted by kind."""
SPIKE = "spike"
"""The mark of a loss or norm that jumped."""
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
        # `last` is a bounded deque: memory stays the same for a hundred thousand incidents
        (self.first if len(self.first) < KEPT_FIRST else self.last).append(incident)


@dataclass
class Problem(KindTotal):
    """All incidents with one cause or, where none is known, of one kind."""

    kinds: Counter[str] = field(default_factory=Counter)
    """Every kind of finding in them, those beside the headline included."""
    steps: Share = field(default_factory=lambda: Share(max_buckets=MAX_MARKS))
    """Where they were noticed."""

    def add(self, incident: Row) -> None:
        super().add(incident)
        others = incident.get("also")
        found = [incident.get("finding"), *(others if isinstance(others, list) else [])]
        self.kinds.update(str(look(one, "kind") or "unknown") for one in found)
        self.steps.extend([find_noticed(incident)], [True])

    @property
    def incident(self) -> Row:
        """The first of them, which stands for all."""
        return self.first[0]

    @property
    def cause(self) -> dict[str, Any] | None:
        """What a diagnosis found; None if there was none."""
        cause = self.incident.get("cause")
        return cause if isinstance(cause, dict) else None

    @property
    def noticed(self) -> int:
        """The step at which the first was noticed."""
        return find_noticed(self.incident)

    @property
    def last_noticed(self) -> int:
        """The step at which the newest was noticed."""
        return find_noticed((self.last or self.first)[-1])


class IncidentLog:
    """Incidents of a run, all counted and some kept in full."""

    def __init__(self) -> None:
        self._problems: dict[tuple[str, ...], Problem] = {}
        self.kinds: dict[str, KindTotal] = {}
        self.count = 0
        self.severities: Counter[str] = Counter()
        self.marks: dict[str, Share] = {}
        """Action -> where it was taken."""
        self.first_cause: Row | None = None
        """The first incident with a known cause."""
        self.halt: Row | None = None
        """The last incident that ended the run."""
        self.last_serious_step = -1
        """The newest step at which something above info was noticed or acted on."""

    def add(self, incident: Row) -> None:
        """Count one, and keep it if it is among the first or last of its kind."""
        self.count += 1
        kind = str(look(incident, "finding", "kind") or "unknown")
        if kind not in self.kinds and len(self.kinds) >= MAX_KINDS:
            kind = OTHER
        self.kinds.setdefault(kind, KindTotal(kind)).add(incident)
        self._add_to_problem(incident)
        self.severities[str(look(incident, "finding", "severity") or "unknown")] += 1
        if _rank(str(look(incident, "finding", "severity"))) >= Severity.WARNING.rank:
            self.last_serious_step = max(self.last_serious_step, find_acted(incident))
        if find_kind(kind).is_spike or kind == "loss_explosion":
            self.marks.setdefault(SPIKE, Share(max_buckets=MAX_MARKS)).extend([find_step(incident)], [True])
        action = find_action(incident)
        if action != "none":
            self.marks.setdefault(action, Share(max_buckets=MAX_MARKS)).extend([find_acted(incident)], [True])
        if self.first_cause is None and isinstance(incident.get("cause"), dict):
            self.first_cause = incident
        if action == "halt":
            self.halt = incident

    def _add_to_problem(self, incident: Row) -> None:
        key = _identify(incident)
        if key in self._problems or len(self._problems) < MAX_PROBLEMS:
            self._problems.setdefault(key, Problem(str(look(incident, "finding", "kind") or "unknown"))).add(incident)

    @property
    def problems(self) -> list[Problem]:
        """What went wrong, in the order in which it was first noticed."""
        return sorted(self._problems.values(), key=lambda one: one.noticed)

    def serious_problems(self) -> list[Problem]:
        """Return the problems above info, in the same order."""
        return [one for one in self.problems if _rank(one.severity) >= Severity.WARNING.rank]

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


def _identify(incident: Row) -> tuple[str, ...]:
    """Return what incidents of one problem share: the place that a diagnosis found, otherwise their kind."""
    kind = str(look(incident, "finding", "kind") or "unknown")
    cause = incident.get("cause")
    place = [look(cause, name) for name in ("phase", "op", "module", "file", "line", "name")]
    rank = str(incident.get("rank"))
    if any(one is not None for one in place[1:]):
        # A line of code is one problem whatever kinds it shows up as; a place without a file may be shared by several
        return (rank, kind if place[3] is None else "", *map(str, place))
    return (rank, kind, find_action(incident))


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
        if type(value) is int:  # not isinstance: JSON's true would be step 1
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
