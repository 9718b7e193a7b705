"""Errors between ranks are named by a rank that sees them; healthy trainings on several ranks are left alone."""

from __future__ import annotations

import pytest
import rank_cases

from steadygrad.testing.ranks import run_ranks

KINDS = {
    "clipped_on_one_rank": "ranks_differ",
    "same_data_on_all_ranks": "same_batch",
    "never_broadcast": "ranks_differ",
    "zeros_on_one_rank": "zero_input",
    "divided_by_ranks": "divided_twice",
    "module_called": "ranks_differ",
    "hooks_lost": "ranks_differ",
    "broadcast_lost": "ranks_differ",
    "reduction_lost": "ranks_differ",
}


@pytest.mark.parametrize("name", KINDS)
def test_an_error_between_ranks_is_named(name: str) -> None:
    found = run_ranks(rank_cases.train, 2, name, True)

    assert {kind for kinds in found for kind in kinds} == {KINDS[name]}


@pytest.mark.parametrize("name", KINDS)
def test_its_healthy_twin_is_left_alone(name: str) -> None:
    assert run_ranks(rank_cases.train, 2, name, False) == [[], []]


def test_ranks_that_train_apart_may_differ() -> None:
    assert run_ranks(rank_cases.train_apart, 2) == [[], []]


def test_a_rank_that_waits_alone_is_named_with_its_line() -> None:
    (step, rank, place), _ = run_ranks(rank_cases.wait_alone, 2)

    assert (step, rank) == (7, 0)
    assert place.startswith("in all_reduce at ")
    assert "rank_cases.py:" in place
