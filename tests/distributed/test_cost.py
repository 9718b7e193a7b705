"""What a guarded step sends to other ranks: collectives and bytes, counted at 8, 1024 and 16384 ranks.

torch's fake process group answers for missing ranks, so that one process can measure large jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad import Guard, GuardConfig
from steadygrad.config import MeasureConfig, SnapshotConfig

NUM_PARAMETERS = 6


class Collectives(TorchDispatchMode):
    """Bytes of each collective, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            tensors = [value for value in _flatten(args[0]) if isinstance(value, Tensor)]
            self.said.append((func._opname, sum(t.numel() * t.element_size() for t in tensors)))
        return func(*args, **(kwargs or {}))


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


@contextmanager
def pretend_ranks(num: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=num, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))


def make_ddp() -> DistributedDataParallel:
    """Wrap a model in DDP with a hook for its buckets, since DDP's reducer would wait forever for a fake group."""
    ddp = DistributedDataParallel(make_model())

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and wants them as objects
        dist.all_reduce(bucket.buffer())
        answer: torch.futures.Future[Tensor] = torch.futures.Future()
        answer.set_result(bucket.buffer())
        return answer

    ddp.register_comm_hook(None, reduce)
    return ddp


def count_step(model: nn.Module, *, guarded: bool) -> list[tuple[str, int]]:
    """Return the collectives of the third step, after all one-time ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = GuardConfig(
        measure=MeasureConfig(scan_every=0, parameters_every=0), snapshots=SnapshotConfig(enabled=False)
    )
    guard = Guard(model, optimizer, config=config) if guarded else None
    counted = Collectives()
    for step in range(3):
        with counted if step == 2 else torch.enable_grad():
            if guard is not None:
                guard.step(lambda x: model(x).square().mean(), torch.randn(4, 6))
            else:
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return counted.said


def take_away(said: list[tuple[str, int]], others: list[tuple[str, int]]) -> list[tuple[str, int]]:
    left = list(said)
    for one in others:
        left.remove(one)
    return left


@pytest.mark.parametrize(("num_ranks", "num_bytes"), [(8, 32), (1024, 200), (16384, 2760)])
def test_under_ddp_a_guarded_step_adds_one_small_all_reduce(num_ranks: int, num_bytes: int) -> None:
    assert num_bytes == 8 * (3 + math.ceil(num_ranks / 48))
    with pretend_ranks(num_ranks):
        said = count_step(make_ddp(), guarded=True)
        stock = count_step(make_ddp(), guarded=False)
    assert take_away(said, stock) == [("allreduce_", num_bytes)]


@pytest.mark.parametrize(("num_ranks", "num_bytes"), [(8, 272), (1024, 440), (16384, 3000)])
def test_in_shards_a_guarded_step_adds_the_table_and_its_maxima(num_ranks: int, num_bytes: int) -> None:
    table, maxima = 8 * (3 + math.ceil(num_ranks / 48) + 4 * NUM_PARAMETERS), 8 * NUM_PARAMETERS
    assert num_bytes == table + maxima
    with pretend_ranks(num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,))
        said = count_step(fully_shard(make_model(), mesh=mesh), guarded=True)
        stock = count_step(fully_shard(make_model(), mesh=mesh), guarded=False)
    assert sorted(take_away(said, stock)) == sorted([("allreduce_", table), ("allreduce_", maxima)])
