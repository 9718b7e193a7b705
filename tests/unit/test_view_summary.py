"""The summary at the end of a run: each number is that of the run, and events that did not happen are not mentioned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from view_runs import CAUSE, make_incident

from steadygrad.facts import Action, GradientTable, Incident, Outcome, Reading, Severity
from steadygrad.record.tally import Tally
from steadygrad.view.summary import summarise


def make_reading(step: int, norm: float, *, skipped: bool = False, num_dropped: int = 0, bad: str = "") -> Reading:
    """A step of a model with two parameters, of which `b` has the larger gradient; clipped at 1."""
    names = ("a", "b")
    cells = [cell for i, name in enumerate(names) for cell in (norm * i, norm * i, int(name == bad), 0, 0)]
    return Reading(
        step=step,
        loss=1.0,
        grad_norm=norm,
        finite_grad_norm=norm,
        num_nonfinite=1 if bad else 0,
        num_nan=0,
        clip_coefficient=1.0 / max(1.0, norm),
        skipped=skipped,
        learning_rates=(1e-3,),
        num_dropped_microbatches=num_dropped,
        gradients=GradientTable(names, (4, 4), cells),
    )


def add_up(*readings: Reading, actions: Sequence[Action] = ()) -> Tally:
    tally = Tally()
    for reading in readings:
        tally.add(reading)
    for action in actions:
        tally.add_outcome(Outcome(action=action, message=""))
    return tally


def read_lines(tally: Tally, incidents: Sequence[Incident] = (), *, max_norm: float | None = None) -> dict[str, str]:
    """Return first word of a line -> the rest of it."""
    lines = summarise(tally, incidents, max_norm=max_norm).splitlines()
    return {name: rest.strip() for name, _, rest in (line.partition(" ") for line in lines if line[0] != " ")}


def test_a_run_without_steps_has_a_summary_without_numbers() -> None:
    assert read_lines(Tally(), max_norm=1.0) == {
        "steps": "0, 0 skipped (0.0%)",
        "norm": "mean 0, median 0, 95 % below 0, max 0",
        "clipped": "0 steps (0.0%)",
        "incidents": "none",
    }


def test_steps_norms_and_clipping_are_those_of_the_run() -> None:
    tally = add_up(
        *(make_reading(step, 0.1 * (step + 1)) for step in range(40)),  # 0.1 to 4.0: thirty of them are above 1
        *(make_reading(step, 1.0, skipped=True, bad="b") for step in range(40, 45)),
    )
    assert read_lines(tally, max_norm=1.0) == {
        "steps": "45, 5 skipped (11.1%)",
        "loss": "first 1, last 1, best 1 at step 0",
        "norm": "mean 2.05, median 2.1, 95 % below 3.9, max 4",
        "clipped": "30 steps (75.0%), led by b in 30; a threshold of 3.9 (now 1) would have clipped one step in twenty",
        "non-finite": "b (5x)",
        "incidents": "none",
    }


def test_the_shares_of_a_single_step_are_none_or_all() -> None:
    assert read_lines(add_up(make_reading(0, 0.5, skipped=True)))["steps"] == "1, 1 skipped (100.0%)"
    assert "(100.0%), led by b in 1;" in read_lines(add_up(make_reading(0, 2.0)))["clipped"]


def test_without_a_threshold_one_is_advised_and_none_is_shown_as_current() -> None:
    assert read_lines(add_up(make_reading(0, 0.5)))["clipped"] == (
        "0 steps (0.0%); a threshold of 0.5 would have clipped one step in twenty"
    )


def test_zero_norms_give_no_threshold() -> None:
    assert read_lines(add_up(make_reading(0, 0.0), make_reading(1, 0.0)))["clipped"] == "0 steps (0.0%)"


@pytest.mark.parametrize(("num", "dropped_text"), [(0, ""), (3, ", 3 microbatches dropped")])
def test_microbatches_are_mentioned_if_some_were_dropped(num: int, dropped_text: str) -> None:
    tally = add_up(make_reading(0, 0.5, num_dropped=num), make_reading(1, 0.5))
    assert read_lines(tally)["steps"] == f"2, 0 skipped (0.0%){dropped_text}"


def test_actions_are_counted_by_type() -> None:
    tally = add_up(make_reading(0, 0.5), actions=[*Action, *Action, Action.ROLLBACK])
    assert read_lines(tally)["steps"] == (
        "1, 0 skipped (0.0%), 2 learning-rate changes, 2 weight-decay changes, 2 clip-threshold changes, 3 rollbacks, "
        "2 sanitised steps"
    )
    assert read_lines(add_up(actions=[Action.ROLLBACK]))["steps"].endswith(", 1 rollback")


def test_first_last_and_best_loss_are_exact_and_survive_a_resume() -> None:
    losses = [3.641, math.nan, 0.25, 5.39]
    tally = add_up(*(replace(make_reading(step, 0.5), loss=loss) for step, loss in enumerate(losses)))
    resumed = Tally()
    resumed.load_state_dict(tally.state_dict())
    for one in (tally, resumed):
        assert read_lines(one)["loss"] == "first 3.641, last 5.39, best 0.25 at step 2"


def test_the_summary_has_at_most_ten_lines() -> None:
    tally = add_up(
        *(make_reading(step, 0.1 if step > 30 else 9.0) for step in range(200)),
        make_reading(200, 1.0, skipped=True, bad="b"),
        actions=[Action.SCALE_LR],
    )
    incidents = [make_incident(100 + i, kind=f"kind_{i}", message=f"no {i}") for i in range(6)]
    lines = summarise(tally, incidents, extra=["rate       0.001"], run_dir="runs/first").splitlines()
    assert len(lines) == 10
    assert [line[:10].strip() for line in lines if line[0] != " "] == [
        *("steps", "loss", "norm", "clipped", "non-finite", "rate", "next run", "incidents", "report"),
    ]
    assert lines[-1] == "report     steadygrad report runs/first"


def test_the_three_worst_nonfinite_parameters_are_named() -> None:
    tally = Tally()
    tally.nonfinite.update({"a": 1, "b": 4, "c": 3, "d": 2})
    assert read_lines(tally)["non-finite"] == "b (4x), c (3x), d (2x)"


def test_extra_lines_come_before_the_incidents() -> None:
    lines = summarise(Tally(), [], extra=["rate       0.001", "snapshots  2"]).splitlines()
    assert lines[-3:] == ["rate       0.001", "snapshots  2", "incidents  none"]


def test_a_repeated_problem_is_one_line() -> None:
    often = [make_incident(step, cause=CAUSE) for step in range(30, 90)]
    others = [make_incident(100 + i, kind=f"kind_{i}", severity=Severity.WARNING, message=f"no {i}") for i in range(5)]
    lines = summarise(Tally(), [*often, *others]).splitlines()
    assert lines[lines.index("incidents  65 in 6 problems") + 1 :] == [
        "  60 times, steps 30 to 89: NaN gradient, born in the backward of aten.sqrt at model.py:41 (error); "
        "skipped 60×",
        "  step 100: no 0 (warning); the step was skipped",
        "  step 101: no 1 (warning); the step was skipped",
        "  step 102: no 2 (warning); the step was skipped",
        "  step 103: no 3 (warning); the step was skipped",
        "  step 104: no 4 (warning); the step was skipped",
    ]
    assert len(lines) <= 10


def test_a_notebook_keeps_the_lines_of_a_summary_and_escapes_them() -> None:
    shown = summarise(Tally(), [make_incident(3, message="<b>bold</b>")])._repr_html_()
    assert shown.startswith("<pre")
    assert "&lt;b&gt;bold&lt;/b&gt;" in shown
