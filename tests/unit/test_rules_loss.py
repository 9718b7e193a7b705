"""Rules about the loss: spike, zero, explosion, divergence, plateau."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from rule_traces import RATE, findings_of, reading, rule_named

from steadygrad.config import DetectConfig, LossThresholds
from steadygrad.detect.forecast import Forecast
from steadygrad.facts import EpochEnd, Fact, Finding, Flush, Reading, Severity


def synthetic(num_steps: int, *, seed: int = 0, sigma: float = 0.03) -> list[float]:
    """The trace for comparing the peers' rules: 2.7 + 8.3 exp(-t/300) + N(0, 0.03)."""
    r = random.Random(seed)
    return [2.7 + 8.3 * math.exp(-t / 300) + r.gauss(0, sigma) for t in range(num_steps)]


def spikes(losses: Sequence[float], rates: Callable[[int], float] = lambda t: RATE) -> list[Finding]:
    facts: list[Fact] = [reading(t, loss, learning_rates=(rates(t),)) for t, loss in enumerate(losses)]
    return findings_of(rule_named("loss_spike"), facts)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("height", "length"), [(0.3, 1), (1.0, 1), (3.0, 1), (1.0, 5), (6.0, 6)])
def test_a_spike_is_found_at_its_first_step_and_reported_once(seed: int, height: float, length: int) -> None:
    losses = synthetic(1700, seed=seed)
    for t in range(1600, 1600 + length):
        losses[t] += height

    assert [f.step for f in spikes(losses)] == [1600]


@pytest.mark.parametrize("seed", range(3))
def test_a_spike_does_not_hide_a_smaller_one_twenty_steps_later(seed: int) -> None:
    losses = synthetic(1700, seed=seed)
    losses[1600] += 3.0
    losses[1620] += 1.0

    assert [f.step for f in spikes(losses)] == [1600, 1620]


def test_a_spike_in_a_steep_early_decay_is_found() -> None:
    losses = [3.5 * math.exp(-t / 4) + 1e-3 for t in range(45)]
    losses[30] = 12.0

    assert [f.step for f in spikes(losses)] == [30]


@pytest.mark.parametrize("shift", [5.0, 20.0])
def test_a_spike_of_a_negative_loss_is_found(shift: float) -> None:
    losses = [loss - shift for loss in synthetic(1000)]
    losses[900] += 5.0

    assert [f.step for f in spikes(losses)] == [900]


@pytest.mark.parametrize("seed", range(3))
def test_heavy_tails_raise_the_limit(seed: int) -> None:
    r = random.Random(seed)
    losses = [loss + 0.03 * r.gauss(0, 1) / math.sqrt(r.gammavariate(1.5, 2.0) / 3.0) for loss in synthetic(2000)]

    assert len(spikes(losses)) <= 1  # a constant 8 MAD gives more than ten false alarms here


def test_a_new_level_is_accepted_and_spikes_above_it_are_found() -> None:
    losses = [loss + 1.0 * (t >= 1000) for t, loss in enumerate(synthetic(1300))]
    losses[1200] += 1.0

    assert [f.step for f in spikes(losses)] == [1000, 1200]


def test_a_restarted_learning_rate_may_raise_the_loss() -> None:
    losses = [loss + (0.8 if 1000 <= t < 1030 else 0.0) for t, loss in enumerate(synthetic(1100))]

    assert spikes(losses, lambda t: 10 * RATE if t >= 1000 else RATE) == []
    assert [f.step for f in spikes(losses)] == [1000]


def test_a_loss_above_the_first_ones_is_a_spike_even_after_a_warm_restart() -> None:
    losses = synthetic(1100)
    losses[1003] = 40.0

    assert [f.step for f in spikes(losses, lambda t: 10 * RATE if t >= 1000 else RATE)] == [1003]


def test_a_jump_of_a_nearly_zero_loss_is_not_a_spike() -> None:
    losses = [2.0 * math.exp(-t / 20) + 1e-5 for t in range(400)]
    losses[350:370] = [1e-3] * 20

    assert spikes(losses) == []
    assert explosions(losses) == []


def test_the_evidence_of_a_spike_has_the_numbers_behind_it() -> None:
    losses = synthetic(1700)
    losses[1600] += 1.0

    evidence = spikes(losses)[0].evidence

    assert evidence["loss"] == losses[1600]
    assert evidence["score"] == pytest.approx((losses[1600] - evidence["level"]) / evidence["spread"])
    assert evidence["score"] > evidence["limit"] > 6.0


def test_a_forecast_without_noise_is_not_certain() -> None:
    forecast = Forecast(LossThresholds())
    for _ in range(300):
        forecast.admit(2.0, forecast.score(2.0))

    assert forecast.score(2.1) < 6.0 < forecast.score(2.4)


def test_a_forecast_follows_a_steady_rise() -> None:
    forecast = Forecast(LossThresholds())
    for t in range(400):
        forecast.admit(1.0 + 0.01 * t, forecast.score(1.0 + 0.01 * t))

    assert forecast.level == pytest.approx(5.0, abs=0.02)


# --- zero ------------------------------------------------------------------------------------------------------------


def test_an_occasionally_satisfied_margin_loss_is_not_a_warning() -> None:
    r = random.Random(0)
    facts = [reading(t, loss, loss) for t in range(300) for loss in [max(0.0, 0.3 * r.random() - t / 2000)]]

    assert all(f.severity is Severity.INFO for f in findings_of(rule_named("zero_loss"), facts))


def test_a_loss_of_zero_from_the_start_is_reported() -> None:
    said = findings_of(rule_named("zero_loss"), [reading(t, 0.0, 0.0) for t in range(10)])

    assert [(f.step, f.severity) for f in said] == [(0, Severity.INFO)]


def test_a_late_reward_is_not_a_warning() -> None:
    facts = [*(reading(t, 0.0, 0.0) for t in range(250)), *(reading(t, -1.0, 3.0) for t in range(250, 300))]
    said = findings_of(rule_named("zero_loss"), [*facts, Flush(step=299)])

    assert {f.severity for f in said} == {Severity.INFO}


@pytest.mark.parametrize(("num_zero", "warned"), [(10, []), (20, [0])])
def test_a_finished_run_without_any_gradient_is_one_warning(num_zero: int, warned: list[int]) -> None:
    facts = [*(reading(t, 0.0, 0.0) for t in range(num_zero)), *(Flush(step=num_zero - 1) for _ in range(2))]
    said = findings_of(rule_named("zero_loss"), facts)

    assert [f.step for f in said if f.severity is Severity.WARNING] == warned


def test_a_run_without_any_gradient_is_a_warning_during_the_run() -> None:
    said = findings_of(rule_named("zero_loss"), [reading(t, 0.0, 0.0) for t in range(2000)])

    assert [f.step for f in said if f.severity is Severity.WARNING] == [0]


def test_a_solved_task_is_not_a_warning() -> None:
    facts = [*(reading(t, -1.0, 3.0) for t in range(5)), *(reading(t, 0.0, 0.0) for t in range(5, 1500))]
    said = findings_of(rule_named("zero_loss"), [*facts, Flush(step=1499)])

    assert not [f for f in said if f.step > 5 and f.severity is Severity.WARNING]


def test_a_loss_of_zero_with_a_gradient_is_healthy() -> None:
    facts = [reading(t, 1.0) for t in range(20)] + [reading(20, 0.0, 0.5)]

    assert findings_of(rule_named("zero_loss"), facts) == []


# --- explosion -------------------------------------------------------------------------------------------------------


def explosions(losses: Sequence[float], rates: Callable[[int], float] = lambda t: RATE) -> list[Finding]:
    facts: list[Fact] = [reading(t, loss, learning_rates=(rates(t),)) for t, loss in enumerate(losses)]
    return findings_of(rule_named("loss_explosion"), facts)


def test_ten_times_the_previous_epoch_is_an_explosion_with_the_documented_message() -> None:
    facts = [EpochEnd(step=9, epoch=0, train_loss=0.5), EpochEnd(step=19, epoch=1, train_loss=5.5)]

    said = findings_of(rule_named("loss_explosion"), facts)

    assert [(f.step, f.message) for f in said] == [(19, "Training loss exploded from 0.5 to 5.5")]


def test_nine_times_the_previous_epoch_is_not_an_explosion() -> None:
    facts = [EpochEnd(step=9, epoch=0, train_loss=0.5), EpochEnd(step=19, epoch=1, train_loss=4.5)]

    assert findings_of(rule_named("loss_explosion"), facts) == []


def test_single_high_losses_are_not_an_explosion() -> None:
    assert explosions([30.0 if t % 6 == 0 and t > 20 else 1.0 for t in range(200)]) == []


def test_an_explosion_after_the_first_step_of_a_pretrained_model_is_found() -> None:
    losses = [0.006, 6.7, 9.2, 6.8, 2.8, 3.3, 2.3, 3.7, 7.0, 3.2, 0.9, 2.5, 2.0, 1.7, 1.0, 1.3, 1.8, 1.7]

    assert [f.step for f in explosions(losses)] == [1]


@pytest.mark.parametrize("seed", range(20))
def test_a_lucky_first_batch_of_one_sample_is_not_an_explosion(seed: int) -> None:
    r = random.Random(seed)

    assert explosions([1e-3, *(r.gauss(0, 1) ** 2 for _ in range(100))]) == []


def test_a_loss_of_both_signs_that_begins_near_zero_does_not_explode_when_it_swings_back() -> None:
    """A critic's loss: -0.01, down to -1.6, up to 3."""
    assert explosions([-0.01 - 1.6 * math.sin(t / 12) for t in range(38)] + [0.1 * t for t in range(60)]) == []


def test_a_nonfinite_loss_inside_an_explosion_counts_as_exploded() -> None:
    losses = [1.0] * 40 + [20.0, 400.0, 9e3, math.inf, math.nan, math.nan, math.nan, math.nan, math.nan]

    assert [f.step for f in explosions(losses)] == [40]


def test_sudden_nonfinite_losses_are_not_an_explosion() -> None:
    assert explosions([1.0] * 40 + [math.nan] * 20 + [1.0] * 20) == []


def test_restarting_a_well_fitted_model_is_not_an_explosion() -> None:
    losses = [2.0 * math.exp(-t / 20) + 0.01 + 0.3 * (t >= 200) for t in range(260)]

    assert explosions(losses, lambda t: RATE if t < 200 else 50 * RATE) == []
    assert [f.step for f in explosions(losses) if f.kind == "loss_explosion"] == [200]


# --- divergence and plateau ------------------------------------------------------------------------------------------


def trend(
    name: str, loss: Callable[[int], float], num: int, rate: Callable[[int], float] = lambda t: RATE
) -> list[int]:
    r = random.Random(0)
    facts: list[Fact] = [reading(t, loss(t) + 0.02 * r.gauss(0, 1), learning_rates=(rate(t),)) for t in range(num)]
    return [f.step for f in findings_of(rule_named(name), facts)]


def test_a_slow_rise_that_loses_half_of_the_progress_is_divergence() -> None:
    steps = trend("divergence", lambda t: 3.0 - t / 200 if t < 400 else 1.0 + (t - 400) / 200, 800)

    assert len(steps) == 1
    assert 400 <= steps[0] <= 432


def test_a_lasting_jump_is_divergence_although_the_rise_has_ended() -> None:
    """Too noisy for eight in a row above ten times the level, and falling: neither an explosion nor a rise."""
    r = random.Random(0)
    hurt: Callable[[int], float] = lambda t: (6.0 if t % 2 else 1.0) * (1 - (t - 400) / 1000)  # noqa: E731
    facts = [reading(t, r.uniform(0.2, 0.4) if t < 400 else hurt(t)) for t in range(700)]

    (found,) = findings_of(rule_named("divergence"), [*(reading(t, 1.5) for t in range(-64, 0)), *facts])

    assert 384 <= found.step <= 416
    assert "far above its best for 64 steps" in found.message


def test_a_slow_rise_after_a_raised_rate_is_not_divergence() -> None:
    loss: Callable[[int], float] = lambda t: 3.0 - t / 200 if t < 400 else min(2.5, 1.0 + (t - 400) / 200)  # noqa: E731

    assert trend("divergence", loss, 800, lambda t: RATE if t < 400 else 3 * RATE) == []


@pytest.mark.parametrize("level", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_plateau_is_not_divergence(seed: int, level: float) -> None:
    r = random.Random(seed)
    facts = [reading(t, level + 0.3 * r.gauss(0, 1)) for t in range(5000)]

    assert findings_of(rule_named("divergence"), facts) == []


@pytest.mark.parametrize("name", ["loss_explosion", "divergence"])
def test_a_surrogate_loss_that_starts_at_zero_may_rise(name: str) -> None:
    """GRPO as in trl: a zero loss with a gradient, then a penalty that grows with what is learnt."""
    facts = [reading(t, 5.6e-9 if t == 0 else 2e-5 * t + 1e-7 * t**2) for t in range(300)]

    assert findings_of(rule_named(name), facts) == []
    assert findings_of(rule_named(name), [reading(fact.step, 2e-5 + (fact.loss or 0.0)) for fact in facts]) != []


def test_a_plateau_is_reported_where_it_began_and_only_as_an_info() -> None:
    facts: list[Fact] = [reading(t, max(1.0, 3.0 - t / 200)) for t in range(2000)]

    said = findings_of(rule_named("loss_plateau"), facts)

    assert [f.severity for f in said] == [Severity.INFO]
    assert 380 <= said[0].step <= 470


def test_thresholds_come_from_the_configuration() -> None:
    config = DetectConfig(loss=LossThresholds(plateau_steps=100), repeat_after=10_000)
    facts: list[Fact] = [reading(t, 1.0) for t in range(300)]

    assert len(findings_of(rule_named("loss_plateau", config), facts)) == 1


def test_a_step_without_a_loss_gives_no_finding_about_the_loss() -> None:
    facts: list[Reading] = [reading(t, None) for t in range(300)]

    for name in ("loss_spike", "loss_explosion", "divergence", "loss_plateau", "zero_loss"):
        assert findings_of(rule_named(name), facts) == []


def _exploding(*, comes_back: bool) -> list[Reading]:
    losses = [1.0] * 60 + [100.0] * 12 + [1.0 if comes_back else 100.0] * 40
    return [reading(step, loss=loss) for step, loss in enumerate(losses)]


def test_an_unrecovered_explosion_is_reported_again() -> None:
    said = findings_of(rule_named("loss_explosion"), _exploding(comes_back=False))
    assert [f.kind for f in said] == ["loss_explosion", "unrecovered_loss"]
    assert said[0].step == 60
    assert said[1].evidence["before"] == 1.0


@pytest.mark.parametrize(("after", "kinds"), [(5.0, ["loss_explosion", "unrecovered_loss"]), (0.4, ["loss_explosion"])])
def test_an_explosion_found_at_the_end_of_an_epoch_is_tracked_too(after: float, kinds: list[str]) -> None:
    facts: list[Fact] = [EpochEnd(step=9, epoch=0, train_loss=0.5), EpochEnd(step=19, epoch=1, train_loss=5.5)]
    facts += [reading(t, loss=after) for t in range(20, 60)]
    assert [f.kind for f in findings_of(rule_named("loss_explosion"), facts)] == kinds


def test_a_recovered_explosion_is_reported_once() -> None:
    said = findings_of(rule_named("loss_explosion"), _exploding(comes_back=True))
    assert [f.kind for f in said] == ["loss_explosion"]


def test_a_loss_that_climbs_from_the_first_steps_has_exploded() -> None:
    said = findings_of(rule_named("loss_explosion"), [reading(t, loss=min(500.0, 2.9 * 1.3**t)) for t in range(60)])
    assert [f.kind for f in said][:2] == ["loss_explosion", "unrecovered_loss"]
    assert said[0].step < 20


def test_a_bump_in_the_first_steps_is_not_an_explosion() -> None:
    losses = [2.9, 3.5, 9.0, 24.0, 31.0, 28.0, 12.0, 6.0, 4.0, *([2.5] * 60)]
    assert findings_of(rule_named("loss_explosion"), [reading(t, loss=loss) for t, loss in enumerate(losses)]) == []
