"""Losses of a run beside the loss of a guess -> findings about a run that has not learned, or began by exploding.

A guess knows the targets' distribution and nothing of the input: the mean score, the commonest word, the empty mask.
Falling from an explosion back to it looks like learning in a loss curve; these findings say that it is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from steadygrad.facts import Finding, Severity
from steadygrad.guard import Guard
from steadygrad.trainer.ranks import share_from_first
from steadygrad.view.read.incident_log import find_step, look
from steadygrad.view.read.tail import parse_line

HARDLY = 0.95
"""Share of the guess's loss from which a validation loss is barely better: seeds and noise explain the rest."""
EXPLODED = 10.0
"""Multiple of the guess's loss, and of the first loss, that no healthy start reaches."""
FIRST_STEPS = 100
"""Steps that count as the start."""


def report_training(
    guard: Guard,
    run_dir: Path | None,
    losses: Iterable[float],
    guess: float | None,
    *,
    first: float | None,
    peak: tuple[int, float] | None,
) -> None:
    """Record what there is to say about an ended run, unless it was recorded when the run ended before a resume."""
    # Rank 0's look at the record: it may be writing while the others read
    known = share_from_first(lambda: set() if run_dir is None else find_recorded(run_dir))
    for found in judge_training(losses, guess, first=first, peak=peak, step=guard.num_steps - 1):
        if (found.kind, found.step) not in known:
            guard.note(found)


def find_recorded(run_dir: Path) -> set[tuple[str, int]]:
    """Return kind and step of each incident in the run's record."""
    path = run_dir / "incidents.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    rows = [row for line in lines if (row := parse_line(line)) is not None]
    return {(str(look(row, "finding", "kind")), find_step(row)) for row in rows}


def judge_training(
    losses: Iterable[float], guess: float | None, *, first: float | None, peak: tuple[int, float] | None, step: int
) -> list[Finding]:
    """Return what there is to say about an ended run: its validation losses and its start, beside a guess.

    `first`: the loss before any step; `peak`: step and value of the largest loss at the start; `step`: the last one.
    """
    found = (judge_learning(find_best(losses), guess, step), judge_start(first, peak, guess))
    return [finding for finding in found if finding is not None]


def find_best(losses: Iterable[float]) -> float | None:
    """Return the smallest finite loss; NaN if there are only others, None if there is none."""
    listed = list(losses)
    return min((loss for loss in listed if math.isfinite(loss)), default=math.nan if listed else None)


def judge_learning(best: float | None, guess: float | None, step: int) -> Finding | None:
    """Return a finding if the best validation loss is barely below that of a guess."""
    # A best loss of NaN fails the last comparison, and is reported
    if best is None or guess is None or not 0 < guess < math.inf or best <= HARDLY * guess:
        return None
    return Finding(
        kind="no_better_than_guessing",
        severity=Severity.WARNING,
        step=max(0, step),
        message=f"the best validation loss is {best:.4g}, and a guess that ignores the input gets {guess:.4g}",
        advice="Lower the learning rate, train for longer, and check that inputs and targets belong together.",
        evidence={"best_validation_loss": best, "guess": guess},
    )


def judge_start(first: float | None, peak: tuple[int, float] | None, guess: float | None) -> Finding | None:
    """Return a finding if the loss rose to a multiple of both its first value and a guess's, in the first steps."""
    if first is None or peak is None or guess is None or not 0 < guess < math.inf:
        return None
    step, value = peak
    if value <= EXPLODED * max(first, guess):
        return None
    return Finding(
        kind="exploded_start",
        severity=Severity.WARNING,
        step=step,
        message=f"the loss began at {first:.4g} and rose to {value:.4g} at step {step}; a guess gets {guess:.4g}",
        advice="Lower the learning rate, or warm it up over the first hundreds of steps.",
        evidence={"first_loss": first, "largest_loss": value, "guess": guess},
    )
