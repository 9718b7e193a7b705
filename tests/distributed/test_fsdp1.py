"""FSDP1's flat shards: measured like whole gradients, skipped by all ranks together; nothing more is promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_trainings import assert_same, make_batches, mask_labels, poison_input
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from steadygrad import AdaptiveUnitClip, ConfigError, Guard, GuardConfig, UnsupportedError, UsageError
from steadygrad.config import CheckpointConfig, FixedNorm
from steadygrad.testing.ranks import run_ranks

NUM_STEPS = 6
BAD_STEP = 3


def make_model(*, whole: bool = False, names: bool = True, strategy: str = "FULL_SHARD") -> Any:
    """Sizes that two ranks cannot divide, and buffers; `names`: the parameters keep their own names."""
    torch.manual_seed(1)
    layers = nn.Linear(6, 15), nn.BatchNorm1d(15), nn.Tanh(), nn.Linear(15, 7), nn.Linear(7, 3)
    model = nn.Sequential(*layers)
    if whole:
        return model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=names,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def state_of(model: Any) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        return {
            name.replace("_fsdp_wrapped_module.", ""): t.detach().clone()
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }


def train_plainly(batches: list[tuple[Tensor, Tensor]], *, names: bool, strategy: str) -> dict[str, Tensor]:
    model = make_model(names=names, strategy=strategy)
    optimizer = make_optimizer(model)
    for x, y in batches:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


def train_guarded(batches: list[tuple[Tensor, Tensor]], *, names: bool, strategy: str) -> dict[str, Any]:
    model = make_model(names=names, strategy=strategy)
    guard = Guard(model, make_optimizer(model))
    for x, y in batches:
        guard.step(lambda x, y, model=model: nn.functional.cross_entropy(model(x), y), x, y)
    result = {
        "state": state_of(model),
        "skipped": guard.stats()["num_skipped"],
        "incidents": [(i.step, i.finding.kind, i.finding.message) for i in guard.incidents],
        "healthy": guard.health()["overall_healthy"],
    }
    guard.close()
    return result


def train_all(names: bool, strategy: str) -> dict[str, Any]:
    settings: Any = {"names": names, "strategy": strategy}
    return {
        "plain": train_plainly(make_batches(NUM_STEPS), **settings),
        "shorter": train_plainly([b for i, b in enumerate(make_batches(NUM_STEPS)) if i != BAD_STEP], **settings),
        "quiet": train_guarded(make_batches(NUM_STEPS), **settings),
        "nan": train_guarded(poison_input(make_batches(NUM_STEPS), BAD_STEP), **settings),
        "masked": train_guarded(mask_labels(make_batches(NUM_STEPS), BAD_STEP), **settings),
    }


@pytest.mark.parametrize(
    ("names", "strategy"), [(True, "FULL_SHARD"), (False, "FULL_SHARD"), (True, "SHARD_GRAD_OP"), (True, "NO_SHARD")]
)
def test_a_quiet_guard_changes_no_bit_and_a_bad_batch_of_one_rank_is_skipped_by_all(names: bool, strategy: str) -> None:
    for result in run_ranks(train_all, 2, names, strategy):
        assert_same(result["quiet"]["state"], result["plain"])
        assert (result["quiet"]["skipped"], result["quiet"]["incidents"]) == (0, [])
        for fault in ("nan", "masked"):
            assert_same(result[fault]["state"], result["shorter"])
            assert result[fault]["skipped"] == 1
            assert result[fault]["healthy"]
            step, kind, message = result[fault]["incidents"][-1]
            assert (step, kind) == (BAD_STEP, "nonfinite_loss")
            assert "it began on rank 1" in message


def measure(names: bool) -> tuple[dict[str, float], dict[str, int], dict[str, float], float]:
    """Return norms from a guard on shards, and from whole gradients of both ranks' batches."""
    model = make_model(names=names)
    guard = Guard(model, make_optimizer(model), config=GuardConfig(clip=FixedNorm(max_norm=0.1)))
    whole = make_model(whole=True)
    sums: dict[str, Tensor] = {}
    for rank in range(2):
        x, y = make_batches(1, rank=rank)[0]
        whole.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        for name, p in whole.named_parameters():
            sums[name] = sums.get(name, torch.zeros(())) + p.grad.double() / 2
    x, y = make_batches(1)[0]
    guard.step(lambda: nn.functional.cross_entropy(model(x), y))
    reading = guard._judgement.last_reading
    assert reading is not None
    table = reading.gradients
    norms = {name: table.row(i).norm for i, name in enumerate(table.names)}
    return norms, dict(zip(table.names, table.numels)), {n: float(g.norm()) for n, g in sums.items()}, reading.grad_norm


def test_norms_and_sizes_equal_those_of_whole_parameters() -> None:
    for norms, numels, expected, norm in run_ranks(measure, 2, True):
        assert norms.keys() == expected.keys()
        for name, value in expected.items():
            assert norms[name] == pytest.approx(value, rel=1e-5)  # sums over the ranks in float32
        assert numels["0.weight"] == 90
        assert norm == pytest.approx(sum(value**2 for value in expected.values()) ** 0.5, rel=1e-5)
    for norms, _, expected, norm in run_ranks(measure, 2, False):
        assert len(norms) == 4  # one flat tensor per wrapped layer, one for the rest
        assert norm == pytest.approx(sum(value**2 for value in expected.values()) ** 0.5, rel=1e-5)


def spoil_gradient_alone() -> tuple[list[tuple[str, str]], int | None]:
    model = make_model()
    guard = Guard(model, make_optimizer(model))

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        return loss + (out * 0.0).abs().sqrt().sum() if dist.get_rank() == 1 else loss  # sqrt at 0

    guard.step(step, *make_batches(1)[0])
    return [(i.finding.kind, i.finding.message) for i in guard.incidents], guard.stats()["num_skipped"]  # type: ignore[return-value]


def test_a_bad_gradient_of_one_rank_is_traced_to_it() -> None:
    for incidents, num_skipped in run_ranks(spoil_gradient_alone, 2):
        assert num_skipped == 1
        kind, message = incidents[-1]
        assert kind == "nonfinite_gradient"
        assert "it began on rank 1" in message


def ask_for_too_much() -> list[str]:
    model = make_model()
    optimizer = make_optimizer(model)
    errors = []
    with pytest.raises(UnsupportedError) as unsupported:
        Guard(model, optimizer, config=GuardConfig(clip=AdaptiveUnitClip()))
    errors.append(str(unsupported.value))
    with pytest.raises(ConfigError) as every:
        Guard(model, optimizer, config=GuardConfig(checkpoint=CheckpointConfig(every=5)))
    errors.append(str(every.value))
    guard = Guard(model, optimizer)
    for call in (guard.save, guard.resume):
        with pytest.raises(UsageError) as misused:
            call()
        errors.append(str(misused.value))
    return errors


def test_uses_that_flat_shards_cannot_support_are_refused_with_advice() -> None:
    for clip, every, save, resume in run_ranks(ask_for_too_much, 2):
        assert "is sharded" in clip
        assert "torch.distributed.checkpoint" in every
        assert "fully_shard" in save
        assert resume == save
