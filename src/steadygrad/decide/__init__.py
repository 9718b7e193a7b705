"""Findings -> Verdicts. Pure: no torch, no clock, no side effect."""

from __future__ import annotations

from steadygrad.facts import Action, Finding, Reading, Verdict

__all__ = ["decide"]


def decide(finding: Finding, reading: Reading, on_nonfinite: Action) -> Verdict:
    """What to do about one Finding. The reflex has already skipped or sanitised the step on the device."""
    if finding.kind in ("nonfinite_loss", "nonfinite_gradient"):
        if on_nonfinite is Action.HALT and finding.severity.rank > 0:
            return Verdict(action=Action.HALT, reason="on_nonfinite is RAISE")
        if on_nonfinite is Action.SANITIZE and not reading.skipped:
            return Verdict(action=Action.SANITIZE, reason="on_nonfinite is SANITIZE")
        return Verdict(action=Action.SKIP, reason="a non-finite step must not reach a weight")
    if reading.clipped:
        return Verdict(action=Action.CLIP, reason="the norm is above the clip threshold")
    return Verdict(action=Action.NONE, reason="told, not acted on")
