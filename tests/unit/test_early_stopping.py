"""Early stopping: patience on the validation loss."""

from __future__ import annotations

import json
import math

import pytest

from steadygrad.decide import EarlyStopping
from steadygrad.errors import ConfigError


def run(stopping: EarlyStopping, losses: list[float]) -> list[bool]:
    return [stopping.observe(10 * i, loss) for i, loss in enumerate(losses)]


def test_training_stops_after_patience_validations_without_improvement() -> None:
    assert run(EarlyStopping(patience=3), [1.0, 0.9, 0.95, 0.91, 0.9, 0.8]) == [False] * 4 + [True, False]


def test_the_best_loss_and_its_step_are_tracked() -> None:
    stopping = EarlyStopping()
    run(stopping, [1.0, 0.4, 0.7, 0.5])

    assert (stopping.best, stopping.best_step) == (0.4, 10)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_loss_is_neither_better_nor_worse(poison: float) -> None:
    stopping = EarlyStopping(patience=2)

    assert run(stopping, [poison, 1.0, poison, 1.1, poison, poison, poison]) == [False] * 7
    assert (stopping.best, stopping.best_step, stopping.num_bad) == (1.0, 10, 1)
    assert stopping.observe(99, 1.2) is True


def test_a_gain_below_min_delta_does_not_reset_patience_but_is_the_best() -> None:
    stopping = EarlyStopping(patience=2, min_delta=0.1)

    assert run(stopping, [1.0, 0.95, 0.96]) == [False, False, True]
    assert stopping.best == 0.95


def test_small_gains_add_up() -> None:
    assert not any(run(EarlyStopping(patience=3, min_delta=0.1), [1.0 - 0.06 * i for i in range(10)]))


def test_before_any_validation_there_is_no_best_loss_and_no_stop() -> None:
    stopping = EarlyStopping()

    assert (stopping.best, stopping.best_step, stopping.should_stop) == (None, None, False)


def test_a_restored_stopper_decides_the_same() -> None:
    losses = [1.0, 0.7, 0.69, 0.72, 0.71, 0.7, 0.9]
    first, second = (EarlyStopping(patience=4, min_delta=0.05) for _ in range(2))
    said = [first.observe(step, loss) for step, loss in enumerate(losses[:4])]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    said += [second.observe(step, loss) for step, loss in enumerate(losses[4:], 4)]

    whole = EarlyStopping(patience=4, min_delta=0.05)
    assert said == [whole.observe(step, loss) for step, loss in enumerate(losses)]
    assert second.state_dict() == whole.state_dict()


@pytest.mark.parametrize("wrong", [{"patience": 0}, {"patience": 1.5}, {"min_delta": -1.0}, {"min_delta": math.nan}])
def test_a_wrong_setting_raises_an_error_that_names_it(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"EarlyStopping.{next(iter(wrong))}"):
        EarlyStopping(**wrong)  # type: ignore[arg-type]
