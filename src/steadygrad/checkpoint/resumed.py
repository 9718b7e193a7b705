"""Resumed: what a resume restored, and the findings about a resume and about a save that failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steadygrad.act.microbatches import Accumulated
from steadygrad.checkpoint.catalogue import CheckpointInfo
from steadygrad.checkpoint.changes import Change
from steadygrad.facts import Finding, Severity


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was restored, and what the Guard must load itself."""

    step: int
    info: CheckpointInfo
    guard: dict[str, Any]
    accumulated: Accumulated
    changes: list[Change] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def describe(self) -> Finding:
        """Return a Finding about the resume; above info only if something differs from what was saved."""
        differs = [f"{change} as set now" for change in self.changes] + self.problems
        return Finding(
            kind="resumed",
            severity=Severity.WARNING if differs else Severity.INFO,
            step=self.step,
            message="; ".join([f"resumed before step {self.step} from {self.info.path}", *differs]),
        )


def describe_unsaved(step: int, reason: str) -> Finding:
    """Return a Finding about a checkpoint that could not be saved."""
    return Finding(
        kind="checkpoint_failed",
        severity=Severity.ERROR,
        step=step,
        message=reason.rstrip("."),
        advice="Check the disk and the state; the next save tries again.",
    )
