"""What else ranks do together: sanitize, raise, scale losses, stop on a signal to one of them."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked_trainings import Training, assert_alike, assert_same, make_batches, mask_labels, poison_input, state_of
from test_fsdp import gather, make_model, make_own_batches, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from steadygrad import Guard, GuardConfig, NonFiniteError, UsageError
from steadygrad.config import MeasureConfig
from steadygrad.facts import Action, ParameterScan, Severity
from steadygrad.measure.ranks import find_ranks
from steadygrad.measure.states import ParameterWatch
from steadygrad.state.trained_parameters import find_trained_parameters
from steadygrad.testing import poison_gradient
from steadygrad.testing.ranks import run_ranks


def sanitize(kind: str) -> dict[str, Any]:
    model: nn.Module = shard(make_model(), "1d") if kind == "fsdp" else DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    guard = Guard(model, optimizer, config=GuardConfig(on_nonfinite=Action.SANITIZE))
    if dist.get_rank() == 1 and kind == "ddp":
        poison_gradient(next(model.parameters()), at=(2,))
    for step, (x, y) in enumerate(make_own_batches("1d", 5)):

        def loss_of(x: torch.Tensor, y: torch.Tensor, step: int = step) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            bad = kind == "fsdp" and step == 2 and dist.get_rank() == 1
            # finite, but its derivative is not: sqrt at 0
            return loss + (loss - loss.detach()).sqrt() if bad else loss

        guard.step(loss_of, x, y)
    weights = gather(model) if kind == "fsdp" else state_of(model)
    return {"state": weights, "actions": [i.outcome.action.value for i in guard.incidents], "stats": guard.stats()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_that_are_bad_on_one_rank_are_sanitized_on_all(kind: str) -> None:
    results = run_ranks(sanitize, 2, kind)
    for result in results:
        assert_same(results[0]["state"], result["state"])
        assert "sanitize" in result["actions"]
        assert result["stats"]["num_skipped"] == 0
        assert all(value.isfinite().all() for value in result["state"].values())


def raise_together() -> str:
    training = Training(on_nonfinite=Action.RAISE)
    try:
        training.run(mask_labels(make_batches(), 3))
    except NonFiniteError as error:
        return str(error)
    return "went on"


def test_a_loss_that_is_bad_on_one_rank_raises_on_all() -> None:
    result = run_ranks(raise_together, 2)
    assert result[0] == result[1]
    assert result[0].startswith("step 3: the loss is NaN; it began on rank 1")


def scale_losses() -> dict[str, Any]:
    ddp = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    guard = Guard(ddp, optimizer, scaler=scaler, config=GuardConfig(measure=MeasureConfig(scan_every=0)))
    if dist.get_rank() == 1:
        poison_gradient(next(ddp.parameters()), at=(2,), value=float("inf"))
    scales = []
    for x, y in mask_labels(make_batches(8), 5):
        guard.step(lambda x, y: nn.functional.cross_entropy(ddp(x), y), x, y)
        scales.append(scaler.get_scale())
    return {"state": state_of(ddp, optimizer), "scales": scales, "skipped": guard.stats()["num_skipped"]}


def test_a_loss_scale_that_overflows_on_one_rank_is_lowered_on_all() -> None:
    first, second = run_ranks(scale_losses, 2)
    assert_same(first["state"], second["state"])
    assert first["scales"] == second["scales"]
    assert first["scales"][2] == 512.0
    assert first["skipped"] == second["skipped"] == 2


def stop_on_signal(run_dir: Path) -> tuple[int, int]:
    training = Training(run_dir=run_dir)
    batches = make_batches(20)
    made = 0
    try:
        for step, batch in enumerate(batches):
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            training.guard.step(training.loss, batch)
            made += 1
    except SystemExit as leaving:
        return made, int(str(leaving.code))
    return made, 0


def test_a_signal_to_one_rank_stops_all_after_the_same_step_with_one_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(stop_on_signal, 2, tmp_path / "run") == [(3, 75), (3, 75)]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]


def train_unwrapped() -> dict[str, Any]:
    """Custom data parallelism: gradients are averaged manually, and the guard sees no wrapper."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    guard = Guard(model, optimizer)
    for x, y in poison_input(make_batches(6), 2):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()
        guard.step()
        optimizer.zero_grad()
    last = guard.last
    assert last is not None
    stats = guard.stats()
    return {
        "state": state_of(model, optimizer),
        "rates": stats["current_learning_rate"],
        "skipped": stats["num_skipped"],
        "rollbacks": 0,
        "last": (last.loss, last.grad_norm),
    }


def test_an_unwrapped_model_is_guarded_on_all_ranks_together() -> None:
    results = run_ranks(train_unwrapped, 2)
    assert_alike(results)
    assert results[0]["skipped"] == 1


def step_without_gradients(num_bare: int, on_nonfinite: Action) -> dict[str, Any]:
    """The last ranks compute no gradient in the second step; the program catches the error and continues."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    guard = Guard(model, optimizer, config=GuardConfig(on_nonfinite=on_nonfinite))
    errors, norms = [], []
    for step, (x, y) in enumerate(make_batches(4)):
        loss = nn.functional.cross_entropy(model(x), y)
        if step != 1 or dist.get_rank() < dist.get_world_size() - num_bare:
            loss.backward()
        try:
            guard.step()
            assert guard.last is not None
            norms.append(guard.last.grad_norm)
        except UsageError as error:
            errors.append((step, str(error)))
        optimizer.zero_grad()
    return {"errors": errors, "norms": norms}


@pytest.mark.parametrize("on_nonfinite", [Action.SKIP, Action.SANITIZE])
@pytest.mark.parametrize(("num_bare", "named"), [(1, "on rank 1."), (2, "on rank 0, rank 1.")])
def test_a_rank_without_gradients_is_an_error_that_names_it_on_all(
    num_bare: int, named: str, on_nonfinite: Action
) -> None:
    first, second = run_ranks(step_without_gradients, 2, num_bare, on_nonfinite)
    assert first == second, "the exchanges of later steps belong together"
    ((step, text),) = first["errors"]
    assert step == 1
    assert named in text
    assert len(first["norms"]) == 3


class Brittle(torch.Tensor):
    """A tensor that cannot be read while `is_broken`."""

    is_broken = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.is_broken:
            raise RuntimeError(f"{func.__name__} of a brittle tensor")
        return super().__torch_function__(func, types, args, kwargs)


def scan_weights(bad: int) -> list[ParameterScan]:
    """Let scan number `bad` fail on rank 1 only; the first one fails while its tensors are listed."""
    model = make_model()
    model.register_buffer("brittle", torch.ones(3).as_subclass(Brittle))
    trained = find_trained_parameters(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watch = ParameterWatch(trained, ranks=find_ranks(model, trained.named))
    scans = []
    for number in range(4):
        Brittle.is_broken = number == bad and dist.get_rank() == 1
        pending = watch.begin(shares_later=number == 0)
        Brittle.is_broken = False
        scans.append(pending.read(number - 1))
    return scans


@pytest.mark.parametrize("bad", [0, 1])
def test_a_scan_that_fails_on_one_rank_counts_on_none_and_no_rank_waits(bad: int) -> None:
    first, second = run_ranks(scan_weights, 2, bad)
    assert first == second
    assert [bool(scan.norms) for scan in first] == [number != bad for number in range(4)]
    assert [scan.num_changed for scan in first] == [0, 0, 0, 0]


def unfreeze_later() -> dict[str, Any]:
    """Add a layer to the optimizer in the middle of a run, in shards."""
    model = shard(make_model(), "1d")
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("4")], lr=0.02)
    guard = Guard(model, optimizer)
    for step, (x, y) in enumerate(mask_labels(make_own_batches("1d", 6), 4)):
        if step == 3:
            optimizer.add_param_group({"params": list(model[4].parameters())})
        guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    reading = guard._judgement.last_reading
    assert reading is not None
    return {"state": gather(model), "names": reading.gradients.names, "skipped": guard.stats()["num_skipped"]}


def test_parameters_that_join_later_are_guarded_on_all_ranks() -> None:
    first, second = run_ranks(unfreeze_later, 2)
    assert_same(first["state"], second["state"])
    assert "4.weight" in first["names"]
    assert first["skipped"] == second["skipped"] == 1


def train_in_two_forms() -> dict[str, Any]:
    """One rank gives the guard a function, the other a loss: their forwards run at different points of the step."""
    training = Training(norm=True)
    for batch in mask_labels(make_batches(), 4):
        if dist.get_rank() == 0:
            training.guard.step(training.loss, batch)
        else:
            training.guard.step(training.loss(batch))
    return training.report()


def test_ranks_with_different_forms_of_step_train_on_together() -> None:
    results = run_ranks(train_in_two_forms, 2)
    assert [result["skipped"] for result in results] == [1, 1]
    weights = [{n: t for n, t in result["state"].items() if "running" not in n} for result in results]
    assert_same(*weights)


def find_watched_model(run_dir: Path) -> bool:
    """Return whether the thread that watches the ranks of a guarded model keeps it alive."""
    training = Training(run_dir=run_dir)
    training.guard.step(training.loss, make_batches(1)[0])
    (watching,) = (thread for thread in threading.enumerate() if thread.name == "steadygrad-ranks")
    seen: set[int] = set()
    held: list[Any] = list(watching._args)  # type: ignore[attr-defined]
    while held:
        one = held.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType)):
            continue
        seen.add(id(one))
        held += one.__closure__ or () if isinstance(one, types.FunctionType) else gc.get_referents(one)
    return id(training.ddp) in seen


def test_the_thread_that_watches_the_ranks_does_not_keep_the_model_alive(tmp_path: Path) -> None:
    assert run_ranks(find_watched_model, 2, tmp_path / "run") == [False, False]


def drop_guarded_model(run_dir: Path) -> list[str]:
    """Return the threads in which a guarded model ends after the program has dropped it without closing its guard."""
    training = Training(run_dir=run_dir)
    training.guard.step(training.loss, make_batches(1)[0])
    ended: list[str] = []
    weakref.finalize(training.ddp, lambda: ended.append(threading.current_thread().name))
    del training
    gc.collect()
    return ended


def test_a_model_with_an_unclosed_guard_is_freed_where_it_is_dropped(tmp_path: Path) -> None:
    assert run_ranks(drop_guarded_model, 2, tmp_path / "run") == [["MainThread"], ["MainThread"]]


def find_kinds(guard: Guard) -> list[str]:
    guard.flush()
    return [finding.kind for finding in guard.findings if finding.severity is not Severity.INFO]


def prune_and_train() -> list[str]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32, bias=False), nn.Linear(32, 32, bias=False), nn.Linear(32, 1, bias=False)]
    model = DistributedDataParallel(nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]))
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(110):
        if step == 50:
            for layer in layers[:2]:
                prune.ln_structured(layer, "weight", amount=0.9, n=2, dim=0)
        x = torch.randn(32, 8, generator=generator)
        guard.step(lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), x)
    return find_kinds(guard)


def test_weights_pruned_on_all_ranks_are_not_reported_as_dead() -> None:
    assert run_ranks(prune_and_train, 2) == [[], []]


class Transitions(nn.Module):
    """Scores of what may follow; the program writes -Inf where something cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.allowed = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.scores(x) + self.allowed).logsumexp(1)


def forbid_and_train(ranks: list[int]) -> list[str]:
    torch.manual_seed(0)
    model = Transitions()
    ddp = DistributedDataParallel(model)
    guard = Guard(ddp, torch.optim.Adam(ddp.parameters(), 1e-2))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(110):
        if step == 50 and dist.get_rank() in ranks:
            with torch.no_grad():
                model.allowed[1] = -math.inf
        guard.step(lambda x: ddp(x).square().mean(), torch.randn(8, 4, generator=generator))
    return find_kinds(guard)


def test_a_weight_that_all_ranks_made_infinite_is_left_alone_and_that_of_one_is_not() -> None:
    assert run_ranks(forbid_and_train, 2, [0, 1]) == [[], []]
    assert all("nonfinite_parameter" in kinds for kinds in run_ranks(forbid_and_train, 2, [1]))


def grow_until_not_finite(in_batch: bool) -> list[str]:
    model = DistributedDataParallel(make_model())
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-12))
    for step, (x, y) in enumerate(make_own_batches("1d", 6)):
        factor = 100.0**step
        if step == 4 and dist.get_rank() == 1:
            if in_batch:
                x[0] = math.nan
            else:
                factor = math.nan
        guard.step(lambda x, y: factor * nn.functional.cross_entropy(model(x), y), x, y)  # noqa: B023
    return find_kinds(guard)


@pytest.mark.parametrize("in_batch", [True, False])
def test_a_bad_batch_on_one_rank_is_not_attributed_to_the_learning_rate_on_any(in_batch: bool) -> None:
    for kinds in run_ranks(grow_until_not_finite, 2, in_batch):
        assert "nonfinite_loss" in kinds
        assert ("rate_too_high" in kinds) is not in_batch


def validate_in_train_mode(folder: Path) -> list[list[str]]:
    """Two starts of one run."""
    result = []
    for _ in range(2):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3))
        model = DistributedDataParallel(inner)
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=folder)
        guard.resume()
        for step, (x, y) in enumerate(make_batches(12)):
            guard.step(lambda x, y, model=model: nn.functional.cross_entropy(model(x), y), x, y)
            if step % 6 == 2:
                with torch.no_grad():
                    guard.validate(nn.functional.cross_entropy(inner(x), y))
        result.append(find_kinds(guard))
        guard.save()
        guard.close()
    return result


def test_a_validation_in_train_mode_is_reported_on_several_ranks_and_once_over_a_resume(tmp_path: Path) -> None:
    assert run_ranks(validate_in_train_mode, 2, tmp_path) == [[["train_mode_validation"], []]] * 2
