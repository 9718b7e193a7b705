"""The rules of the paired test, on numbers alone: what counts as damage, and what only looks like it."""

from __future__ import annotations

import math

import pytest

from steadygrad.config import ProveConfig
from steadygrad.prove.rule import (
    is_damaged,
    is_held_back,
    is_hit,
    is_rate_too_high,
    is_spike_of_weights,
    is_worse,
    is_worse_than_start,
)

CONFIG = ProveConfig()
LEARNT = [0.3, 0.2, 0.3, 0.4, 0.3, 0.2, 0.3, 0.3]
FIRST = [3.0] * 8


def times(factor: float, losses: list[float] = LEARNT) -> list[float]:
    return [factor * loss for loss in losses]


@pytest.mark.parametrize(
    ("now", "then", "answer"),
    [
        (times(2.5), LEARNT, True),
        (times(1.9), LEARNT, False),
        ([0.1, *times(9)[1:]], LEARNT, True),  # one of eight is right by chance
        ([0.1, 0.1, *times(9)[2:]], LEARNT, False),
        ([0.0, 2.0], [0.1, 0.1], False),  # with two batches, both must agree
        ([math.nan] * 8, LEARNT, True),
        (times(9), [math.nan] * 8, False),
        ([-1.0] * 8, [-2.0] * 8, True),  # negative: a ratio says nothing
        ([-2.0] * 8, [-1.0] * 8, False),
        ([], [], False),
    ],
)
def test_worse_is_twice_as_bad_on_every_batch_but_one_in_eight(
    now: list[float], then: list[float], answer: bool
) -> None:
    assert is_worse(now, then, ratio=2.0) is answer


@pytest.mark.parametrize(
    ("now", "then", "first", "answer"),
    [
        (times(5), LEARNT, FIRST, True),
        (times(2.2), LEARNT, FIRST, False),  # twice as bad, by an eighth of the progress
        (
            times(1e3, [1e-9] * 8),
            [1e-9] * 8,
            FIRST,
            False,
        ),  # losses on memorised data jump
        (times(5), LEARNT, [math.nan], True),  # the initial loss is unknown: the ratio must be enough
        ([4.0] * 8, [3.5] * 8, FIRST, False),  # new data: the earlier weights are worse than the initial ones
        ([7.5] * 8, [3.5] * 8, FIRST, True),  # ... and the present ones are twice as bad as the initial ones
    ],
)
def test_damage_loses_a_real_share_of_the_progress(
    now: list[float], then: list[float], first: list[float], answer: bool
) -> None:
    assert is_damaged(now, then, first, config=CONFIG) is answer


def test_damage_by_one_batch_is_larger_there_and_notable_relative_to_the_progress() -> None:
    assert is_hit([1.0], [0.2], 3.0, config=CONFIG)
    assert not is_hit([0.7], [0.2], 3.0, config=CONFIG)
    assert not is_hit([1e-5], [1e-14], 3.0, config=CONFIG)


def test_a_spike_to_earlier_weights_too_or_none_to_the_present_ones_is_not_the_weights_doing() -> None:
    assert is_spike_of_weights([1.0], [0.2], limit=0.5)
    assert not is_spike_of_weights([1.0], [0.2], limit=0.1)
    assert not is_spike_of_weights([1.0], [0.2], limit=1.5)
    assert is_spike_of_weights([math.nan], [0.2], limit=1.5)


def test_worse_than_the_start_needs_an_excess() -> None:
    assert is_worse_than_start([3.7] * 8, FIRST, config=CONFIG)
    assert not is_worse_than_start([3.5] * 8, FIRST, config=CONFIG)


def test_a_possibly_negative_loss_proves_nothing_against_the_start_until_it_is_infinite() -> None:
    first = [-0.014] * 8  # an energy: its first value is arbitrary
    assert not is_worse_than_start([0.3] * 8, first, config=CONFIG)
    assert not is_worse_than_start([-0.01] * 8, first, config=CONFIG)
    assert is_worse_than_start([math.inf] * 8, first, config=CONFIG)


@pytest.mark.parametrize(
    ("now", "fresh", "began_at", "answer"),
    [
        ([2.4] * 16, [0.9] * 16, 4.0, True),
        ([0.01, *[2.4] * 15], [0.9] * 16, 4.0, True),
        ([1.0] * 16, [0.8] * 16, 4.0, False),  # ahead, but not worth a rollback
        ([0.01] * 16, [0.001] * 16, 11.0, False),  # ten times ahead when both have learnt nearly everything
        ([0.8] * 16, [1.0] * 16, 4.0, False),
        ([-1.0] * 16, [-5.0] * 16, 4.0, False),
        ([2.4] * 16, [math.nan] * 16, 4.0, False),
    ],
)
def test_a_second_attempt_must_be_far_ahead(
    now: list[float], fresh: list[float], began_at: float, answer: bool
) -> None:
    assert is_held_back(now, fresh, began_at, config=CONFIG) is answer


@pytest.mark.parametrize(
    ("now", "lower", "first", "answer"),
    [
        ([2.9] * 16, [1.5] * 16, 3.0, True),
        ([2.9] * 16, [2.8] * 16, 3.0, False),
        ([0.8] * 16, [0.4] * 16, 3.0, False),  # it recovered by itself
        ([math.inf] * 16, [1.5] * 16, 3.0, True),
        ([2.9] * 16, [math.nan] * 16, 3.0, False),
        ([2.9] * 8 + [1.0] * 8, [1.5] * 16, 3.0, False),
    ],
)
def test_a_lower_rate_must_beat_a_run_that_learns_nothing(
    now: list[float], lower: list[float], first: float, answer: bool
) -> None:
    assert is_rate_too_high(now, lower, first, config=CONFIG) is answer


def test_wrecked_weights_may_be_right_about_a_quarter_of_small_batches() -> None:
    """A network that has collapsed to one class: no loss where a batch holds no other, ten times a guess elsewhere."""
    now, then = [19.2, 24.4, 0.0, 8.0, 0.07, 26.4, 6.6, 16.1], [0.24, 0.14, 0.08, 0.28, 0.05, 0.25, 0.15, 0.19]
    guess = [1.39] * 8
    assert is_damaged(now, then, guess, config=CONFIG)
    assert not is_damaged([0.1, *now[1:]], then, guess, config=CONFIG)  # three dissent
    assert not is_damaged([0.1 * loss for loss in now], then, guess, config=CONFIG)  # no worse than untrained
    assert not is_damaged(now, [8 * loss for loss in then], guess, config=CONFIG)  # the earlier ones know no better
