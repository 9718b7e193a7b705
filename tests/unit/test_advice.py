"""Advice from a finished run: what it says, why, and when there is none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from view_runs import NAMES, make_gradients, make_incident, make_step, open_directory

from steadygrad.facts import Action, GradientTable, Incident, Outcome, Reading
from steadygrad.record.tally import Tally
from steadygrad.view.advice import Advice, Seen, advise, find_peak, find_settled, see_run, see_tally
from steadygrad.view.read.run import open_run
from steadygrad.view.render.parts import render_parts
from steadygrad.view.summary import summarise


def make_norms(level: Callable[[int], float], num: int = 400, seed: int = 0) -> list[tuple[int, float]]:
    noise = random.Random(seed)
    return [(step, level(step) * math.exp(noise.gauss(0, 0.2))) for step in range(num)]


def find(advices: list[Advice], setting: str) -> Advice | None:
    return next((one for one in advices if one.setting == setting), None)


FLAT = make_norms(lambda step: 0.5)
SETTLING = make_norms(lambda step: 0.5 + 20 * math.exp(-step / 15))


# --- the clip threshold ---------------------------------------------------------------------------------------------


def test_a_threshold_that_clips_most_steps_is_raised_above_most_norms() -> None:
    advice = find(advise(Seen(norms=FLAT, threshold=0.1, num_clipped=390, num_applied=400)), "clip threshold")
    assert advice is not None
    share = sum(norm <= advice.value for _, norm in FLAT) / len(FLAT)
    assert share == pytest.approx(0.95, abs=0.01)
    assert "0.1 clipped 97.5 % of the steps" in advice.reason


def test_a_threshold_far_above_all_norms_is_lowered() -> None:
    advice = find(advise(Seen(norms=FLAT, threshold=100.0, num_applied=400)), "clip threshold")
    assert advice is not None
    assert 0.5 < advice.value < 1.0
    assert "lets through a spike" in advice.reason


def test_a_run_without_clipping_gets_a_threshold() -> None:
    advice = find(advise(Seen(norms=FLAT, num_applied=400)), "clip threshold")
    assert advice is not None
    assert "nothing was clipped" in advice.reason


def test_norms_before_settling_do_not_count() -> None:
    advice = find(advise(Seen(norms=SETTLING, num_applied=400)), "clip threshold")
    assert advice is not None
    assert advice.value < 1.1
    assert "since they settled" in advice.reason


def test_a_threshold_that_fits_is_left_alone() -> None:
    assert advise(Seen(norms=FLAT, threshold=1.0, num_clipped=4, num_applied=400)) == []


# --- the warm-up ----------------------------------------------------------------------------------------------------


def test_norms_that_settle_late_need_a_warm_up() -> None:
    advice = find(advise(Seen(norms=SETTLING, rates=[(0, 1e-3), (399, 1e-3)], threshold=1.0)), "warm-up")
    assert advice is not None
    settled = find_settled(SETTLING)
    assert 30 <= settled <= 90
    assert settled <= advice.value <= 2 * settled
    assert "above what it settled at" in advice.reason


def test_a_warm_up_much_longer_than_the_norms_need_is_shortened() -> None:
    rates = [(step, 1e-3 * min(1.0, (step + 1) / 200)) for step in range(400)]
    advice = find(advise(Seen(norms=FLAT, rates=rates, threshold=1.0)), "warm-up")
    assert advice is not None
    assert 10 <= advice.value <= 50
    assert "until step 199" in advice.reason


def test_norms_settled_from_the_start_need_no_warm_up() -> None:
    assert find(advise(Seen(norms=FLAT, rates=[(0, 1e-3), (399, 1e-3)], threshold=1.0)), "warm-up") is None


def test_a_run_with_a_forgotten_start_gets_no_advice_about_its_warm_up() -> None:
    later = [(step + 5000, norm) for step, norm in SETTLING]
    assert find(advise(Seen(norms=later, threshold=1.0)), "warm-up") is None


def test_the_peak_of_a_rate_is_where_it_stops_rising() -> None:
    assert find_peak([(0, 1.0), (1, 1.0)]) is None
    assert find_peak([(0, 0.1), (5, 0.5), (10, 1.0), (20, 0.3)]) == 10
    assert find_peak([(0, 0.5), (5, 0.1), (10, 1.0)]) is None


# --- the learning rate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "factor", "word"),
    [(2e-5, 10.0, "slowly"), (5e-5, 10.0, "slowly"), (0.05, 0.1, "fast"), (0.02, 0.1, "fast")],
)
def test_unusual_updates_change_the_rate_by_at_most_ten(ratio: float, factor: float, word: str) -> None:
    seen = Seen(norms=FLAT, rates=[(0, 1e-3)], ratios=[ratio] * 8, threshold=1.0)
    advice = find(advise(seen), "learning rate")
    assert advice is not None
    assert advice.value == pytest.approx(1e-3 * factor)
    assert word in advice.reason


def test_usual_updates_leave_the_rate_alone() -> None:
    assert advise(Seen(norms=FLAT, rates=[(0, 1e-3)], ratios=[1e-3] * 8, threshold=1.0)) == []


def test_a_rate_lowered_twice_is_advised_as_lowered(tmp_path: Path) -> None:
    run = open_directory(tmp_path)
    for step in range(100):
        run.write_step(make_step(step, learning_rates=(8e-3 if step < 40 else 4e-3 if step < 60 else 2e-3,)))
    for step, before in ((40, 8e-3), (60, 4e-3)):
        run.write_incident(make_lowering(step, before))
    run.close()

    advice = find(advise(see_run(open_run(tmp_path).read_all())), "learning rate")
    assert advice is not None
    assert advice.value == pytest.approx(2e-3)
    assert "lower" in advice.reason
    from_tally = see_tally(Tally(), [make_lowering(40, 8e-3), make_lowering(60, 4e-3)], max_norm=None)
    assert from_tally.lowered == pytest.approx(2e-3)


def make_lowering(step: int, before: float) -> Incident:
    incident = make_incident(step, action=Action.SCALE_LR)
    outcome = Outcome(action=Action.SCALE_LR, message="", before={"lr": before}, after={"lr": before / 2})
    return Incident(step=step, finding=incident.finding, verdict=incident.verdict, outcome=outcome)


# --- from a record, and from a guard --------------------------------------------------------------------------------


def test_a_record_and_a_tally_of_the_same_run_agree_about_clipping(tmp_path: Path) -> None:
    run, tally = open_directory(tmp_path), Tally()
    for step, norm in SETTLING:
        run.write_step(make_step(step, grad_norm=norm, clipped=norm > 1, learning_rates=(1e-3,)))
        run.write_layers(step, make_gradients(step), dict.fromkeys(NAMES, 2e-5))
        tally.add(make_reading(step, norm))
    run.close()

    from_record = advise(see_run(open_run(tmp_path).read_all()))
    from_tally = advise(see_tally(tally, [], max_norm=1.0, rate=1e-3))
    assert [one.setting for one in from_record] == [one.setting for one in from_tally] == ["warm-up", "learning rate"]
    assert find(from_record, "learning rate") == find(from_tally, "learning rate")


def make_reading(step: int, norm: float) -> Reading:
    return Reading(
        step=step,
        loss=1.0,
        grad_norm=norm,
        finite_grad_norm=norm,
        num_nonfinite=0,
        num_nan=0,
        clip_coefficient=min(1.0, 1.0 / norm),
        skipped=False,
        learning_rates=(1e-3,),
        update_ratios=dict.fromkeys(NAMES, 2e-5),
        gradients=GradientTable((), (), ()),
    )


def test_the_summary_has_one_line_for_each_advice() -> None:
    tally = Tally()
    for step, norm in SETTLING:
        tally.add(make_reading(step, norm))
    lines = [line for line in summarise(tally, [], max_norm=1.0, rate=1e-3).splitlines() if line.startswith("next run")]
    assert len(lines) == 2
    assert lines[1].startswith("next run   learning rate 0.01: a step changed the median parameter by 2e-05")


def test_a_short_or_empty_run_gets_no_advice(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    assert advise(see_run(open_run(tmp_path).read_all())) == []
    assert advise(see_tally(Tally(), [], max_norm=None)) == []
    assert advise(Seen(norms=SETTLING[:20])) == []


def test_a_tally_keeps_updates_over_a_resume_and_loads_older_states() -> None:
    tally = Tally()
    tally.add(make_reading(0, 1.0))
    state = tally.state_dict()
    again, older = Tally(), Tally()
    again.load_state_dict(state)
    older.load_state_dict({name: value for name, value in state.items() if name != "ratios"})
    assert list(again.ratios) == [2e-5]
    assert list(older.ratios) == []


def test_the_report_has_a_section_with_advice(tmp_path: Path) -> None:
    for name, norms in (("settling", SETTLING), ("flat", FLAT)):
        run = open_directory(tmp_path / name)
        for step, norm in norms:
            run.write_step(make_step(step, grad_norm=norm, clipped=norm > 1, learning_rates=(1e-3,)))
        run.close()
    section = render_parts(open_run(tmp_path / "settling").read_all())["advice"]
    assert "For the next run" in section
    assert "<strong>warm-up " in section
    assert render_parts(open_run(tmp_path / "flat").read_all())["advice"] == ""
