"""Rules about gradients: norm, flow, dead units, missing and stale gradients, loss scale, leading indicators."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from rule_traces import NAMES, NUMELS, RATE, findings_of, poisoned, reading, rule_named, table

from steadygrad.config import DetectConfig, FlowThresholds
from steadygrad.detect import Detector, standard_rules
from steadygrad.facts import Fact, Finding, GradientTable, MaskChange, Severity


def severities(findings: list[Finding]) -> list[Severity]:
    return [f.severity for f in findings]


# --- the norm --------------------------------------------------------------------------------------------------------


def test_a_first_norm_of_231_is_an_info() -> None:
    said = findings_of(rule_named("exploding_gradient"), [reading(0, 1.0, 231.0)])

    assert severities(said) == [Severity.INFO]


def test_a_norm_of_7_above_a_clip_threshold_of_1_has_the_documented_message() -> None:
    said = findings_of(rule_named("high_gradient_norm"), [reading(3, 1.0, 7.6)])

    assert [(f.severity, f.message) for f in said] == [
        (Severity.INFO, "High gradient norm detected: 7.60 (clipped to 1)")
    ]


def test_without_a_clip_threshold_no_norm_is_high() -> None:
    rules = standard_rules(DetectConfig(), clip_threshold=None)
    rule = next(r for r in rules if r.name == "high_gradient_norm")

    assert findings_of(rule, [reading(0, 1.0, 1e6)]) == []


def test_a_norm_that_grew_slowly_is_not_exploding() -> None:
    facts: list[Fact] = [reading(t, 1.0, 0.4 * math.exp(max(0, t - 100) / 15)) for t in range(180)]

    said = findings_of(rule_named("exploding_gradient"), facts)

    assert Severity.WARNING not in severities(said)


def test_a_norm_that_doubles_every_step_is_exploding() -> None:
    facts: list[Fact] = [reading(t, 1.0, 0.4 * 2.0 ** max(0, t - 100)) for t in range(120)]

    said = [f for f in findings_of(rule_named("exploding_gradient"), facts) if f.severity is Severity.WARNING]

    assert said
    assert said[0].step == 104  # 16 times the median


def test_a_thousandfold_norm_in_the_first_steps_is_a_warning_without_a_baseline() -> None:
    facts: list[Fact] = [reading(t, 1.0, 1.0 if t < 10 else 5000.0) for t in range(11)]

    assert severities(findings_of(rule_named("exploding_gradient"), facts)) == [Severity.WARNING]


def test_a_norm_that_jumps_after_a_warm_restart_is_not_a_warning() -> None:
    facts: list[Fact] = [
        reading(t, 1.0, 0.3 if t < 200 else 6.0, learning_rates=(RATE if t < 200 else 100 * RATE,)) for t in range(220)
    ]

    assert findings_of(rule_named("exploding_gradient"), facts) == []


def test_a_rising_norm_is_an_info_while_the_loss_falls() -> None:
    facts: list[Fact] = [reading(t, 3.0 - t / 500, math.exp(t / 200)) for t in range(640)]

    assert severities(findings_of(rule_named("rising_norm"), facts)) == [Severity.INFO]


# --- flow ------------------------------------------------------------------------------------------------------------


def test_a_layer_initialised_to_zero_may_pass_no_gradient_for_one_step() -> None:
    facts: list[Fact] = [
        reading(t, gradients=table([0.0] * 10 + [1.0, 1.0], [1.0] * 10 + [0.0] * 2) if t == 0 else table([1.0] * 12))
        for t in range(30)
    ]

    for name in ("vanishing_gradient", "dead_units"):
        assert Severity.WARNING not in severities(findings_of(rule_named(name), facts))


def test_parameters_without_elements_get_no_gradient_to_compare() -> None:
    empty = table([0.0] * 6 + [0.1] * 6)
    gradients = dataclasses.replace(empty, numels=(0,) * 6 + empty.numels[6:])
    facts = [reading(step, gradients=gradients) for step in range(60)]
    assert findings_of(rule_named("vanishing_gradient"), facts) == []
    assert findings_of(rule_named("vanishing_gradient"), [reading(s, gradients=empty) for s in range(60)]) != []


def test_a_gradient_below_the_published_vanishing_threshold_is_an_info() -> None:
    facts: list[Fact] = [reading(t, gradients=table([1e-5] + [0.1] * 11)) for t in range(30)]

    assert severities(findings_of(rule_named("vanishing_gradient"), facts)) == [Severity.INFO]


def test_a_tiny_gradient_everywhere_is_an_info() -> None:
    facts: list[Fact] = [reading(t, 1.0, 1e-8) for t in range(30)]

    assert severities(findings_of(rule_named("vanishing_gradient"), facts)) == [Severity.INFO]


def test_an_embedding_with_mostly_unused_rows_is_not_dead() -> None:
    r = random.Random(0)
    facts: list[Fact] = [
        reading(t, gradients=table([0.1] * 12, [0.9 + 0.1 * r.random()] + [0.0] * 11)) for t in range(200)
    ]

    assert findings_of(rule_named("dead_units"), facts) == []


def test_an_expert_that_is_sometimes_unused_is_not_dead() -> None:
    r = random.Random(0)
    facts: list[Fact] = [
        reading(t, gradients=table([0.1] * 12, [float(r.random() < 0.45)] + [0.0] * 11)) for t in range(2000)
    ]

    assert findings_of(rule_named("dead_units"), facts) == []


@pytest.mark.parametrize(("bias_zeros", "num_found"), [(0.8, 1), (0.3, 0)])
def test_zeros_in_a_matrix_are_dead_units_only_if_the_bias_has_zeros_too(bias_zeros: float, num_found: int) -> None:
    """Pruning masks elements: most units still fire."""
    usual, masked = [0.0] * 12, [0.8, bias_zeros] + [0.0] * 10
    facts: list[Fact] = [reading(t, gradients=table([0.1] * 12, masked if t >= 50 else usual)) for t in range(90)]

    said = findings_of(rule_named("dead_units"), facts)

    assert [f.step for f in said] == [50] * num_found


def test_masked_elements_become_usual_and_later_dead_units_are_still_found() -> None:
    usual, masked, dead = ([0.0] * 12, [0.0] * 2 + [0.8] * 2 + [0.0] * 8, [0.0] * 2 + [0.8] * 2 + [0.9] * 2 + [0.0] * 6)
    zeros = [usual] * 50 + [masked] * 50 + [dead] * 50
    facts: list[Fact] = [reading(t, gradients=table([0.1] * 12, shares)) for t, shares in enumerate(zeros)]
    facts.insert(50, MaskChange(step=50))

    assert [f.step for f in findings_of(rule_named("dead_units"), facts)] == [100]


@pytest.mark.parametrize(("num_dead", "severity"), [(1, Severity.INFO), (10, Severity.WARNING)])
def test_missing_gradients_in_most_of_the_model_are_a_warning(num_dead: int, severity: Severity) -> None:
    zeros = [1.0] * num_dead + [0.0] * (12 - num_dead)
    facts: list[Fact] = [reading(t, gradients=table([1.0 - z for z in zeros], zeros)) for t in range(20)]

    said = findings_of(rule_named("dead_units"), facts)

    assert [(f.step, f.severity) for f in said] == [(0, severity)]


def test_a_step_without_any_gradient_does_not_make_units_dead() -> None:
    facts: list[Fact] = [reading(t) for t in range(40)]
    facts += [reading(t, 0.0, 0.0, gradients=table([0.0] * 12, [1.0] * 12)) for t in range(40, 60)]

    assert findings_of(rule_named("dead_units"), facts) == []


def test_an_unused_pooler_is_an_info() -> None:
    facts: list[Fact] = [reading(t, missing=("pooler.weight",), missing_share=0.01) for t in range(50)]

    said = findings_of(rule_named("missing_gradient"), facts)

    assert [(f.step, f.severity) for f in said] == [(0, Severity.INFO)]


def test_heads_used_alternately_are_not_missing() -> None:
    facts: list[Fact] = [
        reading(t, missing=("head_a.w",) if t % 2 else ("head_b.w",), missing_share=0.6) for t in range(50)
    ]

    assert findings_of(rule_named("missing_gradient"), facts) == []


def test_randomly_dropped_blocks_are_not_most_of_the_model() -> None:
    """Only the block missing at every step counts, however many others are missing at the last step."""
    facts: list[Fact] = [
        reading(t, missing=("a.w", "b.w", "c.w") if t % 2 else ("a.w",), missing_share=0.9 if t % 2 else 0.3)
        for t in range(20)
    ]

    said = findings_of(rule_named("missing_gradient"), facts)

    assert [(f.severity, f.evidence["share"]) for f in said] == [(Severity.INFO, 0.3)]


def test_a_stale_gradient_is_reported_once() -> None:
    facts: list[Fact] = [reading(t, stale=NAMES if t else ()) for t in range(50)]

    assert [f.step for f in findings_of(rule_named("stale_gradient"), facts)] == [1]


def test_flow_thresholds_come_from_the_configuration() -> None:
    config = DetectConfig(flow=FlowThresholds(missing_patience=2))
    facts: list[Fact] = [reading(t, missing=("w",), missing_share=0.6) for t in range(3)]

    assert len(findings_of(rule_named("missing_gradient", config), facts)) == 1


# --- the loss scale --------------------------------------------------------------------------------------------------


def overflow(t: int, scale: float) -> Fact:
    cells = [1.0, 1.0, 1, 0, 0.0] * len(NAMES)
    gradients = GradientTable(NAMES, NUMELS, cells)
    return reading(t, loss_scale=scale, num_nonfinite=12, skipped=True, gradients=gradients)


def test_the_search_for_a_loss_scale_is_an_info_and_not_a_collapse() -> None:
    facts: list[Fact] = [overflow(t, 2.0 ** (20 - t)) for t in range(8)]
    facts += [reading(t, loss_scale=4096.0) for t in range(8, 60)]
    detector = Detector(standard_rules(DetectConfig()))

    said = [f for fact in facts for f in detector.observe(fact)]

    assert {f.kind for f in said} == {"nonfinite_gradient"}
    assert set(severities(said)) == {Severity.INFO}


def test_a_scale_below_one_that_still_overflows_is_a_collapse() -> None:
    said = findings_of(rule_named("scaler_collapse"), [overflow(t, 2.0 ** (16 - t)) for t in range(20)])

    assert [(f.step, f.severity) for f in said] == [(0, Severity.ERROR)]


def test_an_occasional_overflow_is_normal_for_a_scaler() -> None:
    facts: list[Fact] = [overflow(t, 4096.0) if t % 50 == 49 else reading(t, loss_scale=4096.0) for t in range(500)]

    for name in ("scaler_collapse", "many_skips"):
        assert findings_of(rule_named(name), facts) == []


def test_a_nonfinite_gradient_names_the_parameters() -> None:
    finding = findings_of(rule_named("nonfinite_gradient"), [poisoned(4, math.nan)])[0]

    assert finding.message.startswith("NaN in the gradients of 12 of 12 parameters: layer0.weight, layer0.bias")
    assert finding.evidence["num_nonfinite"] == 36


# --- leading indicators ----------------------------------------------------------------------------------------------


def test_adams_rms_above_the_published_threshold_is_an_info() -> None:
    facts: list[Fact] = [reading(t, adam_rms={"w": 3.0}) for t in range(40)]

    assert severities(findings_of(rule_named("adam_rms"), facts)) == [Severity.INFO]


@pytest.mark.parametrize(("num_far", "expected"), [(1, [Severity.INFO]), (2, [Severity.INFO, Severity.WARNING])])
def test_adams_rms_far_above_its_baseline_is_a_warning_if_it_stays(num_far: int, expected: list[Severity]) -> None:
    """One odd batch is not the beginning of a spike."""
    usual: list[Fact] = [reading(t, adam_rms={"w": 1.0 + 0.02 * (t % 3), "u": 1.0}) for t in range(20)]
    far: list[Fact] = [reading(20 + t, adam_rms={"w": 4.0, "u": 1.0}) for t in range(num_far)]
    later: list[Fact] = [reading(30 + t, adam_rms={"w": 1.0, "u": 4.0 if t == 5 else 1.0}) for t in range(9)]

    assert severities(findings_of(rule_named("adam_rms"), [*usual, *far, *later])) == expected


def test_updates_proportional_to_the_learning_rate_are_usual() -> None:
    rates = [RATE * (100 if t > 50 else 1) for t in range(100)]
    facts: list[Fact] = [
        reading(t, learning_rates=(rate,), update_norm=rate, update_ratios={"w": 0.1 * rate})
        for t, rate in enumerate(rates)
    ]

    assert findings_of(rule_named("update_norm"), facts) == []
    assert findings_of(rule_named("update_ratio"), facts) == []


@pytest.mark.parametrize("ratio", [0.5, 1e-9])
def test_an_unusual_update_of_all_parameters_is_an_info(ratio: float) -> None:
    facts: list[Fact] = [reading(t, update_ratios={"w": ratio, "new": 1e30}) for t in range(40)]

    assert severities(findings_of(rule_named("update_ratio"), facts)) == [Severity.INFO]
