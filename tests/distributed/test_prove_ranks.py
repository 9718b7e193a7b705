"""The paired test on ranks: all take part or none, all get the same answer, and each is unchanged, bit for bit."""

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
    """A regression that learns on several ranks, each with its own data."""

    def __init__(self, kind: str, *, enabled: bool = True, **config: Any) -> None:
        torch.manual_seed(0)
        random.seed(dist.get_rank())
        numpy.random.seed(dist.get_rank())
        layers = (nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 1))
        self.inner = nn.Sequential(*layers)
        self.model: Any = DistributedDataParallel(self.inner) if kind == "ddp" else _shard(self.inner)
        torch.manual_seed(50 + dist.get_rank())  # each rank's own dropout
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
        """Damage a weight like bad memory: no version counter changes."""
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
        return self.report()

    def report(self) -> dict[str, Any]:
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
        """Return weights, moments and, for each rank's own state, buffers and gradients."""
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
        """Check that every test leaves this rank unchanged."""
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
    return fully_shard(model, mesh=mesh)  # the group of the last layer stays gathered after a forward


def assert_agreed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Assert that all ranks have the same weights, findings, proofs and actions; return those of the first."""
    for result in results[1:]:
        assert_same(results[0]["state"], result["state"])
        for key in ("findings", "done", "after", "proofs", "loss"):
            assert results[0][key] == result[key], key
    return results[0]


def train_harmed(kind: str, harmed_ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return Loop(kind).train(harmed_ranks=harmed_ranks)


@pytest.mark.parametrize(("kind", "harmed_ranks"), [("ddp", (0,)), ("fsdp", (0, 1))])
def test_damage_is_proven_and_rolled_back_the_same_on_all_ranks(kind: str, harmed_ranks: tuple[int, ...]) -> None:
    result = assert_agreed(run_ranks(train_harmed, 2, kind, harmed_ranks))
    ((step, severity, proof, message),) = result["findings"]
    assert (step, severity, proof) == (HARM, "error", "damaged")
    assert "on the last 8 batches the weights of step" in message
    assert result["done"] == ["rollback"]
    assert result["after"][0] <= HARM
    assert result["loss"] < 2.0


def train_on_moved_targets(kind: str, enabled: bool) -> dict[str, Any]:
    return Loop(kind, enabled=enabled).train(harmed_ranks=(), moves_at=HARM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_the_data_leaves_the_weights_of_the_unguarded_run(kind: str) -> None:
    result = assert_agreed(run_ranks(train_on_moved_targets, 2, kind, True))
    plain = run_ranks(train_on_moved_targets, 2, kind, False)[0]
    assert [(severity, proof) for _, severity, proof, _ in result["findings"]] == [("info", "unharmed")]
    assert result["done"] == []
    assert result["proofs"]
    assert_same(plain["state"], result["state"])


def train_in_microbatches(kind: str) -> dict[str, Any]:
    """Train with two microbatches per step; gradients are exchanged with the second."""
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
def test_accumulation_without_synchronising_and_with_autocast_is_tested_too(kind: str) -> None:
    result = assert_agreed(run_ranks(train_in_microbatches, 2, kind))
    assert [proof for _, _, proof, _ in result["findings"]] == ["damaged"]
    assert result["done"] == ["rollback"]


# --- obstacles on one rank ------------------------------------------------------------------------------------------


class Sealed(dict[str, Any]):
    """Raises when inspected."""

    def values(self) -> Any:
        raise RuntimeError("sealed")


class Oddity:
    """Obstacles that only rank 1 has; `run` takes one step with one."""

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
    loop = Loop(kind, prove=ProveConfig(max_bytes=1 << 18))  # space for three of the large batches
    odd = getattr(Oddity(loop), name) if dist.get_rank() == 1 else None
    return loop.train(odd)


# Agreement does not depend on how the model is distributed, so each obstacle is tested on one kind; those in weights
# and replay, which involve shards, on shards.
ODDITIES = {
    "draws_from_an_iterator": ("ddp", "cannot be run again"),
    "keeps_what_it_saw": ("ddp", "keeps its own state"),
    "raises_in_a_replay": ("fsdp", "not again"),
    "holds_what_cannot_be_read": ("ddp", "sealed cannot be read"),
    "overwrites_its_batch": ("ddp", "changed in place"),
    "changes_its_weights": ("fsdp", "the program changed the weights itself"),
}


@pytest.mark.parametrize("name", ODDITIES)
def test_if_one_rank_cannot_test_none_does(name: str) -> None:
    kind, reason = ODDITIES[name]
    result = assert_agreed(run_ranks(train_with_oddity, 2, kind, name))
    ((_, _, proof, message),) = result["findings"]
    assert proof == "unknown"
    assert reason in message
    assert result["done"] == []


def test_all_ranks_use_as_few_batches_as_the_rank_with_least_memory() -> None:
    result = assert_agreed(run_ranks(train_with_oddity, 2, "ddp", "has_no_room"))
    assert result["done"] == ["rollback"]
    assert {len(proof.now) for proof in result["proofs"]} == {1, 3}


def forget_the_start_on_one_rank(kind: str) -> dict[str, Any]:
    loop = Loop(kind)

    def run(number: int) -> None:
        if number == HARM and dist.get_rank() == 1:
            loop.guard._rollback.snapshots._ring.initial = None  # as if a shard's host memory was needed for newer ones
        loop.guard.step(loop.loss, *loop.make_batch(number))

    return loop.train(run)


def test_initial_weights_that_one_rank_no_longer_has_are_not_used() -> None:
    result = assert_agreed(run_ranks(forget_the_start_on_one_rank, 2, "fsdp"))
    assert result["done"] == ["rollback"]


# --- uneven inputs --------------------------------------------------------------------------------------------------


def train_unevenly(harm_inside: bool) -> dict[str, Any]:
    """Train with fewer batches on rank 1 in the first epoch; in the second both have as many."""
    loop = Loop("ddp")
    # 60: ranks with their own counts would reach the scan at step 100 at different times.
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
    return loop.report()


@pytest.mark.parametrize(
    ("harm_inside", "reason"), [(True, "a rank may have no more data"), (False, "different numbers of steps")]
)
def test_no_rank_waits_for_those_that_run_out_of_data_earlier(harm_inside: bool, reason: str) -> None:
    results = run_ranks(train_unevenly, 2, harm_inside)
    for result in results:
        assert result["done"] == []
        assert all(reason in message for _, _, _, message in result["findings"])
    assert any(result["findings"] for result in results)
