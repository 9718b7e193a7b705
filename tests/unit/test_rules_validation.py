"""Rules about validation, epochs and habits."""

from __future__ import annotations

import math
import random

import pytest
from rule_traces import findings_of, poisoned, reading, rule_named

from steadygrad.config import DetectConfig, ValidationThresholds
from steadygrad.facts import Action, ActionTaken, EpochEnd, Fact, Finding, Severity, Validation


def validations(losses: list[float], *, falling: bool = True) -> list[Finding]:
    facts: list[Fact] = []
    for i, loss in enumerate(losses):
        train = 1.0 - 0.02 * i if falling else 1.0 + 0.02 * i
        facts += [reading(10 * i + t, train) for t in range(10)]
        facts.append(Validation(step=10 * i + 9, epoch=i, loss=loss))
    return findings_of(rule_named("overfitting"), facts)


FALL_AND_RISE = [1.0 + 0.005 * (i - 8) ** 2 for i in range(16)]


def test_overfitting_is_dated_to_the_first_rise_of_the_validation_loss() -> None:
    said = validations(FALL_AND_RISE)

    assert [f.step for f in said] == [99]  # the tenth validation, one after the best one
    assert said[0].severity is Severity.WARNING


def test_one_noisy_validation_is_not_overfitting() -> None:
    losses = [1.0 / (1 + i) for i in range(12)]
    losses[6] = 2.0

    assert validations(losses) == []


@pytest.mark.parametrize("seed", range(100))
def test_a_noisy_plateau_of_the_validation_loss_is_not_overfitting(seed: int) -> None:
    r = random.Random(seed)

    assert validations([1.0 + math.exp(-i) + 0.05 * r.gauss(0, 1) for i in range(20)]) == []


def test_a_validation_loss_that_rises_with_the_training_loss_is_not_overfitting() -> None:
    assert validations(FALL_AND_RISE, falling=False) == []


def test_a_nonfinite_validation_does_not_affect_overfitting() -> None:
    facts: list[Fact] = []
    for i, loss in enumerate(FALL_AND_RISE):
        facts += [Validation(step=i, epoch=i, loss=loss, train_loss=1.0 - 0.02 * i)]
    poison: list[Fact] = [Validation(step=5, epoch=5, loss=math.nan, train_loss=math.nan)]

    assert findings_of(rule_named("overfitting"), facts[:6] + poison + facts[6:]) == findings_of(
        rule_named("overfitting"), facts
    )


def test_patience_comes_from_the_configuration() -> None:
    facts: list[Fact] = [
        Validation(step=i, epoch=i, loss=loss, train_loss=1.0 - 0.02 * i) for i, loss in enumerate(FALL_AND_RISE)
    ]
    config = DetectConfig(validation=ValidationThresholds(overfitting_patience=20))

    assert findings_of(rule_named("overfitting", config), facts) == []


def test_an_epoch_without_a_step_is_not_nonfinite() -> None:
    assert findings_of(rule_named("nonfinite_epoch"), [EpochEnd(step=0, epoch=0, train_loss=None)]) == []


# --- habits ----------------------------------------------------------------------------------------------------------


def test_clipping_at_every_step_is_an_info() -> None:
    facts: list[Fact] = [reading(t, clip_coefficient=0.1) for t in range(500)]

    assert [f.severity for f in findings_of(rule_named("frequent_clipping"), facts)] == [Severity.INFO]


def test_an_occasional_skip_is_not_a_habit() -> None:
    facts: list[Fact] = [poisoned(t, math.nan) if t % 20 == 0 else reading(t) for t in range(1000)]

    assert findings_of(rule_named("many_skips"), facts) == []


def test_steps_refused_after_a_rollback_are_not_a_habit() -> None:
    facts: list[Fact] = [reading(t, skipped=t > 10) for t in range(100)]

    assert findings_of(rule_named("many_skips"), facts) == []


def test_clips_are_not_corrective_actions() -> None:
    facts: list[Fact] = [ActionTaken(step=t, action=Action.CLIP) for t in range(100)]

    assert findings_of(rule_named("frequent_actions"), facts) == []


def test_actions_far_apart_are_not_frequent() -> None:
    facts: list[Fact] = [ActionTaken(step=1000 * t, action=Action.SKIP) for t in range(20)]

    assert findings_of(rule_named("frequent_actions"), facts) == []


@pytest.mark.parametrize(("loss", "spelled"), [(math.nan, "NaN"), (math.inf, "Inf"), (-math.inf, "-Inf")])
def test_nan_and_inf_have_one_spelling_in_every_message(loss: float, spelled: str) -> None:
    facts: dict[str, Fact] = {
        "nonfinite_loss": poisoned(3, loss),
        "nonfinite_validation": Validation(step=3, epoch=0, loss=loss),
        "nonfinite_epoch": EpochEnd(step=3, epoch=0, train_loss=loss),
    }
    for rule, fact in facts.items():
        (finding,) = findings_of(rule_named(rule), [fact])
        assert finding.message.endswith(f" is {spelled}")
