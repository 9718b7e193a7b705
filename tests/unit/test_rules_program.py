"""Rules about a program's calls, model, ranks and number formats: how they separate habits from errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
from program_traces import LOAD
from rule_traces import findings_of, reading, rule_named

from steadygrad.detect.rank_agreement import describe_wait
from steadygrad.facts import CallScan, Fact, Load, ModelScan, PrecisionScan, RankScan, RankWait


def kinds(rule: str, facts: list[Fact]) -> list[str]:
    return [finding.kind for finding in findings_of(rule_named(rule), facts)]


@pytest.mark.parametrize(
    "seen",
    [
        {"num_backwards": 4, "divisors": ((4.0,),) * 4},  # divided once
        {"num_backwards": 4, "divisors": ((4.0, 4.0), (4.0,), (4.0,), (4.0,))},  # a term of one microbatch
        {"num_backwards": 1, "divisors": ((2.0,),), "num_averaging": 2, "end": "MseLoss"},  # half a squared error
        {"num_backwards": 2, "divisors": ((2.0,),) * 2, "num_averaging": 2, "end": "NllLoss"},  # by microbatches
        {"num_backwards": 1, "divisors": ((2.0,),), "num_averaging": 0, "end": "NllLoss"},  # the program averages
        {"num_backwards": 1, "divisors": ((),), "num_averaging": 2, "end": "NllLoss"},
    ],
)
def test_a_loss_divided_once_is_not_reported(seen: dict[str, Any]) -> None:
    assert kinds("divided_twice", [CallScan(step=t, **seen) for t in range(4)]) == []


def test_a_cross_entropy_divided_by_the_ranks_is_reported() -> None:
    seen: dict[str, Any] = {"num_backwards": 1, "divisors": ((4.0,),), "num_averaging": 4, "end": "NllLoss"}

    assert kinds("divided_twice", [CallScan(step=t, **seen) for t in range(4)]) == ["divided_twice"]


@pytest.mark.parametrize(
    "seen",
    [
        {"norm_after_backward": 65536.0, "norm_at_step": 1.0},  # unscaled in between
        {"norm_after_backward": 65536.0, "norm_at_step": 65536.0, "scale_is_known": True},  # the step divides
        {"norm_after_backward": None, "norm_at_step": 65536.0},
    ],
)
def test_unscaled_gradients_are_not_reported(seen: dict[str, Any]) -> None:
    assert kinds("scaled_gradient", [CallScan(step=t, scale=65536.0, **seen) for t in range(4)]) == []


def test_gradients_clipped_before_unscaling_are_reported_though_the_step_divides_by_the_scale() -> None:
    facts: list[Fact] = [
        CallScan(
            step=t, scale=1024.0, norm_after_backward=900.0, norm_at_clip=900.0, norm_at_step=1.0, scale_is_known=True
        )
        for t in range(4)
    ]

    assert kinds("scaled_gradient", facts) == ["scaled_gradient"]


def test_zero_gradients_from_backward_are_not_reported_as_cleared() -> None:
    facts: list[Fact] = [CallScan(step=t, norm_after_backward=0.0, norm_at_step=0.0) for t in range(4)]

    assert kinds("cleared_gradient", facts) == []


def test_a_single_step_is_not_enough_evidence() -> None:
    facts: list[Fact] = [
        CallScan(step=0, norm_after_backward=1.0, norm_at_step=0.0),
        CallScan(step=1, norm_at_step=1.0),
    ]

    assert kinds("cleared_gradient", facts) == []


def rates(*values: float) -> list[Fact]:
    return [reading(t, learning_rates=(value,)) for t, value in enumerate(values)]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda t: min(1.0, t / 100),  # warm-up from 0
        lambda t: 0.5 * (1 + math.cos(math.pi * t / 2000)),  # cosine to 0
        lambda t: (1 - t / 2000) ** 4,  # a polynomial with a flat end
        lambda t: 0.5 * (1 + math.cos(math.pi * (t % 100) / 100)),  # warm restarts
        lambda t: 10 ** (-7 + 8 * t / 2000),  # a range test
        lambda t: 10 ** (-5 * t / 2000),
        lambda _: -1.0,  # ascent
    ],
)
def test_common_schedules_are_not_reported_as_vanishing(schedule: Any) -> None:
    assert kinds("vanished_rate", rates(*(1e-3 * schedule(t) for t in range(2000)))) == []


def test_an_epoch_schedule_stepped_per_batch_is_reported() -> None:
    found = findings_of(rule_named("vanished_rate"), rates(*(1e-3 * 0.1 ** (t // 30) for t in range(400))))

    assert [(finding.kind, finding.step) for finding in found] == [("vanished_rate", 180)]


@pytest.mark.parametrize(
    "load",
    [
        Load(where="", module="", num_given=10, num_matched=8, example="head.weight", wanted="fc.weight"),
        Load(where="", module="", num_given=10, num_matched=10, kept=1.0),
        Load(where="", module="", num_given=10, num_matched=10, kept=0.6),  # trained or pruned since
        Load(where="", module="", num_given=0, num_matched=0, wanted="fc.weight"),
        Load(where="", module="", num_given=100, num_matched=5, example="decoder.bias", wanted="fc.weight"),
        Load(where="", module="", num_given=100, num_matched=98, num_missing=40, num_renamed=2),
    ],
)
def test_a_matching_load_is_not_reported(load: Load) -> None:
    assert kinds("lost_weights", [ModelScan(step=-1, loads=(load,))]) == []


@pytest.mark.parametrize(
    "load",
    [
        LOAD,
        Load(where="", module="", num_given=10, num_matched=10, kept=-0.02),
        Load(where="", module="", num_given=50, num_matched=1, num_missing=40, num_renamed=39),
        Load(where="", module="", num_given=6, num_matched=2, num_missing=4, num_renamed=4),
    ],
)
def test_a_lost_load_is_reported(load: Load) -> None:
    assert kinds("lost_weights", [ModelScan(step=-1, loads=(load,))]) == ["lost_weights"]


def test_briefly_unfrozen_parameters_are_not_reported() -> None:
    facts: list[Fact] = [ModelScan(step=8, unfrozen=("a",)), ModelScan(step=100), ModelScan(step=200, unfrozen=("a",))]

    assert kinds("out_of_reach", facts) == []


def test_ranks_without_averaged_gradients_may_differ() -> None:
    assert kinds("ranks_differ", [RankScan(step=8, rank=0, other=1, differing=("a",))]) == []


def test_ranks_that_share_the_only_batch_are_not_reported() -> None:
    whole = [
        RankScan(step=t, rank=0, other=1, same_batch=True, batch="all", gradients_are_averaged=True) for t in range(9)
    ]

    assert kinds("same_batch", [*whole]) == []


def test_a_zero_input_on_every_rank_is_not_reported() -> None:
    assert kinds("zero_input", [RankScan(step=t, rank=0, other=1, batch=f"b{t}") for t in range(9)]) == []


@pytest.mark.parametrize(
    "seen",
    [
        {"stuck_share": 0.5, "is_full_rate": True},
        {"stuck_share": 1.0, "is_full_rate": False},  # a warm-up, or the end of a decay
        {"stuck_share": 1.0, "is_full_rate": True, "is_own_optimizer": False, "num_steps": 8},  # may sum the rest
        {"stuck_share": None, "is_full_rate": True},
    ],
)
def test_weights_that_move_normally_are_not_reported(seen: dict[str, Any]) -> None:
    assert kinds("lost_updates", [PrecisionScan(step=8, dtype="bfloat16", **seen)]) == []


def test_zeros_under_a_loss_scale_are_not_blamed_on_float16() -> None:
    facts: list[Fact] = [PrecisionScan(step=t, is_float16=True, has_scale=True, zero_share=0.9) for t in range(4)]

    assert kinds("flushed_gradient", facts) == []


def test_a_wait_names_every_rank_and_its_location() -> None:
    wait = RankWait(
        step=30, rank=0, num_ranks=3, seconds=10, place="in all_reduce at a.py:4", others={1: "in backward at a.py:9"}
    )

    message = describe_wait(wait).message

    assert "rank 0 has waited for 10 s in all_reduce at a.py:4" in message
    assert "rank 1 is in backward at a.py:9" in message
    assert "rank 2 is not waiting" in message
