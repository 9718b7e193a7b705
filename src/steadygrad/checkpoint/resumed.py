"""Resumed: what a resume restored, and the findings about a resume and about a save that failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steadygrad.act.microbatches import Accumulated
from steadygrad.checkpoint.catalogue import CheckpointInfo
from steadygrad.checkpoint.changes import Change
from steadygrad.facts import Finding, Severity
from steadygrad.words import spell_count


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


def list_inexact(num_saved: int, num_ranks: int) -> list[str]:
    """Return what cannot be exact when another number of ranks resumes than saved; empty if it is the same."""
    if num_saved == num_ranks:
        return []
    ranks = spell_count(num_saved, "rank")
    return [f"{ranks} saved it and {num_ranks} resume: random numbers and the order of the data will differ"]


def describe_other_ranks(step: int, num_saved: int, num_ranks: int) -> Finding | None:
    """Return the same as a Finding, for a framework's own checkpoint; None if the number of ranks is the same."""
    inexact = list_inexact(num_saved, num_ranks)
    message = "; ".join([f"resumed before step {step}", *inexact])
    return Finding(kind="resumed", severity=Severity.WARNING, step=step, message=message) if inexact else None


def describe_unsaved(step: int, reason: str) -> Finding:
    """Return a Finding about a checkpoint that could not be saved."""
    return Finding(
        kind="checkpoint_failed",
        severity=Severity.ERROR,
        step=step,
        message=reason.rstrip("."),
        advice="Check the disk and the state; the next save tries again.",
    )
