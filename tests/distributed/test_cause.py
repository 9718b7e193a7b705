"""The cause of a bad step on several ranks: the rank where it began replays it alone, and all ranks get the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_trainings import Training, assert_alike, make_batches
from torch import Tensor

from steadygrad.testing.ranks import run_ranks


class Rooted(Training):
    """Takes the root of a value that one sample of one rank makes negative."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        out = super().loss(batch)
        return out + (batch[0][:, 0] + 100).sqrt().mean() * self.ddp.module[0].weight.mean()


def make_spoilt(on_rank: int = 1) -> list[tuple[Tensor, Tensor]]:
    batches = make_batches()
    if dist.get_rank() == on_rank:
        batches[4][0][5, 0] = -1000.0
    return batches


def list_causes(training: Training) -> list[dict[str, Any]]:
    causes = [i.cause for i in training.guard.incidents if i.cause is not None]
    return [{"op": c.op, "source": c.source, "samples": c.samples, "note": c.note, "phase": c.phase} for c in causes]


def train_rooted(run_dir: str) -> dict[str, Any]:
    training = Rooted(norm=True, run_dir=run_dir)
    training.run(make_spoilt())
    result = training.report() | {"causes": list_causes(training)}
    training.guard.close()
    return result


def test_op_line_and_sample_of_one_rank_are_known_on_all(tmp_path: Path) -> None:
    results = run_ranks(train_rooted, 2, str(tmp_path))
    assert_alike(results)
    for result in results:
        assert result["skipped"] == 1
        cause = result["causes"][0]
        assert cause["op"] == "aten.sqrt"
        assert "sqrt().mean()" in cause["source"]
        assert cause["samples"] == (5,)
        assert cause["note"].startswith("Replayed on rank 1.")
    incident = json.loads((tmp_path / "incidents.jsonl").read_text().splitlines()[0])
    assert incident["cause"]["op"] == "aten.sqrt", "the one writer of the run directory knows it too"


def train_quietly_after(run_dir: str) -> dict[str, Any]:
    """Train the same way without a failure, so that no diagnosis is made."""
    from steadygrad import DiagnoseConfig

    training = Rooted(norm=True, diagnose=DiagnoseConfig(enabled=False))
    training.run(make_spoilt())
    return training.report()


def test_a_replay_leaves_no_trace_in_weights_buffers_or_moments(tmp_path: Path) -> None:
    with_replay = run_ranks(train_rooted, 2, str(tmp_path))
    without = run_ranks(train_quietly_after, 2, str(tmp_path))
    for one, other in zip(with_replay, without):
        assert one["last"] == other["last"]
        for name, value in other["state"].items():
            assert torch.equal(one["state"][name], value), name


class Gathering(Rooted):
    """A step that communicates itself, like a contrastive loss over all ranks."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        sizes = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.ones(1))
        return super().loss(batch) * torch.stack(sizes).mean()


def train_gathering() -> dict[str, Any]:
    training = Gathering()
    training.run(make_spoilt())
    return training.report() | {"causes": list_causes(training)}


def test_a_step_that_communicates_is_replayed_by_all_ranks() -> None:
    results = run_ranks(train_gathering, 2)
    assert_alike(results)
    for result in results:
        assert result["skipped"] == 1
        cause = result["causes"][0]
        assert (cause["op"], cause["samples"]) == ("aten.sqrt", (5,))
        assert cause["note"].startswith("Replayed on rank 1.")


def train_static(at: int, enabled: bool) -> dict[str, Any]:
    from steadygrad import DiagnoseConfig

    training = Rooted(ddp={"static_graph": True}, diagnose=DiagnoseConfig(enabled=enabled))
    batches = make_batches()
    if dist.get_rank() == 1:
        batches[at][0][5, 0] = -1000.0
    training.run(batches)
    return training.report() | {"causes": list_causes(training)}


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_static_graph_is_replayed_without_a_trace(at: int) -> None:
    """Including its first steps, in which DDP learns the graph."""
    results, without = run_ranks(train_static, 2, at, True), run_ranks(train_static, 2, at, False)
    assert_alike(results)
    for result, other in zip(results, without):
        assert result["skipped"] == 1
        assert (result["causes"][0]["op"], result["causes"][0]["samples"]) == ("aten.sqrt", (5,))
        assert other["causes"] == []
        for name, value in other["state"].items():
            assert torch.equal(result["state"][name], value), name
