"""A step's findings -> whether they are evidence for the weights or against them.

Steps with evidence for the weights make checkpoints and snapshots good; one with evidence against makes them suspect.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from steadygrad.facts import Answer, Finding, Reading, Severity
from steadygrad.facts.kinds import KINDS, find_kind


def assess_health(reading: Reading, findings: Sequence[Finding]) -> bool | None:
    """Return whether a step is evidence for the weights it began with (True), against them (False), or neither (None).

    Most warnings are about the program: a layer without gradient, labels that are all masked, a long clip. They would
    be the same with any earlier weights, so they are neither. A spike that no test has attributed to the weights is
    just as likely the batch's.
    """
    if reading.is_nonfinite or not findings:
        return not reading.is_nonfinite
    notable = [finding for finding in findings if finding.severity is not Severity.INFO]
    if any(map(_accuses_weights, notable)):
        return False
    return None if any(find_kind(finding.kind).is_spike for finding in notable) else True


def _accuses_weights(finding: Finding) -> bool:
    """Whether the finding blames the weights; one of the user's own rules does so from `error` on."""
    kind = KINDS.get(finding.kind)
    if kind is None:
        return finding.severity in (Severity.ERROR, Severity.CRITICAL)
    if kind.is_spike:
        return finding.evidence.get("proof") == Answer.DAMAGED.value
    return kind.fatal or kind.needs_proof
