"""Rules about occasional measurements: batches, activations, weights, buffers, the program."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from rule_traces import findings_of, poisoned, reading, rule_named

from steadygrad.facts import (
    ActivationScan,
    ActivationStats,
    Broadcast,
    Fact,
    GraphScan,
    InputScan,
    InputStats,
    ParameterScan,
    Severity,
)


def batch(step: int, **tensors: InputStats) -> InputScan:
    return InputScan(step=step, tensors=tensors)


NAN_INPUT = InputStats(numel=8, num_nonfinite=1)
FULL_MASK = InputStats(numel=8, num_zeros=3, is_binary=True)
EMPTY_MASK = InputStats(numel=8, num_zeros=8, is_binary=True)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan_first", [True, False])
def test_a_nonfinite_input_is_blamed_before_or_after_the_reading(scan_first: bool) -> None:
    pair: list[Fact] = [batch(5, x=NAN_INPUT), reading(5, math.nan)]

    said = findings_of(rule_named("nonfinite_input"), pair if scan_first else pair[::-1])

    assert [(f.step, f.severity, f.evidence["tensors"]) for f in said] == [(5, Severity.ERROR, ["x"])]


def test_a_nonfinite_input_of_a_healthy_step_is_an_info() -> None:
    facts: list[Fact] = [f for t in range(50) for f in (batch(t, mask=NAN_INPUT), reading(t))]

    said = findings_of(rule_named("nonfinite_input"), facts)

    assert [(f.step, f.severity) for f in said] == [(0, Severity.INFO)]
    assert said[0].message == "the batch holds NaN or Inf in mask (1 element)"


def test_a_tensor_that_is_nonfinite_at_healthy_steps_is_not_blamed() -> None:
    facts: list[Fact] = [f for t in range(9) for f in (batch(t, mask=NAN_INPUT), reading(t))]
    facts += [batch(9, mask=NAN_INPUT, x=NAN_INPUT), reading(9, math.nan)]

    said = [f for f in findings_of(rule_named("nonfinite_input"), facts) if f.severity is Severity.ERROR]

    assert [f.evidence["tensors"] for f in said] == [["x"]]


def test_a_scan_is_not_matched_with_the_reading_of_another_step() -> None:
    facts: list[Fact] = [reading(4, math.nan), batch(5, x=NAN_INPUT), reading(6, math.nan)]

    assert findings_of(rule_named("nonfinite_input"), facts) == []


@pytest.mark.parametrize(("loss", "severity"), [(math.nan, Severity.WARNING), (0.0, Severity.INFO)])
def test_a_single_empty_mask_is_found_when_the_loss_shows_it(loss: float, severity: Severity) -> None:
    facts: list[Fact] = [f for t in range(3) for f in (reading(t), batch(t, mask=FULL_MASK))]
    facts += [reading(3, loss), batch(3, mask=EMPTY_MASK)]

    said = findings_of(rule_named("all_labels_masked"), facts)

    assert [(f.step, f.severity) for f in said] == [(3, severity)]


def test_an_empty_mask_at_a_healthy_step_is_not_an_error() -> None:
    facts: list[Fact] = [f for t in range(9) for f in (reading(t), batch(t, m=EMPTY_MASK if t % 3 else FULL_MASK))]

    assert findings_of(rule_named("all_labels_masked"), facts) == []


@pytest.mark.parametrize(("loss", "num_found"), [(0.0, 1), (math.nan, 1), (0.3, 0)])
def test_labels_that_are_all_ignored_are_reported_if_the_step_has_nothing_else(loss: float, num_found: int) -> None:
    labels = InputStats(numel=8, num_ignored=8, is_floating=False)
    for facts in ([reading(3, loss), batch(3, y=labels)], [batch(3, y=labels), reading(3, loss)]):
        said = findings_of(rule_named("all_labels_masked"), facts)

        assert [f.severity for f in said] == [Severity.WARNING] * num_found


def test_returns_that_are_all_zero_are_not_a_mask() -> None:
    returns = InputStats(numel=8, max_abs=1.3)
    facts: list[Fact] = [f for t in range(5) for f in (reading(t), batch(t, returns=returns))]
    facts += [reading(5, math.nan), batch(5, returns=InputStats(numel=8, num_zeros=8, is_binary=True))]

    assert findings_of(rule_named("all_labels_masked"), facts) == []


def test_token_ids_are_not_outliers_and_neither_is_a_first_batch() -> None:
    ids: list[Fact] = [
        batch(t, ids=InputStats(numel=8, max_abs=50_000.0 if t == 30 else 9.0, is_floating=False)) for t in range(31)
    ]

    assert findings_of(rule_named("outlier_input"), ids) == []
    assert findings_of(rule_named("outlier_input"), [batch(0, x=InputStats(numel=8, max_abs=1e9))]) == []


# --- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "field"), [("dead_activation", "dead_share"), ("saturated_activation", "saturated_share")]
)
def test_a_constant_fault_of_a_module_is_one_info(rule: str, field: str) -> None:
    facts: list[Fact] = [
        ActivationScan(step=t, modules={"act": ActivationStats(**{field: 0.9})}) for t in range(0, 900, 10)
    ]

    said = findings_of(rule_named(rule), facts)

    assert [(f.step, f.severity) for f in said] == [(0, Severity.INFO)]


def test_dead_units_in_one_scan_are_not_a_warning() -> None:
    shares = [0.1, 0.1, 0.9, 0.1, 0.1]
    facts: list[Fact] = [
        ActivationScan(step=t, modules={"act": ActivationStats(dead_share=share)}) for t, share in enumerate(shares)
    ]

    assert all(f.severity is Severity.INFO for f in findings_of(rule_named("dead_activation"), facts))


def test_a_constant_output_is_an_info() -> None:
    facts: list[Fact] = [ActivationScan(step=t, output_std=0.0, output_scale=1.0) for t in range(5)]

    assert [f.severity for f in findings_of(rule_named("constant_output"), facts)] == [Severity.INFO]


# --- weights and buffers ---------------------------------------------------------------------------------------------


def test_a_buffer_that_starts_at_infinity_is_healthy_until_it_becomes_finite() -> None:
    facts: list[Fact] = [
        ParameterScan(step=-1, nonfinite_buffers={"low": 1}),
        ParameterScan(step=5, nonfinite_buffers={"low": 1}),
        ParameterScan(step=6),
    ]
    rule = rule_named("nonfinite_buffer")

    assert findings_of(rule, facts) == []
    assert findings_of(rule, [ParameterScan(step=7, nonfinite_buffers={"low": 1})]) == []
    assert [f.severity for f in findings_of(rule, [poisoned(8, math.nan)])] == [Severity.ERROR]


def test_a_bad_buffer_is_an_error_if_it_belongs_to_a_norm_or_the_next_step_is_bad() -> None:
    for name, following, expected in (
        ("norm.running_var", reading(1), Severity.ERROR),
        ("state", poisoned(1, math.nan), Severity.ERROR),
        ("state", reading(1), Severity.INFO),
    ):
        facts: list[Fact] = [ParameterScan(step=-1), ParameterScan(step=0, nonfinite_buffers={name: 1}), following]
        assert [f.severity for f in findings_of(rule_named("nonfinite_buffer"), facts)] == [expected]


def test_a_weight_that_the_program_made_infinite_is_excused_if_the_next_step_is_finite() -> None:
    bad = {"choice": 1}
    for edited, following, num in ((True, reading(4), 0), (True, poisoned(4, math.nan), 1), (False, reading(4), 1)):
        facts: list[Fact] = [ParameterScan(step=1)]
        facts += [ParameterScan(step=3, nonfinite_parameters=bad, is_edited=edited), following]
        facts += [ParameterScan(step=5, nonfinite_parameters=bad)]
        assert len(findings_of(rule_named("nonfinite_parameter"), facts)) == num


def test_a_nonfinite_parameter_is_reported_once_and_again_after_recovery() -> None:
    bad = {"w": 1}
    facts: list[Fact] = [ParameterScan(step=t, nonfinite_parameters=bad if t != 3 else {}) for t in range(6)]

    said = findings_of(rule_named("nonfinite_parameter"), facts)
    assert [f.step for f in said] == [0, 4]
    assert said[0].message == "NaN or Inf in 1 parameter: w"
    assert "Where nothing was rolled back, load a checkpoint" in said[0].advice  # a rollback has already repaired it


def test_what_was_nonfinite_before_training_is_healthy_if_the_first_step_is() -> None:
    given = ParameterScan(step=-1, nonfinite_parameters={"mask": 3})
    rule = rule_named("nonfinite_parameter")

    assert findings_of(rule, [given, reading(0), replace(given, step=1)]) == []
    assert findings_of(rule, [reading(5, math.nan), replace(given, step=5)]) == []  # not after all this time
    more = ParameterScan(step=6, nonfinite_parameters={"mask": 4, "w": 1})
    assert [f.evidence["num_nonfinite"] for f in findings_of(rule, [more])] == [5]


@pytest.mark.parametrize("scaled", [False, True])
def test_what_was_nonfinite_before_training_is_reported_if_the_first_step_is_too(scaled: bool) -> None:
    scale = {"loss_scale": 65536.0} if scaled else {}
    given = ParameterScan(step=-1, nonfinite_parameters={"w": 1})
    overflow = reading(0, num_nonfinite=4, **scale)
    facts = [given, overflow, reading(1, math.nan, **scale)]

    # An overflow under a loss scaler says nothing about the weights.
    assert [f.step for f in findings_of(rule_named("nonfinite_parameter"), facts)] == [1 if scaled else 0]


def test_a_parameter_that_stops_moving_is_an_info() -> None:
    facts: list[Fact] = [
        ParameterScan(step=t, unchanged=("w",), num_changed=5)
        if t == 0 or t > 3
        else ParameterScan(step=t, num_changed=6, changed=("w",))
        for t in range(12)
    ]

    said = findings_of(rule_named("unchanged_parameter"), facts)

    assert [(f.step, f.severity) for f in said] == [(4, Severity.INFO)]


def test_a_parameter_that_stops_after_moving_throughout_is_not_stuck() -> None:
    moving = [ParameterScan(step=t, num_changed=2, changed=("v", "w")) for t in range(5)]
    still = [ParameterScan(step=t, unchanged=("w",), num_changed=1, changed=("v",)) for t in range(5, 12)]

    assert [f.severity for f in findings_of(rule_named("unchanged_parameter"), [*moving, *still])] == [Severity.INFO]


def test_a_run_in_which_everything_stops_has_no_stuck_parameter() -> None:
    moving: list[Fact] = [ParameterScan(step=0, num_changed=2, changed=("v", "w"))]
    facts: list[Fact] = [ParameterScan(step=t, unchanged=("v", "w"), num_changed=0) for t in range(1, 12)]

    assert [f.severity for f in findings_of(rule_named("unchanged_parameter"), moving + facts)] == [Severity.INFO]


@pytest.mark.parametrize(
    ("rate", "norm", "severity"),
    [(0.1, 1.0, Severity.WARNING), (1e-6, 1.0, Severity.INFO), (0.1, 1e-9, Severity.INFO)],
    ids=["stopped", "decayed", "converged"],
)
def test_a_run_that_stops_at_full_rate_and_gradient_is_stuck(rate: float, norm: float, severity: Severity) -> None:
    facts: list[Fact] = []
    for t in range(4):
        facts += [
            ParameterScan(step=t, num_changed=2, changed=("v", "w")),
            reading(t, 1.0, 1.0, learning_rates=(0.1,)),
        ]
    for t in range(4, 12):
        facts += [
            ParameterScan(step=t, unchanged=("v", "w"), num_changed=0),
            reading(t, 1.0, norm, learning_rates=(rate,)),
        ]

    assert [f.severity for f in findings_of(rule_named("unchanged_parameter"), facts)] == [severity]


def test_a_run_in_which_nothing_ever_moved_is_stuck() -> None:
    facts: list[Fact] = [ParameterScan(step=t, unchanged=("v", "w"), num_changed=0) for t in range(12)]

    found = findings_of(rule_named("unchanged_parameter"), facts)

    assert [(f.severity, f.step) for f in found] == [(Severity.WARNING, 0)]


# --- the program -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scan", "severity"),
    [
        (GraphScan(step=0, unoptimized=("backbone.w",)), Severity.INFO),
        (GraphScan(step=0, unoptimized=("head.w",), foreign=("optimizer0.group0.3",)), Severity.WARNING),
        (GraphScan(step=0, hidden=("layers[0].weight",)), Severity.WARNING),
    ],
)
def test_parameters_omitted_on_purpose_are_an_info_and_a_lost_layer_is_a_warning(
    scan: GraphScan, severity: Severity
) -> None:
    said = findings_of(rule_named("unregistered_layers"), [scan, scan])

    assert [f.severity for f in said] == [severity]


@pytest.mark.parametrize(
    ("left", "right", "silent"),
    [
        ((32, 1), (32,), True),
        ((32,), (32, 1), True),
        ((16, 1), (64,), False),  # positions times frequencies
        ((8, 1, 4), (1, 8, 4), False),  # an outer difference that names its axes
        ((1, 1), (1,), False),
        ((32, 10), (10,), False),  # a bias
    ],
)
def test_a_broadcast_that_pairs_all_samples_is_silent(
    left: tuple[int, ...], right: tuple[int, ...], silent: bool
) -> None:
    scan = GraphScan(step=0, broadcasts=(Broadcast(op="sub", left=left, right=right, where="train.py:7"),))

    said = findings_of(rule_named("silent_broadcast"), [scan, scan])

    assert [f.severity for f in said] == [Severity.WARNING] * silent
