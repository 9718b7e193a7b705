"""`run_ranks` itself: results are in rank order, a failure is reported in full, a hang ends."""

from __future__ import annotations

import gc
import os
import sys
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist

from preloading import RANKS, preload
from steadygrad.testing.ranks import PRELOADED as IMPORTED
from steadygrad.testing.ranks import RanksFailed, run_ranks


def add_up(start: int) -> tuple[int, float]:
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the disk of rank 1 is full")
    dist.barrier()


def wait_for_each_other() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.recv(torch.zeros(()), src=0)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_every_rank_runs_and_results_are_in_order() -> None:
    assert run_ranks(add_up, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_failing_rank_is_reported_in_its_own_words_and_ends_the_others() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 failed.*the disk of rank 1 is full"):
        run_ranks(fail_on_one, 2)


def test_a_dying_rank_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match="rank 1 died with exit code 7"):
        run_ranks(die_on_one, 2)


def test_hanging_ranks_are_ended_and_reported_with_their_current_line() -> None:
    run_ranks(add_up, 2, 10)  # the server that forks them may first have to import torch
    message = r"(?s)2 of 2 ranks had not ended after 5 seconds.*rank 1 stands at.*wait_for_each_other"
    with pytest.raises(RanksFailed, match=message):
        run_ranks(wait_for_each_other, 2, time_limit_seconds=5)


def list_missing(names: list[str]) -> list[str]:
    return [name for name in names if name not in sys.modules]


def count_frozen() -> int:
    return gc.get_freeze_count()


def test_ranks_have_their_imports_preloaded_and_in_these_tests_frozen() -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # the next rank starts one, as in a user's tests
    assert run_ranks(list_missing, 2, IMPORTED) == [[], []]
    preload(*RANKS)
    assert min(run_ranks(count_frozen, 2)) > 0
