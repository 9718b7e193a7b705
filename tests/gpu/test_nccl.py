"""Several ranks on CUDA: NCCL with one rank tests the exchange on the device, two gloo ranks test agreement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from steadygrad import Guard, GuardConfig, MeasureConfig
from steadygrad.state.shards import take_local
from steadygrad.testing.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*runs without fused=True")]


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[Any]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make_model(*, norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(512)] if norm else []
    return nn.Sequential(nn.Linear(256, 512), *middle, nn.GELU(), nn.Linear(512, 256)).cuda()


def make_guard(model: nn.Module, group: Any = None) -> Guard:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = GuardConfig(measure=MeasureConfig(scan_every=0, parameters_every=0))
    return Guard(model, optimizer, config=config, process_group=group)


def make_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(64, 256, generator=generator).cuda() for _ in range(count)]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): p.detach().clone() for name, p in model.named_parameters()}


def test_the_exchange_over_nccl_adds_no_host_wait(nccl: Any) -> None:
    model = DistributedDataParallel(make_model(), device_ids=[0])
    guard = make_guard(model, nccl)
    batches = make_batches(4)
    for i in range(8):
        guard.step(lambda x: (model(x) - x).square().mean(), batches[i % 4])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(30):
            guard.step(lambda x: (model(x) - x).square().mean(), batches[i % 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.flush()
    assert guard.stats()["num_steps"] == 38
    assert guard.stats()["num_skipped"] == 0


def test_a_rank_in_a_group_of_one_trains_like_one_without_a_group(nccl: Any) -> None:
    batches = make_batches(12)
    batches[5][0] = torch.nan
    results = []
    for group in (nccl, None):
        model = DistributedDataParallel(make_model(), device_ids=[0])
        guard = make_guard(model, group)
        for batch in batches:
            guard.step(lambda x: (model(x) - x).square().mean(), batch)  # noqa: B023
        guard.flush()
        assert guard.stats()["num_skipped"] == 1
        results.append(weights_of(model))
        messages = [i.finding.message for i in guard.incidents if i.finding.kind == "nonfinite_loss"]
        assert ("it began on rank 0" in messages[0]) == (group is not None)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_shards_over_nccl_are_measured_clipped_skipped_and_saved(nccl: Any, tmp_path: Path) -> None:
    model = make_model(norm=False)
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = Guard(model, optimizer, process_group=nccl, run_dir=tmp_path / "run")
    whole = make_model(norm=False)
    batches = make_batches(6)
    (whole(batches[0]) - batches[0]).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()
    batches[3][0] = torch.nan
    norms = []
    for batch in batches:
        guard.step(lambda x: (model(x) - x).square().mean(), batch)
        assert guard.last is not None
        norms.append(guard.last.grad_norm)
    # TF32 and the order of sums differ between the two models' kernels.
    assert norms[0] == pytest.approx(norm, rel=1e-3)
    assert guard.stats()["num_skipped"] == 1
    saved = guard.save()
    assert saved is not None
    assert saved.error is None
    before = [p.full_tensor().clone() for p in model.parameters()]
    guard.step(lambda x: (model(x) - x).square().mean(), batches[0])
    assert guard.resume() == 6
    for parameter, value in zip(model.parameters(), before):
        assert torch.equal(parameter.full_tensor(), value)


def test_shards_offloaded_to_the_host_are_guarded(nccl: Any) -> None:
    model = make_model(norm=False)
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), process_group=nccl)
    batches = make_batches(5)
    batches[2][0] = torch.nan
    before: list[Tensor] = []
    for step, batch in enumerate(batches):
        guard.step(lambda x: (model(x) - x).square().mean(), batch)
        if step in (1, 2):
            before.append(take_local(next(model.parameters())).clone())
    assert guard.stats()["num_skipped"] == 1
    assert torch.equal(before[0], before[1]), "the bad step has touched no weight"
    assert before[0].device.type == "cpu"


def train_on_shared_gpu() -> dict[str, Any]:
    """Two ranks on one GPU: gloo accepts CUDA tensors there, NCCL does not."""
    torch.cuda.set_device(0)
    model = DistributedDataParallel(make_model(), device_ids=[0])
    guard = make_guard(model)
    batches = make_batches(10)
    if dist.get_rank() == 1:
        batches[4][0] = torch.nan
    for batch in batches:
        guard.step(lambda x: (model(x) - x).square().mean(), batch)
    guard.flush()
    return {
        "weights": {name: value.cpu() for name, value in weights_of(model).items()},
        "skipped": guard.stats()["num_skipped"],
        "messages": [i.finding.message for i in guard.incidents if i.finding.kind == "nonfinite_loss"],
    }


def test_two_ranks_with_fused_optimizers_skip_together_on_the_device() -> None:
    first, second = run_ranks(train_on_shared_gpu, 2, time_limit_seconds=120)
    assert first["skipped"] == second["skipped"] == 1
    assert "it began on rank 1" in first["messages"][0]
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name]), name
