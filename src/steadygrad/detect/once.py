"""OnceRule: a rule about a mistake that does not go away by itself, so one Finding in a run is enough.

Most of these are facts about the program (a loss, a mode, a loader). `judge` looks at one Fact; `observe` calls it
until it has returned a Finding, and remembers that across a resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar, cast

from steadygrad.detect.memory import Remembering
from steadygrad.facts import Fact, Finding, Severity
from steadygrad.facts.incident import Evidence

F = TypeVar("F", bound=Fact)


class OnceRule(Remembering, ABC, Generic[F]):
    """Reports at most once in a run. `F` is the kind of Fact that it takes, and `hears` names it at run time."""

    name: ClassVar[str]
    memory: ClassVar[tuple[str, ...]] = ("_told",)
    _told = False  # until then the class attribute serves, so that a rule without other state needs no __init__

    def observe(self, fact: Fact) -> Iterable[Finding]:
        """Return the Finding about this Fact, unless one was reported before."""
        if self._told or not isinstance(fact, self.hears):
            return ()
        finding = self.judge(cast("F", fact))
        if finding is None:
            return ()
        self._told = True
        return (finding,)

    @abstractmethod
    def judge(self, fact: F) -> Finding | None:
        """Return what is wrong; None if nothing is, or not yet."""

    def report(
        self,
        *,
        step: int,
        message: str,
        advice: str,
        evidence: Evidence | None = None,
        severity: Severity = Severity.WARNING,
    ) -> Finding:
        """Return a Finding of this rule's kind."""
        return Finding(
            kind=self.name,
            severity=severity,
            step=max(0, step),  # a scan before the first step has the number -1
            message=message,
            advice=advice,
            evidence=evidence or {},
        )


def at(where: str) -> str:
    """Return " at FILE:LINE" for the end of a clause; empty if the place is not known."""
    return f" at {where}" if where else ""
