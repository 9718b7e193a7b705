"""A learning rate that is too high from the first step, and starts that only look like it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from rule_traces import findings_of, poisoned, reading, rule_named

from steadygrad.config import DetectConfig
from steadygrad.config.detect import StartThresholds
from steadygrad.errors import ConfigError
from steadygrad.facts import Fact, Finding, InputScan, InputStats, ParameterScan


def find(losses: Sequence[float], norms: Sequence[float] = ()) -> list[Finding]:
    norms = norms or [1.0] * len(losses)
    return findings_of(rule_named("rate_too_high"), [reading(t, *pair) for t, pair in enumerate(zip(losses, norms))])


def weigh(
    growth: float,
    *,
    weights: Sequence[float] = (3.0, 4.0),
    loss: float = 3.3,
    norm: float = 2.5,
    after: float = 3.0,
    rate: float = 1e-3,
    num_steps: int = 28,
) -> list[Finding]:
    """Steps whose third one has this loss and norm, and whose loss is `after` from the fifth on; the weights grow."""
    before = {f"w{i}": size for i, size in enumerate(weights)}
    grown = {name: growth * size if size else 5.0 for name, size in before.items()}
    losses = [loss if t == 2 else 3.0 if t < 4 else after for t in range(num_steps)]
    facts: list[Fact] = [
        reading(t, value, norm if t == 2 else 1.0, learning_rates=(rate,)) for t, value in enumerate(losses)
    ]
    # A scan after a step is observed before that step's Reading.
    facts = [ParameterScan(step=-1, norms=before), *facts[:7], ParameterScan(step=7, norms=grown), *facts[7:]]
    return findings_of(rule_named("rate_too_high"), facts)


# --- the weights grow fast -------------------------------------------------------------------------------------------


def test_fast_growing_weights_with_a_growing_gradient_are_found_at_the_eighth_step() -> None:
    (said,) = weigh(3.6)

    assert said.evidence["num_steps"] == 8
    assert said.step == 2  # where the gradient grew, not where that was noticed
    assert said.evidence["weight_growth"] == pytest.approx(3.6)


# The weights, of norm 5, moved by 3.5 times that: 17.3. The norms of eight gradients add up to 9.5, and SGD applies
# each at most once in each of eight steps: it goes no further than 76 times its rate.
@pytest.mark.parametrize(("rate", "usual"), [(0.22, 0.25), (0.24, 0.1)])
def test_the_rate_is_lowered_less_if_only_adam_can_have_moved_the_weights_so_far(rate: float, usual: float) -> None:
    (said,) = weigh(3.6, rate=rate)
    assert said.evidence["lr_factor"] == pytest.approx(usual / math.sqrt(3.6**2 - 1))


def test_steps_after_the_scan_do_not_explain_the_growth() -> None:
    (said,) = weigh(1.6, after=2.0, rate=0.08)  # they moved by 6.2; eight steps of SGD reach 6.1
    assert said.evidence["num_steps"] == 28
    assert said.evidence["lr_factor"] == pytest.approx(0.25 / math.sqrt(1.6**2 - 1))


def follow(losses: Sequence[float]) -> list[Finding]:
    """Weights grow 1.7 times and the gradient triples, while the loss takes this course and then 2.9, 2.8 ... 2.3."""
    scans = [ParameterScan(step=step, norms={"a": size, "b": size}) for step, size in ((-1, 1.0), (7, 1.7))]
    losses = [*losses, *(2.9 - 0.6 * t / (27 - len(losses)) for t in range(28 - len(losses)))]
    steps: list[Fact] = [reading(t, loss, 3.0 if t == 5 else 1.0) for t, loss in enumerate(losses)]
    return findings_of(rule_named("rate_too_high"), [scans[0], *steps[:7], scans[1], *steps[7:]])


def test_a_growing_gradient_with_a_falling_loss_is_harmless() -> None:
    assert follow([3.49, 3.37, 3.32, 3.24, 3.24, 3.07, 3.11, 3.01, 3.29, 3.07]) == []  # a GPT that learns at this rate


def test_losing_progress_is_harm_even_below_the_first_loss() -> None:
    (said,) = follow([3.21, 2.57, 3.13, 2.98])  # a transformer at thirty times its learning rate
    assert said.evidence["num_steps"] == 28


def test_slower_growth_is_found_when_little_was_learnt_meanwhile() -> None:
    (said,) = weigh(1.6, after=2.0)
    assert said.evidence["num_steps"] == 28
    assert weigh(1.6, after=1.2) == []


@pytest.mark.parametrize(
    "healthy",
    [
        {"growth": 1.3},  # a CNN at three times its learning rate
        {"growth": 3.6, "loss": 3.2, "norm": 1.5},  # neither loss nor gradient grew much
        {"growth": 3.6, "loss": 3.2},  # the gradient grew, the loss barely
        {"growth": 3.6, "after": 0.8},  # it learns fast
        {"growth": 3.6, "weights": (3.0,)},  # one layer on frozen features
        {"growth": 3.6, "weights": (3.0, 0.0)},  # the other one started at zero
    ],
)
def test_harmless_growth_is_not_reported(healthy: dict[str, Any]) -> None:
    assert weigh(**healthy) == []


def test_a_risen_loss_is_enough_without_a_grown_gradient() -> None:
    assert [f.kind for f in weigh(3.6, loss=3.6, norm=1.0)] == ["rate_too_high"]


def test_unlimited_growth_does_not_say_how_much_too_high() -> None:
    (said,) = weigh(1e6)
    assert "lr_factor" not in said.evidence


# --- the loss climbs -------------------------------------------------------------------------------------------------


def test_a_loss_that_climbs_with_its_gradient_is_found() -> None:
    losses = [2.92, 2.04, 3.82, 5.45, 9.1, 10.7, 9.5, 11.4, 12.0, 16.5, 18.5, 16.6, 20.9]
    (said,) = find(losses, [0.9, 0.9, *[5.0] * 11])
    assert said.evidence["num_steps"] == 12  # the eighth above three times the first two
    assert said.step == 2
    assert said.evidence["first_loss"] == 2.92


def test_a_recovered_bump_is_not_reported() -> None:
    losses = [2.9, 3.5, 9.0, 24.0, 31.0, 28.0, 12.0, 6.0, 4.0, *(2.5 * 0.97**t for t in range(60))]
    assert find(losses, [1.0, *[9.0] * 9, *[1.0] * 59]) == []


def test_a_high_loss_without_a_grown_gradient_is_not_reported() -> None:
    assert find([2.9, 2.9, *[12.0] * 30]) == []


def test_batches_of_one_sample_are_not_a_climb() -> None:
    for seed in range(2000):
        r = random.Random(seed)
        pairs = [(3.0 * r.gauss(0, 1) ** 2 + 1e-9, 5.0 * abs(r.gauss(0, 1)) + 1e-9) for _ in range(28)]
        assert find(*zip(*pairs)) == [], seed


def test_growth_to_nonfinite_values_is_found_at_once() -> None:
    steps: list[Fact] = [reading(t, 2.9 * 20.0**t, 0.9 * 30.0**t) for t in range(5)]
    (said,) = findings_of(rule_named("rate_too_high"), [*steps, poisoned(5, math.nan), poisoned(6, math.nan)])
    assert said.evidence["num_steps"] == 5


def test_a_climb_under_test_is_reported_again_when_it_becomes_nonfinite() -> None:
    losses = [1.0, 1.0, *(10.0 * 3.0**t for t in range(12))]
    facts = [reading(t, loss, loss) for t, loss in enumerate(losses)]
    facts += [poisoned(t, math.nan) for t in range(len(losses), len(losses) + 3)]

    climbed, ruined = findings_of(rule_named("rate_too_high"), facts)

    assert "proof" not in climbed.evidence
    assert ruined.evidence["proof"] == "nonfinite"


def test_a_sudden_nan_does_not_blame_the_learning_rate() -> None:
    steps: list[Fact] = [reading(t, 2.9, 0.9) for t in range(5)]
    assert findings_of(rule_named("rate_too_high"), [*steps, poisoned(5, math.nan)]) == []


# --- a jump, then a flat loss ----------------------------------------------------------------------------------------


def flat(level: float, num: int, seed: int = 0) -> list[float]:
    r = random.Random(seed)
    return [level + 0.02 * r.gauss(0, 1) for _ in range(num)]


def test_a_loss_that_jumped_and_stays_flat_is_found() -> None:
    (said,) = find([1.72, 27.1, 6.6, 1.52, *flat(1.39, 30)])
    assert said.evidence["num_steps"] == 28


@pytest.mark.parametrize(
    "losses",
    [
        [1.72, 3.79, 2.09, 1.46, *flat(1.39, 30)],  # a small overshoot on a hard task
        [1.72, 27.1, 6.6, 1.52, *(1.5 - 0.03 * t for t in range(30))],  # it learns
        [1.72, 27.1, 6.6, 1.52, *flat(0.2, 30)],  # it has learnt
    ],
)
def test_a_harmless_overshoot_is_not_reported(losses: list[float]) -> None:
    assert find(losses) == []


# --- once ------------------------------------------------------------------------------------------------------------


def test_it_is_reported_once_and_only_at_the_start() -> None:
    assert len(find([2.9, 2.9, *[30.0] * 26], [1.0, 1.0, *[9.0] * 26])) == 1
    assert find([2.9] * 28 + [300.0] * 30, [1.0] * 28 + [90.0] * 30) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ConfigError, match=r"StartThresholds\.weight_growth must be above 1, got 0\.9"):
        DetectConfig(start=StartThresholds(weight_growth=0.9))


def test_a_history_of_an_earlier_version_is_used_as_far_as_possible() -> None:
    facts: list[Fact] = [reading(t, 3.3 if t == 2 else 3.0, 2.5 if t == 2 else 1.0) for t in range(7)]
    before, after = rule_named("rate_too_high"), rule_named("rate_too_high")
    assert not findings_of(before, [ParameterScan(step=-1, norms={"a": 3.0, "b": 4.0}), *facts])
    after.load_state_dict(
        {name: value for name, value in before.state_dict().items() if name not in ("pushes", "rates")}
    )
    (said,) = findings_of(after, [ParameterScan(step=7, norms={"a": 10.8, "b": 14.4}), reading(7, 3.0)])
    assert said.evidence["weight_growth"] == pytest.approx(3.6)


@pytest.mark.parametrize("num_nonfinite", [0, 8], ids=["the arithmetic", "the batch"])
def test_a_nonfinite_batch_does_not_prove_that_the_rate_is_too_high(num_nonfinite: int) -> None:
    """Loss and gradients grow, then a NaN follows: from the rate, or from the data."""
    rule = rule_named("rate_too_high")
    grown = [reading(step, loss=10.0**step, norm=100.0**step) for step in range(4)]
    assert findings_of(rule, grown) == []
    scan = InputScan(step=4, tensors={"x": InputStats(numel=8, max_abs=1.0, num_nonfinite=num_nonfinite)})
    found = findings_of(rule, [scan, poisoned(4, math.nan)])
    assert [finding.kind for finding in found] == ([] if num_nonfinite else ["rate_too_high"])
