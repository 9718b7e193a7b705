"""What a step says about the weights: most warnings do not count against them."""

from __future__ import annotations

import math

import pytest
from rule_traces import reading

from steadygrad.decide.health import assess_health
from steadygrad.facts import Finding, Severity

WARNING, ERROR = Severity.WARNING, Severity.ERROR


def make_finding(kind: str, severity: Severity, **evidence: str) -> Finding:
    return Finding(kind=kind, severity=severity, step=3, message="", evidence=evidence)


@pytest.mark.parametrize(
    ("kind", "severity", "evidence"),
    [
        ("nonfinite_parameter", ERROR, {}),
        ("nonfinite_buffer", ERROR, {}),
        ("loss_explosion", ERROR, {"proof": "damaged"}),
        ("loss_explosion", WARNING, {"proof": "unknown"}),  # it cannot be tested: better one checkpoint back
        ("divergence", WARNING, {}),
        ("loss_spike", WARNING, {"proof": "damaged"}),
        ("exploding_gradient", WARNING, {"proof": "damaged"}),
        ("my_own_rule", ERROR, {}),
    ],
)
def test_findings_that_count_against_the_weights(kind: str, severity: Severity, evidence: dict[str, str]) -> None:
    findings = [make_finding("missing_gradient", WARNING), make_finding(kind, severity, **evidence)]
    assert assess_health(reading(3), findings) is False


@pytest.mark.parametrize("kind", ["loss_spike", "exploding_gradient"])
@pytest.mark.parametrize("evidence", [{}, {"proof": "unknown"}])
def test_an_untested_spike_does_not_count(kind: str, evidence: dict[str, str]) -> None:
    assert assess_health(reading(3), [make_finding(kind, WARNING, **evidence)]) is None


@pytest.mark.parametrize(
    ("kind", "severity"),
    [
        ("missing_gradient", WARNING),
        ("dead_units", WARNING),
        ("frequent_clipping", WARNING),
        ("outlier_input", WARNING),
        ("nonfinite_input", ERROR),  # a loop that skips such rows; the loss is finite
        ("uncopied_state", WARNING),
        ("scaler_collapse", ERROR),
        ("my_own_rule", WARNING),
        ("loss_explosion", Severity.INFO),
    ],
)
def test_findings_that_do_not_count_against_the_weights(kind: str, severity: Severity) -> None:
    assert assess_health(reading(3), [make_finding(kind, severity)]) is True


def test_a_nonfinite_step_never_counts_for_them() -> None:
    assert assess_health(reading(3, loss=math.nan), []) is False
