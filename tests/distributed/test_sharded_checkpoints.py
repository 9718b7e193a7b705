"""Checkpoints of several ranks: exact on the same number of ranks, correct on any other, complete or missing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_trainings import assert_same, make_batches, state_of
from test_fsdp import gather, make_model, make_own_batches, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from steadygrad import Guard, GuardConfig
from steadygrad.checkpoint import UnsafePickleError
from steadygrad.checkpoint.sharded import ShardedStore
from steadygrad.checkpoint.shared_tensors import read_table
from steadygrad.config import CheckpointConfig, ZClip
from steadygrad.state.shards import take_local
from steadygrad.testing.ranks import RanksFailed, run_ranks

NUM_STEPS, SAVED = 8, 5


class Program:
    """Dropout, EMA, a scheduler and a clip state: everything that a resume must restore."""

    def __init__(self, run_dir: Path, kind: str) -> None:
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        inner = nn.Sequential(*make_model(), nn.Dropout(0.2))
        self.model: nn.Module = inner
        if kind == "ddp":
            self.model = DistributedDataParallel(inner)
        elif kind == "fsdp":
            self.model = shard(inner, "1d")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        config = GuardConfig(clip=ZClip(warmup=2), checkpoint=CheckpointConfig(good_after=1))
        self.guard = Guard(self.model, self.optimizer, config=config, scheduler=self.scheduler, run_dir=run_dir)
        self.kind = kind
        torch.manual_seed(50 + (dist.get_rank() if dist.is_initialized() else 0))

    def run(self, start: int, stop: int, *, save_at: int | None = None) -> None:
        batches = make_own_batches("1d", NUM_STEPS) if dist.is_initialized() else make_batches(NUM_STEPS, rank=0)
        for step in range(start, stop):
            x, y = batches[step]
            self.guard.step(lambda x, y: nn.functional.cross_entropy(self.model(x), y), x, y)
            if step + 1 == save_at:
                saved = self.guard.save()
                assert saved is not None
                assert saved.error is None

    def report(self) -> dict[str, Any]:
        self.guard.flush()
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        if self.kind == "fsdp":
            moments = {f"{i}": take_local(s["exp_avg"]).clone() for i, s in enumerate(self.optimizer.state.values())}
            return {"state": gather(self.model), "moments": moments, "lr": self.scheduler.get_last_lr()}
        state = state_of(inner)
        moments = {f"{i}": s["exp_avg"].clone() for i, s in enumerate(self.optimizer.state.values())}
        return {"state": state, "moments": moments, "lr": self.scheduler.get_last_lr()}


def run_whole(run_dir: Path, kind: str) -> dict[str, Any]:
    program = Program(run_dir, kind)
    program.run(0, NUM_STEPS, save_at=SAVED)
    return program.report()


def resume(run_dir: Path, kind: str, stop: int = NUM_STEPS) -> dict[str, Any]:
    program = Program(run_dir, kind)
    torch.manual_seed(999)
    step = program.guard.resume()
    assert step == SAVED
    program.run(step, stop)
    messages = [f.message for f in program.guard.findings if f.kind == "resumed"]
    return {**program.report(), "messages": messages}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_training_on_two_ranks_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    whole = run_ranks(run_whole, 2, tmp_path / "run", kind)
    resumed = run_ranks(resume, 2, tmp_path / "run", kind)
    for one, other in zip(whole, resumed):
        assert_same(one["state"], other["state"])
        assert_same(one["moments"], other["moments"])
        assert one["lr"] == other["lr"]
    [folder] = (tmp_path / "run" / "checkpoints").iterdir()
    assert folder.name == f"step_{SAVED:08d}"
    assert {"manifest.json", ".metadata", "rank_0.pt", "rank_1.pt", "__0_0.distcp"} <= {
        p.name for p in folder.iterdir()
    }


def save_only(run_dir: Path, kind: str) -> dict[str, Any]:
    program = Program(run_dir, kind)
    program.run(0, SAVED, save_at=SAVED)
    return program.report()


@pytest.mark.parametrize(
    ("kind", "other_kind", "num_ranks"), [("fsdp", "fsdp", 3), ("fsdp", "ddp", 2), ("ddp", "fsdp", 2)]
)
def test_it_loads_with_another_number_of_ranks_and_another_sharding(
    tmp_path: Path, kind: str, other_kind: str, num_ranks: int
) -> None:
    saved = run_ranks(save_only, 2, tmp_path / "run", kind)
    loaded = run_ranks(resume, num_ranks, tmp_path / "run", other_kind, SAVED)
    for result in loaded:
        assert_same(saved[0]["state"], result["state"])
        assert saved[0]["lr"] == result["lr"]
        assert (f"2 ranks saved it and {num_ranks} resume" in result["messages"][0]) == (num_ranks != 2)


def test_one_process_loads_what_two_ranks_saved(tmp_path: Path) -> None:
    saved = run_ranks(save_only, 2, tmp_path / "run", "fsdp")
    loaded = resume(tmp_path / "run", "alone", SAVED)
    assert_same(saved[0]["state"], loaded["state"])
    assert "2 ranks saved it and 1 resume" in loaded["messages"][0]


def save_a_bad_shard(run_dir: Path) -> tuple[bool, list[str]]:
    program = Program(run_dir, "fsdp")
    program.run(0, 2, save_at=1)
    if dist.get_rank() == 1:
        take_local(next(program.model.parameters())).data[0] = torch.nan
    saved = program.guard.save()
    return saved is None, [i.finding.message for i in program.guard.incidents]


def test_a_nonfinite_shard_is_refused_on_all_ranks_and_named(tmp_path: Path) -> None:
    for refused, messages in run_ranks(save_a_bad_shard, 2, tmp_path / "run"):
        assert refused
        assert "model.0.weight" in messages[-1]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]


class Masked(nn.Module):
    """Has two masks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("second", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def save_cleaned(run_dir: Path, kind: str) -> tuple[dict[str, int], dict[str, Any]]:
    torch.manual_seed(0)
    inner = Masked()
    if kind == "fsdp":
        model: nn.Module = fully_shard(inner, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(inner, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    config = GuardConfig(checkpoint=CheckpointConfig(clean=True, clean_value=0.5))
    guard = Guard(model, optimizer, config=config, run_dir=run_dir)
    guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
    if dist.get_rank() == 0:
        inner.first.fill_(-torch.inf)
        inner.second.fill_(-torch.inf)
    if kind == "ddp" or dist.get_rank() == 1:
        take_local(inner.inner.weight).data[-1, 0] = torch.nan
    saved = guard.save()
    assert saved is not None
    assert saved.error is None
    cleaned = guard.checkpoints.list()[0].cleaned
    with torch.no_grad():
        take_local(inner.inner.weight).fill_(3.0)
        inner.first.fill_(7.0)
    guard.resume()
    whole = inner.inner.weight
    weight = whole.full_tensor() if kind == "fsdp" else whole  # type: ignore[operator]
    return cleaned, {"weight": weight.detach().clone(), "first": inner.first.clone(), "rank": dist.get_rank()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_cleaning_replaces_values_on_all_ranks_and_keeps_the_mask_of_one(tmp_path: Path, kind: str) -> None:
    for cleaned, state in run_ranks(save_cleaned, 2, tmp_path / "run", kind):
        assert cleaned == {"model.inner.weight": 1}
        assert state["weight"][1, 0] == 0.5
        assert (state["weight"].isfinite() & (state["weight"] != 3.0)).all()
        assert torch.equal(state["first"], torch.full((4,), -torch.inf if state["rank"] == 0 else 0.0))


def die_while_saving(run_dir: Path) -> None:
    program = Program(run_dir, "fsdp")
    program.run(0, SAVED, save_at=SAVED)
    program.run(SAVED, SAVED + 1)
    if dist.get_rank() == 1:
        ShardedStore._write_own = lambda *_: os._exit(9)  # type: ignore[method-assign]  # its parts are on disk by then
    program.guard.save()


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint_intact(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 died with exit code 9"):
        run_ranks(die_while_saving, 2, tmp_path / "run")
    names = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert [name for name in names if not name.startswith(".")] == [f"step_{SAVED:08d}"]
    whole = run_ranks(run_whole, 2, tmp_path / "other", "fsdp")
    resumed = run_ranks(resume, 2, tmp_path / "run", "fsdp")
    assert_same(whole[0]["state"], resumed[0]["state"])


def damage_and_resume(run_dir: Path) -> int | None:
    program = Program(run_dir, "ddp")
    return program.guard.resume()


def save_twice(run_dir: Path) -> None:
    program = Program(run_dir, "ddp")
    program.run(0, SAVED, save_at=SAVED)
    program.run(SAVED, NUM_STEPS, save_at=NUM_STEPS)


def test_a_damaged_part_makes_all_ranks_use_the_previous_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_twice, 2, tmp_path / "run")
    part = tmp_path / "run" / "checkpoints" / f"step_{NUM_STEPS:08d}" / "__1_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert run_ranks(damage_and_resume, 2, tmp_path / "run") == [SAVED, SAVED]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo run > evil.txt",)


def test_a_table_of_parts_that_contains_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UnsafePickleError, match="system"):
        read_table(tmp_path)
    assert not (tmp_path / "evil.txt").exists()
