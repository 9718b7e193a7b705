"""A bad value that passes through collectives is explained by the rank that created it; a replay leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from steadygrad import Guard
from steadygrad.state.shards import take_local
from steadygrad.testing.ranks import run_ranks

NUM_STEPS, BAD_STEP, BAD_SAMPLE = 5, 3, 2
MARK = -1000.0


class Net(nn.Module):
    """Two layers, and a function between them that fails for a marked sample."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(getattr(self, self.between)(self.up(x), x))  # type: ignore[no-any-return]

    def take_root(self, h: Tensor, x: Tensor) -> Tensor:
        return h + (x[:, :1] + 100).sqrt()

    def take_root_in_one_part(self, h: Tensor, x: Tensor) -> Tensor:
        """Return NaN in the part of the layer that rank 1 holds."""
        return h + (x[:, :1] * dist.get_rank() + 100).sqrt()

    def take_root_of_zero(self, h: Tensor, x: Tensor) -> Tensor:
        """Return a finite value with a nonfinite derivative."""
        h = h * (x[:, :1] > MARK)
        return h + h.square().sum(1, keepdim=True).sqrt()


def train(model: nn.Module, loss: Any, *, same_batches: bool = False) -> tuple[int, list[dict[str, Any]]]:
    """Train with one marked sample: on all ranks if they have the same batches, otherwise on rank 1."""
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(10 * step + (0 if same_batches else dist.get_rank()))
        x, y = torch.randn(4, 8, generator=generator), torch.randint(3, (4,), generator=generator)
        if step == BAD_STEP and (same_batches or dist.get_rank() == 1):
            x[BAD_SAMPLE, 0] = MARK
        guard.step(loss, x, y)
    causes = [incident.cause for incident in guard.incidents if incident.cause is not None]
    described = [{"op": c.op, "source": c.source, "samples": c.samples, "rank": c.rank} for c in causes]
    return int(guard.stats()["num_skipped"]), described


def train_in_parts(between: str) -> tuple[int, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = Net(between)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return train(model, lambda x, y: nn.functional.cross_entropy(model(x), y), same_batches=True)


@pytest.mark.parametrize(
    ("between", "line", "rank"),
    [
        ("take_root", "return h + (x[:, :1] + 100).sqrt()", 0),
        ("take_root_in_one_part", "return h + (x[:, :1] * dist.get_rank() + 100).sqrt()", 1),
        ("take_root_of_zero", "return h + h.square().sum(1, keepdim=True).sqrt()", 0),
    ],
)
def test_an_op_between_tensor_parallel_layers_is_named_with_rank_and_sample(between: str, line: str, rank: int) -> None:
    expected = {"op": "aten.sqrt", "source": line, "samples": (BAD_SAMPLE,), "rank": rank}
    for skipped, causes in run_ranks(train_in_parts, 2, between):
        assert (skipped, causes) == (1, [expected])


def train_with_bad_weight() -> tuple[list[str], list[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    fully_shard(model)
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(NUM_STEPS):
        if step == BAD_STEP and dist.get_rank() == 1:
            take_local(model.weight.detach())[0, 0] = torch.nan
        guard.step(lambda x: model(x).square().mean(), torch.ones(4, 8))
    causes = [incident.cause for incident in guard.incidents if incident.cause is not None]
    return [cause.name for cause in causes], [(cause.phase, cause.rank) for cause in causes]


def test_a_bad_weight_is_reported_by_the_rank_that_holds_its_shard() -> None:
    for names, where in run_ranks(train_with_bad_weight, 2):
        assert (names, where) == (["weight"], [("parameter", 1)])


class Scaled:
    """A loss divided by a number shared by all ranks: if one rank's is bad, the loss of all ranks is bad."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(8, 3))
        self.total = torch.zeros(1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        size = (x[:, :1] + 100).sqrt().sum()
        dist.all_reduce(size)
        return nn.functional.cross_entropy(self.model(x) / size, y)

    def loss_with_total(self, x: Tensor, y: Tensor) -> Tensor:
        """Keep the total of all ranks from step to step, and sum it in place."""
        dist.all_reduce(self.total)
        return nn.functional.cross_entropy(self.model(x) + self.total, y) + (x[:, 0] + 100).sqrt().mean()


def train_scaled() -> tuple[int, list[dict[str, Any]]]:
    training = Scaled()
    return train(training.model, training.loss)


def test_the_rank_that_sent_a_bad_value_is_blamed_and_not_the_one_that_divided_by_it() -> None:
    line = "size = (x[:, :1] + 100).sqrt().sum()"
    expected = {"op": "aten.sqrt", "source": line, "samples": (BAD_SAMPLE,), "rank": 1}
    for skipped, causes in run_ranks(train_scaled, 2):
        assert (skipped, causes) == (1, [expected])


def train_with_total() -> tuple[float, list[dict[str, Any]]]:
    training = Scaled()
    training.total += 1
    _, causes = train(training.model, training.loss_with_total)
    return float(training.total), causes


def test_a_tensor_reduced_in_place_is_restored_after_a_replay() -> None:
    for total, causes in run_ranks(train_with_total, 2):
        assert total == 2.0**NUM_STEPS
        assert causes[0]["op"] == "aten.sqrt"


def train_with_a_value_that_only_another_rank_uses() -> tuple[int, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 3))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        own = (x[:, 0] + 100).sqrt()  # NaN on rank 1, which does not use it
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own)
        total = nn.functional.cross_entropy(model(x), y)
        return total + parts[1].mean() if dist.get_rank() == 0 else total

    return train(model, loss)


def test_a_value_used_only_by_its_receiver_is_explained_by_its_sender() -> None:
    for skipped, causes in run_ranks(train_with_a_value_that_only_another_rank_uses, 2):
        assert skipped == 1
        assert [(cause["op"], cause["rank"]) for cause in causes] == [("aten.sqrt", 1)]
