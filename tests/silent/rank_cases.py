"""Trainings on two ranks with an error that never crashes, and healthy ones that look like them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad import Guard
from steadygrad.measure.rank_board import RankBoard
from steadygrad.measure.rank_waits import RankWaits

NUM_STEPS = 12
TRAININGS: dict[str, Callable[[bool], Guard]] = {}


def training(train: Callable[[bool], Guard]) -> Callable[[bool], Guard]:
    TRAININGS[train.__name__] = train
    return train


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def make_batches(rank: int | None = None) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator))
        for _ in range(NUM_STEPS)
    ]


def compute_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@training
def clipped_on_one_rank(bug: bool) -> Guard:
    """deepspeedai/DeepSpeed#1801: only the first rank clips."""
    model = DistributedDataParallel(make_model())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in make_batches():
        model.zero_grad()
        compute_loss(model, batch).backward()
        if not bug or dist.get_rank() == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        guard.step()
    return guard


@training
def same_data_on_all_ranks(bug: bool) -> Guard:
    """No DistributedSampler: every rank reads the same batches."""
    model = DistributedDataParallel(make_model())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in make_batches(0 if bug else None):
        guard.step(compute_loss, model, batch)
    return guard


@training
def never_broadcast(bug: bool) -> Guard:
    """Gradients are averaged by hand, and each rank has drawn its own first weights."""
    model = make_model(dist.get_rank() if bug else 0)
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in make_batches():
        model.zero_grad()
        compute_loss(model, batch).backward()
        average(model)
        guard.step()
    return guard


@training
def zeros_on_one_rank(bug: bool) -> Guard:
    """Batches arrive as zeros on the second rank."""
    model = DistributedDataParallel(make_model())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for x, y in make_batches():
        guard.step(compute_loss, model, (x * 0 if bug and dist.get_rank() else x, y))
    return guard


@training
def divided_by_ranks(bug: bool) -> Guard:
    """The loss is divided by the number of ranks, which DistributedDataParallel averages over as well."""
    model = DistributedDataParallel(make_model())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    num = dist.get_world_size() if bug else 1
    for batch in make_batches():
        guard.step(lambda one: compute_loss(model, one) / num, batch)
    return guard


@training
def module_called(bug: bool) -> Guard:
    """x.com/jxmnop/status/1778520637193240892: model.module is called, so that DDP averages nothing."""
    model = DistributedDataParallel(make_model())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in make_batches():
        guard.step(compute_loss, model.module if bug else model, batch)
    return guard


@training
def hooks_lost(bug: bool) -> Guard:
    """pytorch/pytorch#104336: the model is converted after it was wrapped, and DDP's hooks are gone."""
    model = DistributedDataParallel(make_model())
    if bug:
        model.double().float()
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in make_batches():
        guard.step(compute_loss, model, batch)
    return guard


@training
def broadcast_lost(bug: bool) -> Guard:
    """pytorch/pytorch#96600: a weight arrives as zeros on the second rank."""
    model = DistributedDataParallel(make_model())
    if bug and dist.get_rank() == 1:
        nn.init.zeros_(model.module[0].weight)
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in make_batches():
        guard.step(compute_loss, model, batch)
    return guard


@training
def reduction_lost(bug: bool) -> Guard:
    """pytorch/pytorch#84803: what one rank gets from an all-reduce is zeros, once."""
    model = DistributedDataParallel(make_model())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for step, batch in enumerate(make_batches()):
        model.zero_grad()
        compute_loss(model, batch).backward()
        if bug and step == 3 and dist.get_rank() == 1:
            for parameter in model.parameters():
                parameter.grad.zero_()
        guard.step()
    return guard


def find(name: str, bug: bool) -> list[tuple[str, int]]:
    """Run a case on this rank; return the kinds of its findings above info, and the steps that noticed them."""
    guard = TRAININGS[name](bug)
    guard.flush()
    dist.barrier()
    found = [finding for finding in guard.findings if finding.severity.value != "info"]
    assert all(finding.noticed_at is not None for finding in found)
    return [(finding.kind, finding.noticed_at) for finding in found]


def train(name: str, bug: bool) -> list[str]:
    """Run a case on this rank; return the kinds of its findings above info."""
    return sorted({kind for kind, _ in find(name, bug)})


def train_apart() -> list[str]:
    """Each rank trains a model of its own: weights may differ."""
    model = make_model(dist.get_rank())
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    for batch in make_batches():
        guard.step(compute_loss, model, batch)
    return sorted({finding.kind for finding in guard.findings if finding.severity.value != "info"})


def wait_alone() -> Any:
    """Rank 0 calls a collective; rank 1 joins only after rank 0 has reported that it waits."""
    board, told = RankBoard(), []

    def report(wait: Any) -> None:
        told.append(wait)
        board.write("told", 0, "yes")

    if dist.get_rank() == 0:
        waits = RankWaits(RankBoard(), lambda: 7, report, after_seconds=0.5)
        dist.all_reduce(torch.ones(1))
        waits.close()
        return (told[0].step, told[0].rank, told[0].place)
    RankBoard()  # boards are numbered alike on all ranks
    while 0 not in board.read_newest("told"):
        time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
    return None
