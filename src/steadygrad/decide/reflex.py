"""The first answer: what the reflex has already done about a step, as a Verdict. Stateless."""

from __future__ import annotations

from steadygrad.facts import Action, Finding, Reading, Severity, Verdict
from steadygrad.facts.kinds import find_kind


def decide(finding: Finding, reading: Reading | None, on_nonfinite: Action) -> Verdict:
    """Return what the reflex did about one Finding: it skipped or sanitised on the device, before any judgement."""
    if find_kind(finding.kind).about_step:
        if on_nonfinite is Action.HALT and finding.severity is not Severity.INFO:
            return Verdict(action=Action.HALT, reason="on_nonfinite is RAISE")
        if on_nonfinite is Action.SANITIZE and reading is not None and not reading.skipped:
            return Verdict(action=Action.SANITIZE, reason="on_nonfinite is SANITIZE")
        if reading is not None and not reading.skipped:
            return Verdict(action=Action.NONE, reason="only observed")
        return Verdict(action=Action.SKIP, reason="a non-finite step must not reach a weight")
    if finding.kind == "nonfinite_buffer" and reading is not None and reading.spoilt_buffers:
        return Verdict(action=Action.SKIP, reason="the step was skipped, and the buffers were restored")
    if finding.kind == "nonfinite_input" and reading is not None and reading.skipped:
        return Verdict(action=Action.SKIP, reason="the step that this batch made was skipped")
    is_clipped = reading is not None and reading.clipped and finding.step == reading.step
    if is_clipped and find_kind(finding.kind).of_size:
        return Verdict(action=Action.CLIP, reason="the norm is above the clip threshold")
    return Verdict(action=Action.NONE, reason="reported, not acted on")
