"""The forecast of instability: its indicators, its model and its rule, on synthetic runs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from rule_traces import HEALTHY, poisoned, reading

import steadygrad.detect.instability as instability
from steadygrad.config import DetectConfig, ForecastConfig, GuardConfig, Policy
from steadygrad.decide import Judge
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.indicators import BOUND, NAMES, WARM_UP, WORDS, Indicators
from steadygrad.detect.instability import InstabilityForecast, Model, read_model
from steadygrad.errors import ConfigError
from steadygrad.facts import Action, Fact, Finding, Reading, Severity

ON = DetectConfig(forecast=ForecastConfig(enabled=True))
EARLY = DetectConfig(forecast=ForecastConfig(enabled=True, threshold=0.3))
"""Reports at a lower probability than the model's own threshold."""


def learns(num: int = 120, seed: int = 0) -> list[Reading]:
    """Return a noisy run that learns."""
    r = random.Random(seed)
    return [
        reading(t, 0.5 + 2.0 * math.exp(-t / 40) + 0.02 * r.gauss(0, 1), 0.5 * math.exp(0.1 * r.gauss(0, 1)))
        for t in range(num)
    ]


def breaks(num: int = 120, at: int = 60, seed: int = 0) -> list[Reading]:
    """Return the same run, but from `at` on loss and norm swing ever more, the loss creeps up and the rate rises."""
    r = random.Random(seed)
    made = learns(num, seed)
    for t in range(at, num):
        k = t - at
        loss = (made[t].loss or 0.0) + 0.02 * 1.09**k * (1.0 + 0.8 * (-1) ** k)
        norm = 0.5 * 1.08**k * math.exp((0.1 + 0.02 * k) * r.gauss(0, 1))
        made[t] = reading(t, loss, norm, learning_rates=(1e-3 * 1.03**k,))
    return made


def add_optional_facts(one: Reading) -> Reading:
    """Return the same step with clips, skips, a loss scale reported only at first, and occasional measurements."""
    t = one.step
    if t % 11 == 4:
        return poisoned(t, math.inf)
    one = dataclasses.replace(
        one, clip_coefficient=1.0 / (1 + t % 3), loss_scale=2.0 ** (16 - t // 8) if t < 50 else None
    )
    if t % 7:
        return one
    return dataclasses.replace(one, adam_rms={"a": 1.0 + t}, update_norm=0.1 + t, update_ratios={"a": 1e-3 * (1 + t)})


def collect(rule: InstabilityForecast, facts: Iterable[Fact]) -> list[Finding]:
    return [finding for fact in facts for finding in rule.observe(fact)]


def values_after(readings: Sequence[Reading]) -> dict[str, float]:
    indicators = Indicators()
    for one in readings:
        indicators.observe(one)
    return dict(zip(NAMES, indicators.values()))


def make_model(indicator: str, above: float, *, threshold: float = 0.5, patience: int = 1) -> Model:
    """Return a model of one tree with one split."""
    tree = ((NAMES.index(indicator), above, 1, 2, 0.0), (-1, 0.0, 0, 0, -4.0), (-1, 0.0, 0, 0, 4.0))
    return Model(
        horizon=32,
        threshold=threshold,
        patience=patience,
        base=0.0,
        trees=(tree,),
        scores=(-4.0, 4.0),
        probabilities=(0.0, 1.0),
    )


# --- indicators ------------------------------------------------------------------------------------------------------


def test_every_indicator_has_a_description() -> None:
    assert set(WORDS) == set(NAMES)


def test_an_unstable_run_moves_the_indicators_as_their_names_say() -> None:
    calm, wild = values_after(learns(100)), values_after(breaks(100))

    for name in ("norm_trend", "norm_volatility", "loss_above_best", "loss_volatility", "loss_peak", "rate_rise"):
        assert wild[name] > calm[name] + 0.05, name


def test_indicators_do_not_depend_on_the_unit_of_loss_or_gradient() -> None:
    """Only the floors, 1e-4 of a logarithm, and rounding depend on the unit."""
    run = breaks(100)
    other = [
        dataclasses.replace(
            one, loss=1e6 * one.loss, grad_norm=1e3 * one.grad_norm, finite_grad_norm=1e3 * one.grad_norm
        )
        for t, one in enumerate(run)
        if one.loss is not None
    ]

    assert values_after(other) == pytest.approx(values_after(run), abs=1e-6)


def test_oscillation_is_one_when_each_move_undoes_the_last() -> None:
    swinging = [reading(t, 1.0 + 0.1 * (-1) ** t, 0.5) for t in range(100)]

    assert values_after(swinging)["loss_oscillation"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_step_enters_no_average(poison: float) -> None:
    run = learns(80)
    with_poison = [*run[:40], poisoned(40, poison), *run[40:]]

    clean, dirty = values_after(run), values_after(with_poison)

    assert {n: v for n, v in dirty.items() if n != "skip_share"} == {
        n: v for n, v in clean.items() if n != "skip_share"
    }
    assert dirty["skip_share"] > 0


def test_a_nonfinite_step_that_was_applied_enters_no_average_either() -> None:
    """With SANITIZE a step is applied although its gradient was not finite."""
    run = learns(80)
    applied = reading(40, 1.0, math.inf, num_nonfinite=3, skipped=False)

    assert values_after([*run[:40], applied, *run[40:]]) == pytest.approx(values_after(run), abs=1e-3)


def test_indicators_stay_finite_and_bounded_on_any_input() -> None:
    r = random.Random(1)
    losses = [0.0, -3.0, 1e-30, 1e300, -1e300, 5e-324, 1.0]
    norms = [0.0, 1e-45, 1e38, 1e300, 1.0]
    indicators = Indicators()
    for t in range(300):
        rates = r.choice([(1e-3,), (0.0,), (1e30,), ()])
        indicators.observe(reading(t, r.choice([*losses, None]), r.choice(norms), learning_rates=rates))

        assert all(abs(value) <= BOUND for value in indicators.values())


def test_occasional_measurements_become_stale() -> None:
    run = learns(80)
    fresh = [*run[:60], reading(60, adam_rms={"a": 3.0, "b": math.nan})]

    assert values_after(fresh)["adam_rms"] == pytest.approx(math.log(3.0))
    assert values_after([*fresh, *learns(40)])["adam_rms"] == 0.0


def test_memory_does_not_grow_with_the_run() -> None:
    """Work per step is constant: the state of a long run is as large as that of a short one."""

    def count(plain: object) -> int:
        if isinstance(plain, dict):
            return sum(count(v) for v in plain.values())
        return sum(count(v) for v in plain) if isinstance(plain, list) else 1

    short, long = Indicators(), Indicators()
    for one in learns(20):
        short.observe(one)
    for one in learns(2000):
        long.observe(one)

    assert count(long.state_dict()) == count(short.state_dict())


@pytest.mark.parametrize("at", [1, 5, 20, 62, 90])
def test_restored_indicators_continue_bit_for_bit(at: int) -> None:
    """Compares values, not states: a field missing from the state would be missing on both sides."""
    run = [add_optional_facts(one) for one in breaks(120)]
    whole, first, second = Indicators(), Indicators(), Indicators()
    for one in run[:at]:
        whole.observe(one)
        first.observe(one)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    for one in run[at:]:
        whole.observe(one)
        second.observe(one)
        assert second.values() == whole.values()


# --- the model -------------------------------------------------------------------------------------------------------


def test_the_shipped_model_is_complete_plain_data() -> None:
    path = Path(instability.__file__).with_name("forecast_model.json")
    content = json.loads(path.read_text(encoding="utf-8"))

    assert tuple(content["indicators"]) == NAMES
    assert path.stat().st_size < 200_000
    for horizon in content["models"]:
        model = read_model(int(horizon))
        for tree in model.trees:
            assert all(0 < left < len(tree) and 0 < right < len(tree) for f, _, left, right, _ in tree if f >= 0)
        assert list(model.scores) == sorted(set(model.scores))
        assert list(model.probabilities) == sorted(model.probabilities)
        assert 0 < model.threshold < 1


def test_a_probability_is_interpolated_between_calibrated_points() -> None:
    model = make_model("loss_trend", 0.0)

    assert model.calibrate(0.0) == pytest.approx(0.5)
    assert model.calibrate(-100.0) == 0.0
    assert model.calibrate(100.0) == 1.0


def test_contributions_add_up_to_the_score() -> None:
    model, values = read_model(32), tuple(values_after(breaks(90)).values())

    roots = sum(tree[0][4] for tree in model.trees)
    assert model.base + roots + sum(model.explain(values).values()) == pytest.approx(model.score(values))


def test_a_horizon_without_a_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"horizon is 7, and there is no model for it\. There are 32"):
        standard_rules(DetectConfig(forecast=ForecastConfig(enabled=True, horizon=7)))


# --- the rule --------------------------------------------------------------------------------------------------------


def test_the_forecast_is_off_by_default() -> None:
    assert "instability_forecast" not in {rule.name for rule in standard_rules(DetectConfig())}
    assert "instability_forecast" in {rule.name for rule in standard_rules(ON)}
    off = DetectConfig(forecast=ForecastConfig(enabled=True), off=("instability_forecast",))
    assert "instability_forecast" not in {rule.name for rule in standard_rules(off)}


def test_the_forecast_can_be_enabled_in_a_file() -> None:
    config = GuardConfig.from_dict({"detect": {"forecast": {"enabled": True, "threshold": 0.4}}})

    assert config.detect.forecast == ForecastConfig(enabled=True, threshold=0.4)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.1, math.nan])
def test_the_threshold_is_a_probability(threshold: float) -> None:
    with pytest.raises(ConfigError, match=r"ForecastConfig\.threshold must lie between 0 and 1"):
        ForecastConfig(threshold=threshold)


def test_an_unstable_run_is_forecast_with_its_drivers() -> None:
    (finding, *_) = collect(InstabilityForecast(EARLY), breaks(140))

    assert finding.kind == "instability_forecast"
    assert finding.severity is Severity.WARNING
    assert finding.step > 60
    assert finding.evidence["horizon"] == 32
    assert finding.evidence["probability"] >= finding.evidence["threshold"]  # type: ignore[operator]
    assert set(finding.evidence["indicators"]) <= set(NAMES)  # type: ignore[arg-type]
    assert all(WORDS[str(name)] in finding.message for name in finding.evidence["indicators"])  # type: ignore[union-attr]
    assert finding.message.startswith("forecast:")


def test_the_indicator_of_the_deciding_split_is_named() -> None:
    rule = InstabilityForecast(ON, make_model("rate_rise", 0.2))
    (finding,) = collect(rule, breaks(120))

    assert finding.evidence["indicators"] == ["rate_rise"]
    assert finding.evidence["contributions"] == [4.0]


@pytest.mark.parametrize("run", HEALTHY)
@pytest.mark.parametrize("config", [ON, EARLY])
def test_healthy_runs_get_no_forecast(run: str, config: DetectConfig) -> None:
    assert collect(InstabilityForecast(config), HEALTHY[run]()) == []


def test_no_forecast_is_made_before_enough_steps() -> None:
    rule = InstabilityForecast(ON, make_model("loss_trend", -BOUND - 1))  # always positive

    assert [f.step for f in collect(rule, learns(40))] == [WARM_UP - 1]


def test_a_run_without_a_loss_gets_no_forecast() -> None:
    rule = InstabilityForecast(ON, make_model("loss_trend", -BOUND - 1))

    assert collect(rule, [reading(t, None) for t in range(60)]) == []


def test_an_alarm_is_reported_once_and_again_after_a_quiet_horizon() -> None:
    rule = InstabilityForecast(ON, make_model("rate_rise", 0.2))
    up, down = breaks(90, at=40)[40:], learns(200)
    numbered = [*learns(40), *up, *down, *up]
    findings = collect(rule, [dataclasses.replace(one, step=t) for t, one in enumerate(numbered)])

    assert len(findings) == 2
    assert findings[1].step > 290


def test_patience_needs_several_steps_in_a_row() -> None:
    eager, patient = (InstabilityForecast(ON, make_model("rate_rise", 0.2, patience=p)) for p in (1, 4))
    run = breaks(120)

    assert collect(patient, run)[0].step == collect(eager, run)[0].step + 3


@pytest.mark.parametrize("at", [10, 50, 75, 76, 77])
def test_a_restart_changes_nothing(at: int) -> None:
    run = breaks(140)
    whole, first, second = (InstabilityForecast(ON, make_model("norm_trend", 0.3, patience=2)) for _ in range(3))
    expected = collect(whole, run)

    findings = collect(first, run[:at])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    findings += collect(second, run[at:])

    assert findings == expected
    assert expected
    assert second.state_dict() == whole.state_dict()


def test_a_restart_during_patience_does_not_reset_it() -> None:
    run, model = breaks(120), make_model("rate_rise", 0.2, patience=4)
    (expected,) = collect(InstabilityForecast(ON, model), run)
    first, second = InstabilityForecast(ON, model), InstabilityForecast(ON, model)

    collect(first, run[: expected.step - 1])  # two of the four steps are seen
    second.load_state_dict(first.state_dict())

    assert collect(second, run[expected.step - 1 :]) == [expected]


# --- acting on it ----------------------------------------------------------------------------------------------------


def forecast_of_a_break() -> Finding:
    return collect(InstabilityForecast(EARLY), breaks(140))[0]


def test_a_forecast_is_only_reported_by_default() -> None:
    assert Judge().decide(forecast_of_a_break()).action is Action.NONE


def test_a_policy_may_act_on_a_forecast_and_the_verdict_names_it() -> None:
    judge = Judge(Policy(actions={"instability_forecast": Action.SCALE_LR}))

    verdict = judge.decide(forecast_of_a_break())

    assert verdict.action is Action.SCALE_LR
    assert verdict.factor == 0.5
    assert "instability_forecast" in verdict.reason


def test_the_detector_saves_the_forecasts_history() -> None:
    first, second = Detector(standard_rules(ON)), Detector(standard_rules(ON))
    for one in learns(50):
        first.observe(one)
    second.load_state_dict(first.state_dict())

    assert second.state_dict()["instability_forecast"] == first.state_dict()["instability_forecast"]
    assert second.state_dict()["instability_forecast"]["indicators"]["num_finite"] == 50
