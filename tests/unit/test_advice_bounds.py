"""Advice at its exact limits: how long, how often, how far, and how it is rounded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from view_page import list_texts, read_report
from view_runs import make_incident, make_step, open_directory

from steadygrad.facts import Action, GradientTable, Incident, Outcome, Reading
from steadygrad.record.tally import MAX_NORMS, Tally
from steadygrad.view.advice import Advice, Seen, advise, see_run, see_tally
from steadygrad.view.read.run import open_run

FLAT = [(step, 0.5) for step in range(400)]
RISING = [(step, step + 1.0) for step in range(100)]


def find(seen: Seen, setting: str) -> Advice | None:
    return next((one for one in advise(seen) if one.setting == setting), None)


def begin(norm: float, until: int, num: int = 400, *, level: float = 0.5) -> list[tuple[int, float]]:
    """Norms that reach their level at a step and keep it."""
    return [(step, norm if step < until else level) for step in range(num)]


def ramp(peak: int, *, start: float = 0.0) -> list[tuple[int, float]]:
    """A rate that rises until a step and then stays constant."""
    return [(step, start + (1 - start) * min(1.0, step / peak)) for step in range(400)]


# --- enough data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num", "given"), [(49, []), (50, ["clip threshold"])])
def test_advice_needs_fifty_norms(num: int, given: list[str]) -> None:
    assert [one.setting for one in advise(Seen(norms=FLAT[:num]))] == given


@pytest.mark.parametrize(("num", "given"), [(54, False), (55, True)])
def test_a_threshold_needs_half_as_many_norms_after_settling(num: int, given: bool) -> None:
    assert (find(Seen(norms=begin(8.0, 30, num)), "clip threshold") is not None) is given


@pytest.mark.parametrize(("num_last", "num", "given"), [(8, 400, False), (4, 404, True)])
def test_norms_off_their_level_in_the_last_stretch_have_not_settled(num_last: int, num: int, given: bool) -> None:
    norms = begin(0.5, num - num_last, num, level=8.0)  # a stretch is 8 steps; a shorter rest does not count
    assert (advise(Seen(norms=norms)) != []) is given


# --- the clip threshold ---------------------------------------------------------------------------------------------


def test_a_threshold_is_the_95th_percentile_of_the_norms() -> None:
    flat = [(step, 100.0 + norm / 100) for step, norm in RISING]
    advice = find(Seen(norms=flat), "clip threshold")
    assert advice is not None
    assert sum(norm < advice.value for _, norm in flat) == 95
    assert str(advice) == (
        "clip threshold 1e+02: 95 % of the norms were below it, and nothing was clipped by a fixed norm"
    )


@pytest.mark.parametrize(
    ("num_clipped", "threshold", "given"), [(200, 0.1, False), (201, 0.1, True), (201, 0.5, False)]
)
def test_a_threshold_below_the_norms_is_raised_when_it_clips_more_than_half(
    num_clipped: int, threshold: float, given: bool
) -> None:
    seen = Seen(norms=FLAT, threshold=threshold, num_clipped=num_clipped, num_applied=400)
    assert (find(seen, "clip threshold") is not None) is given


@pytest.mark.parametrize(("threshold", "given"), [(5.0, False), (5.5, True)])
def test_a_threshold_more_than_ten_times_too_high_is_lowered(threshold: float, given: bool) -> None:
    advice = find(Seen(norms=FLAT, threshold=threshold, num_applied=400), "clip threshold")
    assert (advice is not None) is given
    if advice is not None:
        assert advice.value == 0.5
        assert advice.reason.endswith("5.5 lets through a spike of 11 times that")


# --- the warm-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "until", "steps"),
    [(250, 5, 5), (250, 10, 10), (550, 11, 15), (400, 48, 50), (400, 40, 40), (2000, 120, 150), (4000, 1200, 1500)],
)
def test_a_warm_up_lasts_until_the_norms_settle_rounded_to_a_plain_number(num: int, until: int, steps: int) -> None:
    advice = find(Seen(norms=begin(8.0, until, num), threshold=1.0), "warm-up")
    assert advice is not None
    assert str(advice) == (f"warm-up {steps} steps: until step {until} the norm was 16 times above what it settled at")


@pytest.mark.parametrize(
    ("began", "given"),
    [(1.0, None), (1.05, "2.1 times above"), (0.25, None), (0.2, "2.5 times below")],
)
def test_norms_settle_within_twice_or_half_of_their_level(began: float, given: str | None) -> None:
    advice = find(Seen(norms=begin(began, 40), threshold=1.0), "warm-up")
    assert (advice is None) is (given is None)
    assert given is None or given in str(advice)


@pytest.mark.parametrize(("until", "given"), [(192, True), (200, False), (240, False)])
def test_norms_that_settle_in_the_second_half_need_no_warm_up(until: int, given: bool) -> None:
    assert (find(Seen(norms=begin(8.0, until), threshold=1.0), "warm-up") is not None) is given


@pytest.mark.parametrize(("peak", "given"), [(30, True), (32, False)])
def test_a_warm_up_of_two_thirds_of_the_settling_time_is_enough(peak: int, given: bool) -> None:
    advice = find(Seen(norms=begin(8.0, 48), rates=ramp(peak), threshold=1.0), "warm-up")
    assert (advice is not None) is given
    if advice is not None:
        assert advice.value == 50
        assert advice.reason.endswith(f"settled at, and the rate had reached its height at step {peak}")


@pytest.mark.parametrize(
    ("until", "peak", "steps"), [(0, 19, None), (0, 20, 2), (0, 200, 20), (48, 200, 50), (48, 192, None)]
)
def test_a_warm_up_four_times_too_long_is_shortened_to_at_least_a_tenth(
    until: int, peak: int, steps: int | None
) -> None:
    advice = find(Seen(norms=begin(8.0, until), rates=ramp(peak), threshold=1.0), "warm-up")
    assert (None if advice is None else advice.value) == steps
    if advice is not None:
        assert advice.reason == (f"the norm had settled by step {until}, and the rate kept rising until step {peak}")


def test_two_rates_are_enough_to_detect_a_warm_up() -> None:
    advice = find(Seen(norms=FLAT, rates=[(0, 0.1), (200, 1.0)], threshold=1.0), "warm-up")
    assert advice is not None
    assert advice.value == 20


@pytest.mark.parametrize(("start", "given"), [(0.89, True), (0.91, False)])
def test_a_rate_that_starts_near_its_peak_has_no_warm_up_to_shorten(start: float, given: bool) -> None:
    seen = Seen(norms=FLAT, rates=ramp(200, start=start), threshold=1.0)
    assert (find(seen, "warm-up") is not None) is given


# --- the learning rate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "value"),
    [
        ([1e-4] * 4, None),
        ([0.9e-4] * 4, 0.01),
        ([1e-2] * 4, None),
        ([1.1e-2] * 4, 1e-4),
        ([0.0] * 4, None),
        ([1e-5] * 2, None),
        ([1e-5] * 3, 0.01),
        ([1e-3, 1e-3, *[1e-5] * 6], 0.01),
        ([1e-3, 1e-3, 1e-3, 1e-3, 1e-3, *[1e-5] * 3], None),
        ([*[1e-3] * 7, *[1e-5] * 5], 0.01),  # five of the last nine
    ],
)
def test_the_rate_changes_when_updates_are_ten_times_off_in_the_last_three_quarters(
    ratios: list[float], value: float | None
) -> None:
    advice = find(Seen(norms=FLAT, rates=[(0, 1e-3), (9, 5e-4)], ratios=ratios, threshold=1.0), "learning rate")
    assert (None if advice is None else advice.value) == (None if value is None else pytest.approx(value))


def test_without_a_rate_there_is_no_advice_about_it() -> None:
    assert advise(Seen(norms=FLAT, ratios=[1e-5] * 8, threshold=1.0)) == []


def change_rate(step: int, before: object, after: object) -> Incident:
    outcome = Outcome(action=Action.SCALE_LR, message="", before=before, after=after)  # type: ignore[arg-type]
    return dataclasses.replace(make_incident(step, action=Action.SCALE_LR), outcome=outcome)


@pytest.mark.parametrize(
    ("changes", "lowered"),
    [
        ([({"lr": 0.8}, {"lr": 0.4})], 0.4),
        ([({"lr": 0.8}, {"lr": 0.4}), ({"lr": 0.4}, {"lr": 0.8})], None),
        ([({"lr": 0.8}, {"lr": 1.6})], None),
        ([({"lr": 0.0}, {"lr": 0.0}), ({"lr": 0.8}, {"lr": 0.2})], 0.2),
        ([({"a": 0.1, "b": 0.8}, {"a": 0.05, "b": 0.4})], 0.4),
        ([({}, {}), ({"lr": 0.8}, {"lr": 0.4})], 0.4),
        ([({"lr": "odd"}, {"lr": 0.1})], None),
    ],
)
def test_the_guards_lowered_rate_is_advised(
    tmp_path: Path, changes: Sequence[tuple[object, object]], lowered: float | None
) -> None:
    incidents = [change_rate(10 * i, before, after) for i, (before, after) in enumerate(changes)]
    directory = open_directory(tmp_path)
    directory.write_step(make_step(0, learning_rates=(0.8,)))
    for incident in incidents:
        directory.write_incident(incident)
    directory.close()
    expected = None if lowered is None else pytest.approx(lowered)
    assert see_run(open_run(tmp_path).read_all()).lowered == expected
    assert see_tally(Tally(), incidents, max_norm=None).lowered == expected


# --- sources of the numbers -----------------------------------------------------------------------------------------


def test_the_report_advises_from_applied_steps_and_positive_norms(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(120):
        record = make_step(step, grad_norm=2.0, skipped=step >= 100, learning_rates=(1e-3,))
        directory.write_step(record if step < 80 else dataclasses.replace(record, grad_norm=0.0, clipped=False))
    directory.close()
    (line,) = list_texts(read_report(tmp_path), ".//div[@data-part='advice']//li")
    assert "1 clipped 80 % of the steps" in line
    seen = see_run(open_run(tmp_path).read_all())
    assert (len(seen.norms), seen.num_applied) == (80, 100)


def test_the_ratio_of_a_step_is_the_median_over_parameters(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "gradients": {}, "update_ratios": {"a": 1e-5, "b": 1e-3, "c": 1e-2}},
        {"step": 1, "gradients": {}, "update_ratios": {"a": 1e-4, "b": "nan"}},
        {"step": 2, "gradients": {}, "update_ratios": {"a": "inf"}},
    ]
    (tmp_path / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert see_run(open_run(tmp_path).read_all()).ratios == pytest.approx([1e-3, 1e-4])


def make_reading(step: int, norm: float, *, skipped: bool) -> Reading:
    return Reading(
        step=step,
        loss=1.0,
        grad_norm=norm,
        finite_grad_norm=norm,
        num_nonfinite=0,
        num_nan=0,
        clip_coefficient=1.0,
        skipped=skipped,
        learning_rates=(),
        gradients=GradientTable((), (), ()),
    )


def test_a_guard_advises_from_the_norms_it_remembers() -> None:
    tally = Tally()
    for step in range(MAX_NORMS + 4):
        tally.add(make_reading(step, 0.0 if step == 9 else 0.5, skipped=step < 3))
    seen = see_tally(tally, [], max_norm=2.0, rate=0.1)
    assert [step for step, _ in seen.norms] == [step for step in range(4, MAX_NORMS + 4) if step != 9]
    assert (seen.num_applied, seen.threshold) == (MAX_NORMS + 1, 2.0)
    assert list(seen.rates) == [(MAX_NORMS + 4, 0.1)]
    assert list(see_tally(tally, [], max_norm=2.0).rates) == []
