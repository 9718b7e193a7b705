"""Findings that the adapters themselves report."""

from __future__ import annotations

from steadygrad.facts import Finding, Severity
from steadygrad.guard import Guard


def describe_error(error: BaseException, guard: Guard) -> Finding:
    """Describe an exception from the user's code, which propagates: it is not a NaN, and not ours to hide."""
    return Finding(
        kind="exception",
        severity=Severity.ERROR,
        step=guard.num_steps,
        message=f"the training step raised {type(error).__name__}: {error}",
        advice="It was let through: see its traceback.",
        evidence={"type": type(error).__name__},
    )


def describe_replaced_loss(reason: str, advice: str, *, step: int, count: int) -> Finding:
    """Describe a loss that `safe_compute_loss` replaced."""
    return Finding(
        kind="replaced_loss",
        severity=Severity.WARNING,
        step=step,
        message=f"{reason}: a small loss without gradient took its place ({count} so far)",
        advice=advice,
        evidence={"reason": reason, "num_replaced": count},
    )
