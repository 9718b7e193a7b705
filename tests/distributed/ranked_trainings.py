"""Trainings on several ranks: a model in DDP, batches for each rank, and what is compared afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad import Guard, GuardConfig
from steadygrad.config import MeasureConfig, SnapshotConfig

NUM_STEPS = 8


def make_model(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), nn.Linear(16, 3))


def make_batches(count: int = NUM_STEPS, *, size: int = 8, rank: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of one rank, by default this one."""
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def mask_labels(batches: list[tuple[Tensor, Tensor]], at: int, *, on_rank: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Ignore every label of one batch of one rank: a NaN loss with zero gradients."""
    if dist.get_rank() == on_rank:
        batches[at] = (batches[at][0], torch.full_like(batches[at][1], -100))
    return batches


def poison_input(batches: list[tuple[Tensor, Tensor]], at: int, *, on_rank: int = 1) -> list[tuple[Tensor, Tensor]]:
    if dist.get_rank() == on_rank:
        batches[at][0][0] = torch.nan
    return batches


class Training:
    """A guarded training on one rank."""

    def __init__(
        self,
        *,
        norm: bool = False,
        lr: float = 0.05,
        run_dir: Any = None,
        ddp: Any = None,
        spoil: Callable[[nn.Module], Any] | None = None,
        **config: Any,
    ) -> None:
        self.ddp = DistributedDataParallel(make_model(norm=norm), **(ddp or {}))
        if spoil is not None:
            spoil(self.ddp.module)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        settings = {"measure": MeasureConfig(scan_every=3), "snapshots": SnapshotConfig(good_after=2)} | config
        self.guard = Guard(
            self.ddp, self.optimizer, config=GuardConfig(**settings), scheduler=self.scheduler, run_dir=run_dir
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.ddp(batch[0]), batch[1])

    def run(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        for batch in batches:
            self.guard.step(self.loss, batch)

    def report(self) -> dict[str, Any]:
        """Return what all ranks must have in common, and what each has seen."""
        self.guard.flush()
        return {
            "state": state_of(self.ddp.module, self.optimizer),
            "rates": self.guard.stats()["current_learning_rate"],
            "skipped": self.guard.stats()["num_skipped"],
            "rollbacks": self.guard.stats()["num_rollbacks"],
            "incidents": [(i.step, i.finding.kind, i.finding.message) for i in self.guard.incidents],
            "last": None if self.guard.last is None else (self.guard.last.loss, self.guard.last.grad_norm),
        }


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Return copies of weights and moments. Buffers differ between ranks until DDP's next forward."""
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    moments = {} if optimizer is None else optimizer.state_dict()["state"]
    for number, kept in moments.items():
        state |= {f"{number}.{name}": value.clone() for name, value in kept.items() if isinstance(value, Tensor)}
    return state


def train_plainly(batches_by_rank: list[list[tuple[Tensor, Tensor]]], *, max_norm: float = 1.0) -> dict[str, Tensor]:
    """Run the same training in one process: the mean over the ranks' losses, stock clipping."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    for batches in zip(*batches_by_rank):
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in batches]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return state_of(model)


def assert_alike(results: list[dict[str, Any]], *keys: str) -> None:
    """Assert that all ranks have the same state, bit for bit, and the same numbers."""
    for rank, result in enumerate(results[1:], 1):
        assert_same(results[0]["state"], result["state"], f"rank {rank}")
        for key in ("rates", "skipped", "rollbacks", "last", *keys):
            first, other = results[0][key], result[key]
            assert repr(first) == repr(other), f"{key}: rank 0 has {first}, rank {rank} {other}"


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], where: str = "") -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{where} differs in {different}"
