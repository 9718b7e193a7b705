"""FSDP2 and tensor parallelism: numbers from shards equal those of the whole model, and all ranks act the same."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_trainings import assert_same, make_batches, mask_labels
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from steadygrad import AdaptiveUnitClip, GradientHealthMonitor, Guard, GuardConfig, UnsupportedError, ZClip
from steadygrad.config import FixedNorm, MeasureConfig, Policy, SnapshotConfig
from steadygrad.state.calls import hear_calls, stop_hearing
from steadygrad.state.shards import take_local
from steadygrad.testing.ranks import run_ranks

NUM_STEPS = 6


def make_model(width: int = 15) -> nn.Sequential:
    """Sizes that no number of ranks divides, except for torch's tensor parallelism, which needs divisible ones."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def shard(model: nn.Sequential, layout: str) -> nn.Sequential:
    """1-D: all ranks share the weights; 2-D: two copies of two shards, or shards of tensor-parallel parts."""
    num = dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if layout == "bf16" else None
    settings: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
    if layout in ("1d", "bf16"):
        mesh = init_device_mesh("cpu", (num,))
    elif layout == "copies":
        mesh = init_device_mesh("cpu", (2, num // 2), mesh_dim_names=("copies", "shards"))
    else:
        whole = init_device_mesh("cpu", (num // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, whole["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh = whole["data"]
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def data_rank(layout: str) -> int:
    """Return the index of the data: ranks that hold parts of one copy get the same batch."""
    return dist.get_rank() // 2 if layout == "tensor" else dist.get_rank()


def make_own_batches(layout: str, count: int = NUM_STEPS) -> list[tuple[Tensor, Tensor]]:
    return make_batches(count, rank=data_rank(layout))


def gather(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}


def train_sharded(layout: str, max_norm: float) -> dict[str, Any]:
    model = shard(make_model(16 if layout == "tensor" else 15), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    guard = Guard(model, optimizer, config=GuardConfig(clip=FixedNorm(max_norm=max_norm)))
    readings = []
    for x, y in make_own_batches(layout):
        guard.step(lambda x, y: nn.functional.cross_entropy(model(x).float(), y), x, y)
        readings.append(guard._judgement.last_reading)
    return {
        "weights": gather(model),
        "norms": [dict(r.gradients.norms) for r in readings],
        "largest": [{n: s.max_abs for n, s in r.gradients.items()} for r in readings],
        "numel": {n: s.numel for n, s in readings[0].gradients.items()},
        "global": [(r.loss, r.grad_norm, r.clip_coefficient) for r in readings],
    }


def train_whole(num_batches_a_step: int, max_norm: float, *, width: int = 15) -> dict[str, Any]:
    """Train the unsharded model on all ranks' batches, with stock clipping."""
    model = make_model(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    result: dict[str, Any] = {"norms": [], "largest": [], "global": []}
    for batches in zip(*[make_batches(NUM_STEPS, rank=rank) for rank in range(num_batches_a_step)]):
        loss = torch.stack([nn.functional.cross_entropy(model(x), y) for x, y in batches]).mean()
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        result["norms"].append({name: g.norm().item() for name, g in grads.items()})
        result["largest"].append({name: g.abs().max().item() for name, g in grads.items()})
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
        result["global"].append((loss.item(), norm, min(1.0, max_norm / (norm + 1e-6))))
        optimizer.step()
        optimizer.zero_grad()
    return {**result, "weights": {name: p.detach() for name, p in model.named_parameters()}}


@pytest.mark.parametrize(("layout", "num_ranks"), [("1d", 2), ("1d", 3), ("copies", 4), ("tensor", 4)])
def test_norms_and_training_in_shards_equal_the_whole_model(layout: str, num_ranks: int) -> None:
    results = run_ranks(train_sharded, num_ranks, layout, 0.3)
    is_tensor = layout == "tensor"
    whole = train_whole(num_ranks // 2 if is_tensor else num_ranks, 0.3, width=16 if is_tensor else 15)
    for result in results:
        assert_same(results[0]["weights"], result["weights"])
        assert result["global"] == results[0]["global"], "the Reading is the same on every rank"
    # float32 sums in another order; six steps of Adam amplify that a little.
    torch.testing.assert_close(results[0]["global"], whole["global"], rtol=2e-4, atol=1e-6)
    for what in ("norms", "largest"):
        for step, (one, other) in enumerate(zip(results[0][what], whole[what])):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=lambda m, s=step: f"step {s}: {m}")
    torch.testing.assert_close(results[0]["weights"], whole["weights"], rtol=1e-3, atol=1e-4)
    assert results[0]["numel"]["0.weight"] == (96 if is_tensor else 90)
    assert any(coefficient < 1 for _, _, coefficient in results[0]["global"])


def test_norms_in_mixed_precision_are_close_to_those_of_the_whole_model() -> None:
    results = run_ranks(train_sharded, 2, "bf16", 0.3)
    whole = train_whole(2, 0.3)
    assert_same(results[0]["weights"], results[1]["weights"])
    # bfloat16 has 8 bits: single gradients are a few hundredths off, their norm less.
    torch.testing.assert_close(results[0]["global"][0], whole["global"][0], rtol=3e-2, atol=3e-2)


def check_shards(layout: str) -> dict[str, Any]:
    """What a monitor says of the first batch's gradients, how often it prints, and the gradients that it clipped."""
    model = shard(make_model(16 if layout == "tensor" else 15), layout)
    monitor = GradientHealthMonitor(model)
    bare = monitor.check_gradients()
    x, y = make_own_batches(layout, 1)[0]
    nn.functional.cross_entropy(model(x), y).backward()
    stats = monitor.check_gradients()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        monitor.log_statistics(stats, step=0)
    clipped_at = monitor.apply_gradient_clipping(0.3)
    clipped = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    return {"bare": bare, "stats": stats, "printed": printed.getvalue(), "clipped_at": clipped_at, "clipped": clipped}


@pytest.mark.parametrize(("layout", "num_ranks"), [("1d", 2), ("tensor", 4)])
def test_a_monitor_reports_the_whole_gradients_on_every_rank_clips_them_and_prints_once(
    layout: str, num_ranks: int
) -> None:
    results = run_ranks(check_shards, num_ranks, layout)
    is_tensor = layout == "tensor"
    model = make_model(16 if is_tensor else 15)
    batches = [make_batches(1, rank=rank)[0] for rank in range(num_ranks // 2 if is_tensor else num_ranks)]
    torch.stack([nn.functional.cross_entropy(model(x), y) for x, y in batches]).mean().backward()
    whole = GradientHealthMonitor(model).check_gradients()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()
    for result in results:
        assert result["bare"]["params_with_grads"] == 0
        for name in ("global_grad_norm", "max_grad_norm", "min_grad_norm", "mean_grad_norm"):
            assert result["stats"][name] == pytest.approx(whole[name], rel=1e-4)  # sums in another order
        assert result["stats"]["layer_stats"]["0.weight"]["shape"] == tuple(model[0].weight.shape)
        assert result["clipped_at"] == pytest.approx(norm, rel=1e-4)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(result["clipped"][name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert [result["printed"].count("Step 0 - Gradient Health") for result in results] == [1] + [0] * (num_ranks - 1)


def train_and_spoil(layout: str, clip: Any) -> dict[str, Any]:
    model = shard(make_model(), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    policy = Policy(nonfinite_steps_to_scale_lr=2, nonfinite_steps_to_rollback=3)
    config = GuardConfig(
        clip=clip, policy=policy, measure=MeasureConfig(scan_every=4), snapshots=SnapshotConfig(good_after=2)
    )
    guard = Guard(model, optimizer, config=config)
    before: dict[str, Tensor] = {}
    batches = make_own_batches(layout, 24)
    for step in (5, 11, 12, 13):
        mask_labels(batches, step)
    untouched = False
    for step, (x, y) in enumerate(batches):
        if step == 5:
            before = {n: take_local(p).clone() for n, p in model.named_parameters()}
        guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
        if step == 5:
            untouched = all(torch.equal(take_local(p), before[n]) for n, p in model.named_parameters())
    return {
        "weights": gather(model),
        "untouched": untouched,
        "stats": guard.stats(),
        "health": guard.health(),
        "messages": [i.finding.message for i in guard.incidents if i.finding.kind == "nonfinite_loss"],
    }


@pytest.mark.parametrize("layout", ["1d", "copies"])
def test_a_bad_loss_on_one_rank_is_skipped_and_rolled_back_by_all_shards(layout: str) -> None:
    results = run_ranks(train_and_spoil, 2 if layout == "1d" else 4, layout, ZClip(warmup=3))
    for result in results:
        assert_same(results[0]["weights"], result["weights"])
        assert result["untouched"]
        assert result["stats"]["num_rollbacks"] == 1
        assert result["health"]["overall_healthy"]
        assert all("it began on rank 1" in message for message in result["messages"])
        assert len(result["messages"]) == 4


def train_with_a_bad_shard() -> dict[str, Any]:
    """Make a weight NaN in the shard of one rank, like a bad memory cell."""
    model = shard(make_model(), "1d")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    config = GuardConfig(measure=MeasureConfig(scan_every=4), snapshots=SnapshotConfig(good_after=2))
    guard = Guard(model, optimizer, config=config)
    for step, (x, y) in enumerate(make_own_batches("1d", 24)):
        if step == 16 and dist.get_rank() == 1:
            take_local(model[4].weight).data[0] = math.nan
        guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    kinds = [i.finding.kind for i in guard.incidents]
    return {"weights": gather(model), "kinds": kinds, "rollbacks": guard.stats()["num_rollbacks"]}


def test_a_weight_that_turns_nan_in_one_shard_is_found_by_all_and_rolled_back() -> None:
    results = run_ranks(train_with_a_bad_shard, 2)
    assert results[0]["kinds"] == results[1]["kinds"]
    assert "nonfinite_parameter" in results[0]["kinds"]
    assert results[0]["rollbacks"] == results[1]["rollbacks"] == 1
    assert_same(results[0]["weights"], results[1]["weights"])
    assert all(value.isfinite().all() for value in results[0]["weights"].values())


def make_refused() -> list[str]:
    result = []
    model = shard(make_model(), "1d")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    try:
        Guard(model, optimizer, config=GuardConfig(clip=AdaptiveUnitClip()))
    except UnsupportedError as error:
        result.append(str(error))
    return result


def test_a_strategy_that_needs_whole_rows_is_refused_by_name_at_the_start() -> None:
    for result in run_ranks(make_refused, 2):
        assert "AdaptiveUnitClip" in result[0]
        assert "is sharded" in result[0]


def roll_back_after_evaluation() -> dict[str, Any]:
    """A forward without backward leaves gathered weights in FSDP2, which a rollback must not keep."""
    model = shard(make_model(), "1d")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    policy = Policy(actions={"nonfinite_validation": "rollback"})
    guard = Guard(model, optimizer, config=GuardConfig(policy=policy, snapshots=SnapshotConfig(good_after=1)))
    batches = make_own_batches("1d", 8)
    for x, y in batches[:6]:
        guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    with torch.no_grad():
        model(batches[6][0])
    guard.validate(math.nan)
    rolled_back = guard.stats()["num_rollbacks"]
    with torch.no_grad():
        seen = model(batches[7][0])
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    with torch.no_grad():
        truth = model(batches[7][0])
    return {"rolled_back": rolled_back, "same": torch.equal(seen, truth)}


def test_a_rollback_after_an_evaluation_keeps_no_gathered_weights() -> None:
    for result in run_ranks(roll_back_after_evaluation, 2):
        assert result == {"rolled_back": 1, "same": True}


def hear_a_sharded_module() -> tuple[list[int], list[int]]:
    """Return the number of hooks, and of calls heard by two listeners, while these are added and removed."""
    model = shard(make_model(), "1d")
    heard = [0, 0]

    def listen_first(*_: Any) -> None:
        heard[0] += 1

    def listen_second(*_: Any) -> None:
        heard[1] += 1

    numbers = []
    for change, listener in (
        *((hear_calls, listen_first), (hear_calls, listen_second), (stop_hearing, listen_first)),
        *((stop_hearing, listen_second), (hear_calls, listen_first), (stop_hearing, listen_first)),
    ):
        change(model, listener)
        numbers.append(len(model._forward_pre_hooks))
        assert len(model._forward_pre_hooks_with_kwargs) == len(model._forward_pre_hooks)
        model(torch.zeros(2, 6))
    return [number - numbers[-1] for number in numbers], heard


def test_listeners_to_a_sharded_module_share_a_hook_and_remove_it() -> None:
    for numbers, heard in run_ranks(hear_a_sharded_module, 2):
        assert numbers == [1, 1, 1, 0, 1, 0]
        assert heard == [3, 2]
