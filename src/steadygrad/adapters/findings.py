"""Findings that the adapters themselves report."""

from __future__ import annotations

import logging

from steadygrad.facts import Finding, Severity
from steadygrad.guard import Guard

logger = logging.getLogger("steadygrad")


class Warnings:
    """Warnings of one training, each given once; what is in the record besides need not be read to notice them."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn_once(self, kind: str, message: str, advice: str) -> None:
        """Log a warning, the first of its kind."""
        if kind not in self._told:
            self._told.add(kind)
            logger.warning("%s %s", message, advice)

    def check(self, guard: Guard) -> None:
        """Warn of a loss that stays exactly 0: to a Guard this may be healthy, in a fine-tuning it seldom is."""
        found = next((finding for finding in guard.findings if finding.kind == "zero_loss"), None)
        if found is not None:
            self.warn_once(found.kind, f"step {found.step}: {found.message}.", found.advice)


def describe_error(error: BaseException, guard: Guard) -> Finding:
    """Describe an exception from the user's code, which propagates: it is not a NaN, and not ours to hide."""
    return Finding(
        kind="exception",
        severity=Severity.ERROR,
        step=guard.num_steps,
        message=f"the training step raised {type(error).__name__}: {error}",
        advice="It was re-raised: see its traceback.",
        evidence={"type": type(error).__name__},
    )


def describe_replaced_error(error: BaseException, *, step: int, count: int) -> Finding:
    """Describe an exception of the loss in whose place `safe_compute_loss` returned a small loss."""
    return Finding(
        kind="exception",
        severity=Severity.ERROR,
        step=step,
        message=f"computing the loss raised {type(error).__name__}: {error}; a small loss without gradient was used "
        f"instead ({count} so far)",
        advice="Look at this batch. If it keeps happening, the exception is re-raised.",
        evidence={"type": type(error).__name__, "num_errors": count},
    )


def describe_replaced_loss(reason: str, advice: str, *, step: int, count: int) -> Finding:
    """Describe a loss that `safe_compute_loss` replaced."""
    return Finding(
        kind="replaced_loss",
        severity=Severity.WARNING,
        step=step,
        message=f"{reason}: a small loss without gradient was used instead ({count} so far)",
        advice=advice,
        evidence={"reason": reason, "num_replaced": count},
    )
