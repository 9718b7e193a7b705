"""The facts: what they say about their fields, and that they cannot be changed."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from steadygrad.facts import (
    NUM_COLUMNS,
    Action,
    Cause,
    Finding,
    GradientStats,
    GradientTable,
    Incident,
    Outcome,
    Reading,
    Severity,
    StepRecord,
    Verdict,
)
from steadygrad.facts.carried import Carried, open_carried


class CountingCells(list[float]):
    """A row-by-row table that counts how many numbers are read from it."""

    def __init__(self, values: list[float]) -> None:
        super().__init__(values)
        self.taken = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.taken += len(found) if isinstance(index, slice) else 1
        return found


ROWS = {
    "embed.weight": (3.0, 2.0, 0.0, 0.0, 6.0),
    "head.weight": (0.5, 0.5, 3.0, 2.0, 0.0),
    "head.bias": (0.0, 0.0, 0.0, 0.0, 0.0),
}
NUMELS = (12, 8, 0)


def make_table() -> GradientTable:
    return GradientTable(tuple(ROWS), NUMELS, CountingCells([number for row in ROWS.values() for number in row]))


def make_reading(**changes: Any) -> Reading:
    healthy = {
        "step": 7,
        "loss": 1.25,
        "grad_norm": 2.0,
        "finite_grad_norm": 2.0,
        "num_nonfinite": 0,
        "num_nan": 0,
        "clip_coefficient": 1.0,
        "skipped": False,
        "learning_rates": (0.1, 0.3, 0.2),
    }
    return Reading(**{**healthy, **changes})


# --- GradientStats and GradientTable --------------------------------------------------------------------------------


def test_gradient_stats_separate_inf_from_nan_and_give_the_share_of_zeros() -> None:
    stats = GradientStats(norm=1.0, max_abs=1.0, num_nonfinite=5, num_nan=2, num_zeros=3, numel=12)
    assert stats.num_inf == 3
    assert stats.zero_share == 0.25


def test_a_gradient_without_elements_has_no_zeros() -> None:
    assert GradientStats(0.0, 0.0, 0, 0, 0, 0).zero_share == 0.0


def test_a_table_maps_names_to_rows() -> None:
    table = make_table()
    assert isinstance(table, Mapping)
    assert list(table) == list(ROWS)
    assert len(table) == 3
    assert "head.bias" in table
    assert "tail.bias" not in table
    assert table["embed.weight"] == GradientStats(3.0, 2.0, 0, 0, 6, 12)
    assert table["head.weight"] == GradientStats(0.5, 0.5, 3, 2, 0, 8)
    assert table.row(2) == table["head.bias"] == GradientStats(0.0, 0.0, 0, 0, 0, 0)
    assert dict(table.items()) == {name: table[name] for name in ROWS}


def test_counts_are_integers() -> None:
    stats = make_table()["head.weight"]
    assert all(type(n) is int for n in (stats.num_nonfinite, stats.num_nan, stats.num_zeros, stats.num_inf))


@pytest.mark.parametrize("name", ["tail.bias", "", "head"])
def test_a_missing_name_raises_a_key_error_with_the_name(name: str) -> None:
    with pytest.raises(KeyError) as caught:
        make_table()[name]
    assert caught.value.args == (name,)
    assert make_table().get(name) is None


def test_only_requested_rows_are_decoded() -> None:
    table = make_table()
    cells = table.cells
    assert isinstance(cells, CountingCells)
    assert (len(table), list(table), cells.taken) == (3, list(ROWS), 0)
    _ = table["head.weight"]
    assert cells.taken == NUM_COLUMNS


def test_norms_and_nonfinite_rows_are_in_model_order() -> None:
    table = make_table()
    assert list(table.norms.items()) == [("embed.weight", 3.0), ("head.weight", 0.5), ("head.bias", 0.0)]
    assert table.nonfinite() == {"head.weight": table["head.weight"]}


def test_an_empty_table_is_empty() -> None:
    table = make_reading().gradients
    assert (len(table), dict(table), table.norms, table.nonfinite()) == (0, {}, {}, {})


# --- Reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [(math.nan, 0.1, 0.3), (0.1, math.nan, 0.3), (0.3, 0.1, math.nan)])
def test_groups_without_a_rate_do_not_count_at_any_position(rates: tuple[float, ...]) -> None:
    assert make_reading(learning_rates=rates).learning_rate == 0.3
    assert make_reading(learning_rates=(math.nan,)).learning_rate is None


def test_a_healthy_reading_is_neither_clipped_nor_nonfinite() -> None:
    reading = make_reading()
    assert not reading.clipped
    assert not reading.is_nonfinite
    assert not reading.loss_is_nonfinite
    assert reading.applied_norm == 2.0
    assert reading.learning_rate == 0.3


def test_a_clipped_step_has_the_clipped_norm_as_applied_norm() -> None:
    reading = make_reading(clip_coefficient=0.25)
    assert reading.clipped
    assert reading.applied_norm == 0.5


def test_a_skipped_step_is_not_clipped_and_has_no_applied_norm() -> None:
    reading = make_reading(clip_coefficient=0.25, skipped=True)
    assert not reading.clipped
    assert reading.applied_norm == 0.0


def test_the_applied_norm_is_finite_even_when_the_measured_one_is_not() -> None:
    reading = make_reading(grad_norm=math.nan, finite_grad_norm=4.0, num_nonfinite=1, num_nan=1, clip_coefficient=0.5)
    assert reading.applied_norm == 2.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_makes_the_reading_nonfinite(loss: float) -> None:
    reading = make_reading(loss=loss)
    assert reading.loss_is_nonfinite
    assert reading.is_nonfinite


def test_one_nonfinite_gradient_element_makes_the_reading_nonfinite() -> None:
    reading = make_reading(num_nonfinite=1, grad_norm=math.inf)
    assert reading.is_nonfinite
    assert not reading.loss_is_nonfinite


def test_a_missing_loss_is_not_nonfinite() -> None:
    assert not make_reading(loss=None).is_nonfinite


def test_without_learning_rates_the_largest_is_none() -> None:
    assert make_reading(learning_rates=()).learning_rate is None


# --- StepRecord -----------------------------------------------------------------------------------------------------


def test_a_step_record_takes_its_scalars_from_the_reading() -> None:
    reading = make_reading(
        clip_coefficient=0.5,
        num_nonfinite=3,
        loss_scale=1024.0,
        num_microbatches=4,
        num_dropped_microbatches=1,
    )
    assert StepRecord.of(reading, time_seconds=12.5) == StepRecord(
        step=7,
        loss=1.25,
        grad_norm=2.0,
        clip_coefficient=0.5,
        clipped=True,
        skipped=False,
        num_nonfinite=3,
        learning_rates=(0.1, 0.3, 0.2),
        loss_scale=1024.0,
        num_microbatches=4,
        num_dropped_microbatches=1,
        time_seconds=12.5,
    )


def test_a_step_record_shares_its_names_with_the_reading_except_clock_and_logged_values() -> None:
    named = {f.name for f in dataclasses.fields(StepRecord)} - {"time_seconds", "extra"}
    assert all(hasattr(make_reading(), name) for name in named)


# --- words ----------------------------------------------------------------------------------------------------------


def test_severities_are_ordered_as_declared() -> None:
    ranks = [s.rank for s in (Severity.INFO, Severity.WARNING, Severity.ERROR, Severity.CRITICAL)]
    assert ranks == sorted(set(ranks))
    assert [s.value for s in sorted(Severity, key=lambda s: s.rank)] == ["info", "warning", "error", "critical"]


def test_enum_members_print_as_their_values() -> None:
    assert f"{Severity.ERROR} {Action.SKIP}" == "error skip"
    assert Severity("critical") is Severity.CRITICAL


def test_raise_is_another_name_for_halt() -> None:
    assert Action.RAISE is Action.HALT
    assert [a.value for a in Action] == [
        "none",
        "clip",
        "skip",
        "sanitize",
        "scale_lr",
        "scale_weight_decay",
        "tighten_clip",
        "rollback",
        "halt",
    ]


FINDING = Finding(kind="nonfinite_loss", severity=Severity.ERROR, step=3, message="the loss is nan")
VERDICT = Verdict(action=Action.SKIP, reason="it must not reach a weight")
OUTCOME = Outcome(action=Action.SKIP, message="skipped")
NOUNS = [
    GradientStats(0.0, 0.0, 0, 0, 0, 0),
    make_table(),
    make_reading(),
    FINDING,
    Cause(kind="nan", phase="forward"),
    VERDICT,
    OUTCOME,
    Incident(step=3, finding=FINDING, verdict=VERDICT, outcome=OUTCOME),
    StepRecord.of(make_reading(), time_seconds=0.0),
]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: type(noun).__name__)
def test_a_fact_is_frozen_and_takes_no_new_fields(noun: Any) -> None:
    for field in dataclasses.fields(noun):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(noun, field.name, None)
    with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
        noun.something_new = 1


def test_an_incident_joins_finding_verdict_outcome_and_cause() -> None:
    cause = Cause(kind="nan", phase="forward", op="aten.sqrt")
    incident = Incident(step=3, finding=FINDING, verdict=VERDICT, outcome=OUTCOME, cause=cause)
    assert (incident.finding, incident.verdict.action, incident.outcome, incident.cause) == (
        FINDING,
        Action.SKIP,
        OUTCOME,
        cause,
    )


# --- Carried --------------------------------------------------------------------------------------------------------


def test_a_finding_on_a_log_record_survives_pickle_and_copy() -> None:
    finding = Finding(kind="nonfinite_loss", severity=Severity.ERROR, step=3, message="the loss is NaN")
    carried = Carried(finding.kind, finding)
    for copied in (pickle.loads(pickle.dumps(carried)), copy.copy(carried), copy.deepcopy(carried)):
        assert copied == "nonfinite_loss"
        assert open_carried(copied) == finding
