"""If no rank can replay a step alone, all do so together: the cause names rank and sample, and no rank hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_trainings import assert_same
from test_fsdp import gather, make_model, make_own_batches, shard
from torch import Tensor, nn

from steadygrad import DiagnoseConfig, Guard, GuardConfig
from steadygrad.diagnose.meeting import CollectiveError, Meeting
from steadygrad.testing.ranks import run_ranks

NUM_STEPS = 5
BAD_STEP = 3


class Sharded:
    """A guarded training of a sharded model in which one rank gets a bad sample."""

    def __init__(self, layout: str, *, enabled: bool = True) -> None:
        self.model = shard(make_model(16 if layout == "tensor" else 15), layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        config = GuardConfig(diagnose=DiagnoseConfig(enabled=enabled))
        self.guard = Guard(self.model, self.optimizer, config=config)
        self.layout, self.replays = layout, 0

    def run(self, loss: Any, *, ranks: tuple[int, ...] = (1,), spoil: float = -1000.0) -> dict[str, Any]:
        batches = make_own_batches(self.layout, NUM_STEPS)
        if dist.get_rank() in ranks:
            batches[BAD_STEP][0][5, 0] = spoil
        for x, y in batches:
            self.guard.step(loss, x, y)
        causes = [i.cause for i in self.guard.incidents if i.cause is not None]
        return {
            "weights": gather(self.model),
            "skipped": self.guard.stats()["num_skipped"],
            "causes": [{"op": c.op, "source": c.source, "samples": c.samples, "note": c.note} for c in causes],
        }

    def take_root(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x), y) + (x[:, 0] + 100).sqrt().mean()

    def take_root_of_zero(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a finite value whose derivative is not finite for a marked sample."""
        out = self.model(x)
        marked = (x[:, :1] > -500).float()
        return nn.functional.cross_entropy(out, y) + (out * marked).square().sum(1).sqrt().mean()


def train_with_bad_loss(layout: str, enabled: bool = True) -> dict[str, Any]:
    training = Sharded(layout, enabled=enabled)
    return training.run(training.take_root, ranks=(2, 3) if layout == "tensor" else (1,))


@pytest.mark.parametrize(("layout", "num_ranks", "rank"), [("1d", 2, 1), ("bf16", 2, 1), ("tensor", 4, 2)])
def test_the_bad_line_and_sample_of_a_sharded_step_are_named_without_a_trace(
    layout: str, num_ranks: int, rank: int
) -> None:
    results = run_ranks(train_with_bad_loss, num_ranks, layout)
    without = run_ranks(train_with_bad_loss, num_ranks, layout, False)
    for result, other in zip(results, without):
        assert result["skipped"] == 1
        (cause,) = result["causes"]
        assert (cause["op"], cause["samples"]) == ("aten.sqrt", (5,))
        assert "sqrt().mean()" in cause["source"]
        assert cause["note"].startswith(f"Replayed on rank {rank}.")
        assert other["causes"] == []
        assert_same(result["weights"], other["weights"])


def train_with_bad_gradient(enabled: bool = True) -> dict[str, Any]:
    training = Sharded("1d", enabled=enabled)
    return training.run(training.take_root_of_zero)


def test_a_derivative_that_is_not_finite_is_found_in_a_replayed_backward_of_shards() -> None:
    results, without = run_ranks(train_with_bad_gradient, 2), run_ranks(train_with_bad_gradient, 2, False)
    for result, other in zip(results, without):
        assert result["skipped"] == 1
        assert result["causes"][0]["op"] == "aten.sqrt"
        assert result["causes"][0]["note"].startswith("Replayed on rank 1.")
        assert result["causes"][0]["samples"] == (5,)
        assert_same(result["weights"], other["weights"])


class Once(Sharded):
    """Its step raises between two layers when rank 0 replays it, while the others are in the middle of a forward."""

    def take_root_once(self, x: Tensor, y: Tensor) -> Tensor:
        from steadygrad.diagnose import is_replaying

        if is_replaying() and dist.get_rank() == 0:
            self.model[1].forward = self.refuse  # type: ignore[method-assign]
        try:
            return self.take_root(x, y)
        finally:
            vars(self.model[1]).pop("forward", None)

    def refuse(self, x: Tensor) -> Tensor:
        raise RuntimeError("this can be run once only")


def train_once(enabled: bool = True) -> dict[str, Any]:
    # Allocated memory is then NaN: what other ranks have not filled must not look like a value of the step.
    torch.use_deterministic_algorithms(True, warn_only=True)
    training = Once("1d", enabled=enabled)
    return training.run(training.take_root_once)


def test_no_rank_waits_for_one_whose_replay_raises_in_mid_forward() -> None:
    results = run_ranks(train_once, 2, time_limit_seconds=300)
    without = run_ranks(train_once, 2, False)
    for result, other in zip(results, without):
        assert result["skipped"] == 1
        assert "failed on another rank" in result["causes"][0]["note"]
        assert_same(result["weights"], other["weights"])


class Flipped(Sharded):
    """A bit that flips on one rank in the step itself, and never in a replay."""

    def flip(self, x: Tensor, y: Tensor) -> Tensor:
        from steadygrad.diagnose import is_replaying

        loss = nn.functional.cross_entropy(self.model(x), y)
        return loss if is_replaying() or float(x[5, 0]) != -1000.0 else loss * torch.nan


def train_flipped() -> dict[str, Any]:
    training = Flipped("1d")
    return training.run(training.flip)


def test_a_rank_whose_replay_is_healthy_is_named_with_its_host_and_device() -> None:
    for result in run_ranks(train_flipped, 2):
        note = result["causes"][0]["note"]
        assert note.startswith("Replayed on rank 1, host ")
        assert "device cpu (CPU)" in note
        assert "suspect the hardware" in note


# --- the meeting ------------------------------------------------------------------------------------------------------


def meet() -> list[str]:
    """Rank 0 makes two collectives and raises, rank 1 wants three; then both make different ones."""

    def exchange(word: Any) -> list[Any]:
        words: list[Any] = [None, None]
        dist.all_gather_object(words, word)
        return words

    meeting, errors = Meeting(exchange), []
    for names in (["a", "b"], ["a", "b", "b"]) if dist.get_rank() == 0 else (["a", "b", "b"], ["a", "c", "c"]):
        meeting.begin()
        failed = False
        try:
            for name in names:
                meeting.before_call(name)
        except CollectiveError as error:
            errors.append(str(error))
            failed = True
        meeting.finish(failed=failed or (len(names) == 2))
    return errors


def test_ranks_give_up_together_if_one_fails_or_their_collectives_differ() -> None:
    first, second = run_ranks(meet, 2, time_limit_seconds=300)
    assert first == ["the replay was given up: the ranks are at different places of it"]
    assert second == [
        "the replay was given up: it failed on another rank",
        "the replay was given up: the ranks are at different places of it",
    ]


def train_microbatches(bad: int) -> dict[str, Any]:
    """Train with two microbatches per step; in one step, microbatch `bad` of rank 1 has a NaN loss."""
    training = Sharded("1d")
    batches = make_own_batches("1d", 8)
    if dist.get_rank() == 1:
        batches[4 + bad][0][5, 0] = -1000.0
    for first in range(0, 8, 2):
        for x, y in batches[first : first + 2]:
            training.guard.backward(training.take_root, x, y)
        training.guard.step()
    causes = [incident.cause for incident in training.guard.incidents]
    return {
        "skipped": training.guard.stats()["num_skipped"],
        "causes": [(c.op, c.note) for c in causes if c is not None],
    }


@pytest.mark.parametrize("bad", [0, 1])
def test_ranks_that_replay_together_stop_after_the_same_microbatch(bad: int) -> None:
    for result in run_ranks(train_microbatches, 2, bad, time_limit_seconds=300):
        note = f"Replayed on rank 1. In microbatch {bad} of 2, counted from 0."
        assert result == {"skipped": 1, "causes": [("aten.sqrt", note)]}
