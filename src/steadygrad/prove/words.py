"""A Finding and its Proof -> the Finding to report, with a severity and wording that fit the answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from steadygrad.facts import Answer, Finding, Proof, Severity

MOVED = (
    "Nothing was changed. There is nothing to do if the data, the targets or the objective were meant to change here."
)
UNUSUAL = "The batch or the objective is unusual, not the weights. Look at the batch if that was not intended."


def report_answer(finding: Finding, proof: Proof, *, lr_factor: float | None = None) -> Finding:
    """Report a tested suspicion. `lr_factor`: brings a raised rate back to where it did no harm."""
    evidence: dict[str, Any] = {**finding.evidence, **proof.to_evidence()}
    message = f"{finding.message}; {proof.describe()}"
    if proof.answer is Answer.DAMAGED:
        extra = {} if lr_factor is None else {"lr_factor": lr_factor}
        return dataclasses.replace(finding, severity=Severity.ERROR, message=message, evidence={**evidence, **extra})
    if proof.answer is Answer.UNHARMED:
        return dataclasses.replace(
            finding,
            severity=Severity.INFO,
            message=f"{message}: the weights were not harmed",
            advice=MOVED,
            evidence=evidence,
        )
    # Without a remedy, the program itself prevents the test (a policy that draws its data, weights that it edits): its
    # loss says little, and every such run would get a warning. A mere warning says too little by itself.
    is_grave = finding.severity.rank > Severity.WARNING.rank
    return dataclasses.replace(
        finding,
        severity=Severity.WARNING if proof.remedy and is_grave else Severity.INFO,
        message=message,
        advice=f"{finding.advice} {proof.remedy}".strip(),
        evidence=evidence,
    )


def report_spike(finding: Finding, proof: Proof) -> Finding:
    """Report one outlying step with the result of testing its batch."""
    is_batch = proof.answer is Answer.UNHARMED
    return dataclasses.replace(
        finding,
        severity=Severity.INFO if is_batch else finding.severity,
        message=f"{finding.message}; {proof.describe()}",
        advice=UNUSUAL if is_batch else f"{finding.advice} {proof.remedy}".strip(),
        evidence={**finding.evidence, **proof.to_evidence()},
    )
