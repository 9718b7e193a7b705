"""The paired test on ranks: all take part or none, all get the same answer, and each is left as it was, bit for bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranked_trainings import assert_same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from steadygrad import Guard, GuardConfig, ProveConfig
from steadygrad.diagnose.replay import is_replaying
from steadygrad.facts import Proof
from steadygrad.prove.comparison import Comparison
from steadygrad.state.shards import take_local
from steadygrad.testing.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")
KINDS = ("ddp", "fsdp")
HARM, STEPS = 60, 100


class Loop:
    """A regression that learns on several ranks, each with data of its own."""

    def __init__(self, kind: str, *, enabled: bool = True, **config: Any) -> None:
        torch.manual_seed(0)
        random.seed(dist.get_rank())
        numpy.random.seed(dist.get_rank())
        layers = (nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 1))
        self.inner = nn.Sequential(*layers)
        self.model: Any = DistributedDataParallel(self.inner) if kind == "ddp" else _shard(self.inner)
        torch.manual_seed(50 + dist.get_rank())  # dropout of each rank's own
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.5)
        self.guard = Guard(self.model, self.optimizer, config=GuardConfig(**{"clip": None, **config}), enabled=enabled)
        self.proofs: list[Proof] = []

    def make_batch(self, step: int, *, moved: bool = False) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
        y = x.sum(1, keepdim=True)
        return x, 20 * y.roll(1, 0) if moved else y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = random.random() + numpy.random.random() + float(torch.rand(()))
        return F.mse_loss(self.model(x + 1e-3 * noise), y)

    def harm(self) -> None:
        """As bad memory does it: no version counter moves."""
        take_local(self.inner[-1].weight).data *= 100  # type: ignore[arg-type]

    def train(
        self,
        step: Callable[[int], Any] | None = None,
        *,
        harmed_ranks: tuple[int, ...] = (0, 1),
        moves_at: int = STEPS,
        num_steps: int = STEPS,
    ) -> dict[str, Any]:
        with self._watched():
            for number in range(num_steps):
                if number == HARM and dist.get_rank() in harmed_ranks:
                    self.harm()
                if step is not None:
                    step(number)
                else:
                    self.guard.step(self.loss, *self.make_batch(number, moved=number >= moves_at))
            self.guard.flush()
        return self.tell()

    def tell(self) -> dict[str, Any]:
        findings = [f for f in self.guard.findings if f.kind == "loss_explosion"]
        return {
            "state": self.take_state(whole=True),
            "findings": [(f.step, f.severity.value, f.evidence.get("proof"), f.message) for f in findings],
            "done": [i.outcome.action.value for i in self.guard.incidents if i.outcome.action.value != "none"],
            "after": [i.outcome.after.get("step") for i in self.guard.incidents if i.outcome.action == "rollback"],
            "proofs": self.proofs,
            "loss": None if self.guard.last is None else self.guard.last.loss,
        }

    def take_state(self, *, whole: bool = False) -> dict[str, Tensor]:
        """Weights, moments and, where each rank's own is asked for, buffers and gradients."""
        named = list(self.model.named_parameters())
        if whole:
            full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}
            return {n: p.detach().clone() for n, p in full.items()}
        state = {n: take_local(p).detach().clone() for n, p in named}
        state |= {f"buffer {n}": b.clone() for n, b in self.model.named_buffers()}
        state |= {f"gradient {n}": take_local(p.grad).clone() for n, p in named if p.grad is not None}
        state |= {f"version {n}": torch.tensor(p._version) for n, p in named}
        for number, kept in self.optimizer.state_dict()["state"].items():
            tensors = {n: v for n, v in kept.items() if isinstance(v, Tensor)}
            state |= {f"{number}.{n}": take_local(v).clone() for n, v in tensors.items()}
        return {**state, "random": torch.get_rng_state()}

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Every test must leave this rank as it was."""
        methods = {name: getattr(Comparison, name) for name in ("compare", "compare_batch")}

        def watch(method: Any) -> Any:
            def watched(comparison: Comparison, *args: Any, **kwargs: Any) -> Proof:
                state, others = self.take_state(), (random.getstate(), str(numpy.random.get_state()))
                proof: Proof = method(comparison, *args, **kwargs)
                assert_same(state, self.take_state(), f"rank {dist.get_rank()} after a test")
                assert others == (random.getstate(), str(numpy.random.get_state()))
                self.proofs.append(proof)
                return proof

            return watched

        try:
            for name, method in methods.items():
                setattr(Comparison, name, watch(method))
            yield
        finally:
            for name, method in methods.items():
                setattr(Comparison, name, method)


def _shard(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)  # the last layer's group stays gathered after a forward


def assert_agreed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks have the same weights, findings, proofs and actions; those of the first."""
    for result in results[1:]:
        assert_same(results[0]["state"], result["state"])
        for key in ("findings", "done", "after", "proofs", "loss"):
            assert results[0][key] == result[key], key
    return results[0]


def train_harmed(kind: str, harmed_ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return Loop(kind).train(harmed_ranks=harmed_ranks)


@pytest.mark.parametrize(("kind", "harmed_ranks"), [("ddp", (0,)), ("fsdp", (0, 1))])
def test_harm_is_proven_and_rolled_back_alike_on_all_ranks(kind: str, harmed_ranks: tuple[int, ...]) -> None:
    told = assert_agreed(run_ranks(train_harmed, 2, kind, harmed_ranks))
    ((step, severity, proof, message),) = told["findings"]
    assert (step, severity, proof) == (HARM, "error", "damaged")
    assert "on the last 8 batches the weights of step" in message
    assert told["done"] == ["rollback"]
    assert told["after"][0] <= HARM
    assert told["loss"] < 2.0


def train_on_moved_targets(kind: str, enabled: bool) -> dict[str, Any]:
    return Loop(kind, enabled=enabled).train(harmed_ranks=(), moves_at=HARM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_data_leaves_the_weights_of_the_unguarded_run(kind: str) -> None:
    told = assert_agreed(run_ranks(train_on_moved_targets, 2, kind, True))
    plain = run_ranks(train_on_moved_targets, 2, kind, False)[0]
    assert [(severity, proof) for _, severity, proof, _ in told["findings"]] == [("info", "unharmed")]
    assert told["done"] == []
    assert told["proofs"]
    assert_same(plain["state"], told["state"])


def train_in_microbatches(kind: str) -> dict[str, Any]:
    """Two microbatches a step; gradients travel with the second."""
    loop = Loop(kind, autocast="bf16")

    def run(number: int) -> None:
        for half in range(2):
            silent = half == 0
            if kind == "fsdp":
                loop.model.set_requires_gradient_sync(not silent)
            with loop.model.no_sync() if silent and kind == "ddp" else contextlib.nullcontext():
                loop.guard.backward(lambda x, y: loop.loss(x, y) / 2, *loop.make_batch(2 * number + half))
        loop.guard.step()

    return loop.train(run)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_without_synchronising_and_autocast_are_tested_too(kind: str) -> None:
    told = assert_agreed(run_ranks(train_in_microbatches, 2, kind))
    assert [proof for _, _, proof, _ in told["findings"]] == ["damaged"]
    assert told["done"] == ["rollback"]


# --- what one rank alone runs into ----------------------------------------------------------------------------------


class Sealed(dict[str, Any]):
    """Fails whoever looks into it."""

    def values(self) -> Any:
        raise RuntimeError("sealed")


class Oddity:
    """What rank 1 does that rank 0 does not; `run` makes one step there."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.kept = loop, []  # type: ignore[var-annotated]
        self.drawn = iter(range(10 * STEPS))

    def draws_from_an_iterator(self, number: int) -> None:
        drawn, loop = self.drawn, self.loop
        loop.guard.step(lambda: loop.loss(*loop.make_batch(next(drawn))))

    def keeps_what_it_saw(self, number: int) -> None:
        kept, loop = self.kept, self.loop

        def fn(x: Tensor, y: Tensor) -> Tensor:
            kept.append(float(x.mean()))
            return loop.loss(x, y)

        loop.guard.step(fn, *loop.make_batch(number))

    def raises_in_a_replay(self, number: int) -> None:
        loop = self.loop

        def fn(x: Tensor, y: Tensor) -> Tensor:
            loss = loop.loss(x, y)
            if is_replaying():
                raise ValueError("not again")
            return loss

        loop.guard.step(fn, *loop.make_batch(number))

    def holds_what_cannot_be_read(self, number: int) -> None:
        loop, sealed = self.loop, Sealed()
        loop.guard.step(lambda x, y: loop.loss(x, y) + 0.0 * len(sealed), *loop.make_batch(number))

    def overwrites_its_batch(self, number: int) -> None:
        x, y = self.loop.make_batch(number)
        self.loop.guard.step(self.loop.loss, x, y)
        x.zero_()

    def changes_its_weights(self, number: int) -> None:
        if number == HARM - 2:
            with torch.no_grad():
                take_local(self.loop.inner[-1].bias).add_(0.0)  # type: ignore[arg-type]
                self.loop.inner[-1].bias.add_(0.0)  # type: ignore[union-attr, operator]
        self.loop.guard.step(self.loop.loss, *self.loop.make_batch(number))

    def has_no_room(self, number: int) -> None:
        loop, large = self.loop, torch.zeros(1 << 16)
        loop.guard.step(lambda x, y, _: loop.loss(x, y), *loop.make_batch(number), large)


def train_with_oddity(kind: str, name: str) -> dict[str, Any]:
    loop = Loop(kind, prove=ProveConfig(max_bytes=1 << 18))  # room for three of the large batches
    odd = getattr(Oddity(loop), name) if dist.get_rank() == 1 else None
    return loop.train(odd)


# How ranks agree does not depend on how the model is spread: each oddity on one kind. Those of the weights and of the
# replay, which meet shards, are on shards.
ODDITIES = {
    "draws_from_an_iterator": ("ddp", "cannot be run again"),
    "keeps_what_it_saw": ("ddp", "keeps its own state"),
    "raises_in_a_replay": ("fsdp", "not again"),
    "holds_what_cannot_be_read": ("ddp", "sealed cannot be read"),
    "overwrites_its_batch": ("ddp", "changed in place"),
    "changes_its_weights": ("fsdp", "the program changed the weights itself"),
}


@pytest.mark.parametrize("name", ODDITIES)
def test_what_one_rank_cannot_do_none_does(name: str) -> None:
    kind, reason = ODDITIES[name]
    told = assert_agreed(run_ranks(train_with_oddity, 2, kind, name))
    ((_, _, proof, message),) = told["findings"]
    assert proof == "unknown"
    assert reason in message
    assert told["done"] == []


def test_a_rank_that_has_room_for_fewer_batches_leaves_as_many_to_all() -> None:
    told = assert_agreed(run_ranks(train_with_oddity, 2, "ddp", "has_no_room"))
    assert told["done"] == ["rollback"]
    assert {len(proof.now) for proof in told["proofs"]} == {1, 3}


def forget_the_start_on_one_rank(kind: str) -> dict[str, Any]:
    loop = Loop(kind)

    def run(number: int) -> None:
        if number == HARM and dist.get_rank() == 1:
            loop.guard._rollback.snapshots._ring.initial = (
                None  # as where a shard's host memory was needed for newer ones
            )
        loop.guard.step(loop.loss, *loop.make_batch(number))

    return loop.train(run)


def test_initial_weights_that_one_rank_has_no_more_are_used_by_none() -> None:
    told = assert_agreed(run_ranks(forget_the_start_on_one_rank, 2, "fsdp"))
    assert told["done"] == ["rollback"]


# --- uneven inputs --------------------------------------------------------------------------------------------------


def train_unevenly(harm_inside: bool) -> dict[str, Any]:
    """Rank 1 has fewer batches in the first pass; in the second both have as many."""
    loop = Loop("ddp")
    # 60: ranks that went on counting for themselves would come to the scan at step 100 at different times.
    num_steps = 120 if harm_inside else 60
    with loop.guard.join():
        for number in range(num_steps - 8 * dist.get_rank()):
            if harm_inside and number == num_steps - 40:
                loop.harm()
            loop.guard.step(loop.loss, *loop.make_batch(number))
    for number in range(0 if harm_inside else 60):
        if number == 40:
            loop.harm()
        loop.guard.step(loop.loss, *loop.make_batch(number))
    loop.guard.flush()
    return loop.tell()


@pytest.mark.parametrize(
    ("harm_inside", "reason"), [(True, "a rank may have no more data"), (False, "different numbers of steps")]
)
def test_ranks_that_run_out_of_data_at_different_steps_are_not_waited_for(harm_inside: bool, reason: str) -> None:
    results = run_ranks(train_unevenly, 2, harm_inside)
    for result in results:
        assert result["done"] == []
        assert all(reason in message for _, _, _, message in result["findings"])
    assert any(result["findings"] for result in results)
