"""What Guard does about a bad step besides skipping it: it replays it, names the cause and keeps the batch."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Action, DiagnoseConfig, Guard, GuardConfig, Policy, TrainingHalted
from steadygrad.act.call_listener import CallListener
from steadygrad.diagnose.quarantine import load_batch
from steadygrad.testing.faults import corrupt_weight


class Net(nn.Module):
    """Divides by the spread of a row, which is 0 for a constant row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        spread = x.var(1, keepdim=True).sqrt()
        return self.head(self.drop(self.norm(self.inner(x)))) / spread  # culprit


CULPRIT = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# culprit"))


def make(run_dir: Path | None = None, **settings: Any) -> tuple[Net, Guard]:
    torch.manual_seed(0)
    model = Net()
    config = GuardConfig(diagnose=DiagnoseConfig(**settings), policy=Policy.patient())
    return model, Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config=config, run_dir=run_dir)


def batch(*, bad: bool) -> Tensor:
    x = torch.randn(8, 4)
    if bad:
        x[5] = 1.0
    return x


def loss_of(model: nn.Module) -> Any:
    return lambda x: model(x).square().mean()


def causes(guard: Guard) -> list[int]:
    return sorted({incident.step for incident in guard.incidents if incident.cause is not None})


def test_the_incident_names_op_line_module_and_sample() -> None:
    model, guard = make()
    for i in range(4):
        guard.step(loss_of(model), batch(bad=i == 2))

    cause = guard.incidents[0].cause
    assert cause is not None
    assert cause.step == 2
    assert (cause.op, cause.module, cause.line, cause.samples) == ("aten.div", "", CULPRIT, (5,))


def test_a_replay_does_not_change_the_training() -> None:
    weights = []
    for enabled in (True, False):
        model, guard = make(enabled=enabled)
        for i in range(6):
            guard.step(loss_of(model), batch(bad=i in (1, 4)))
        assert bool(causes(guard)) == enabled
        weights.append([t.clone() for t in model.state_dict().values()])

    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_a_step_from_a_loss_is_traced_into_the_models_forward() -> None:
    model, guard = make()
    guard.step(model(batch(bad=True)).square().mean())

    cause = guard.incidents[0].cause
    assert cause is not None
    assert (cause.op, cause.line) == ("aten.div", CULPRIT)
    assert "give guard.step the function" in cause.note


def test_the_bad_microbatch_is_reported_and_kept(tmp_path: Path) -> None:
    model, guard = make(tmp_path)
    given = [batch(bad=i == 1) for i in range(3)]
    for x in given:
        guard.backward(loss_of(model), x)
    guard.step()

    cause = guard.incidents[0].cause
    assert cause is not None
    assert "microbatch 1 of 3" in cause.note
    assert cause.batch is not None
    assert torch.equal(load_batch(tmp_path / cause.batch).args[0], given[1])


def test_a_run_that_always_fails_is_replayed_rarely() -> None:
    model, guard = make(first=2, cooldown=10)
    for _ in range(25):
        guard.step(loss_of(model), batch(bad=True))

    steps = causes(guard)
    assert steps[:2] == [0, 1]
    assert len(steps) == 4
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(steps[1:]))


def test_with_diagnosis_off_nothing_is_kept_and_no_hook_is_set(tmp_path: Path) -> None:
    model, guard = make(tmp_path, enabled=False)
    guard.step(loss_of(model), batch(bad=True))

    assert causes(guard) == []
    listeners = [hook for _, hook in model._forward_pre_hooks.items() if isinstance(hook, CallListener)]
    assert len(listeners) == 3  # for buffers, other losses, and actions of the program
    assert not (tmp_path / "batches").exists()


def test_batches_are_not_kept_if_disabled(tmp_path: Path) -> None:
    model, guard = make(tmp_path, keep_batches=False)
    guard.step(loss_of(model), batch(bad=True))

    assert causes(guard) == [0]
    assert not (tmp_path / "batches").exists()


def test_the_cause_is_in_the_record(tmp_path: Path) -> None:
    model, guard = make(tmp_path)
    guard.step(loss_of(model), batch(bad=True))
    guard.close()

    first = json.loads((tmp_path / "incidents.jsonl").read_text().splitlines()[0])
    assert first["cause"]["op"] == "aten.div"
    assert first["cause"]["samples"] == [5]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_unguarded(copied: Any) -> None:
    model, guard = make()
    twin = copied(model)
    guard.step(loss_of(model), batch(bad=False))

    assert all("steadygrad" not in type(hook).__module__ for hook in twin._forward_pre_hooks.values())
    twin(batch(bad=False)).sum().backward()
    assert guard._stages.passes.forward.take_captures() == []


def test_a_closed_guard_leaves_no_hook() -> None:
    model, guard = make()
    guard.close()

    assert not model._forward_pre_hooks


def test_forwards_without_gradients_are_not_kept() -> None:
    model, guard = make()
    with torch.no_grad():
        model(batch(bad=False))

    assert guard._stages.passes.forward.take_captures() == []


def test_a_nan_that_reaches_only_a_buffer_is_found_and_undone() -> None:
    """The loss hides the NaN; BatchNorm's statistics would have kept it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss(x: Tensor) -> Tensor:
        out = model(x)
        return out.square().mean() if out.isfinite().all() else sum(p.sum() * 0.0 for p in model.parameters())

    for i in range(4):
        x = torch.randn(8, 3)
        if i == 2:
            x[0, 0] = torch.nan
        before = {name: value.clone() for name, value in model.state_dict().items()}
        guard.step(loss, x)
        if i == 2:
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    found = {incident.finding.kind: incident for incident in guard.incidents}
    assert found["nonfinite_buffer"].step == 2
    assert found["nonfinite_buffer"].verdict.action is Action.SKIP
    assert not found.keys() & {"nonfinite_loss", "nonfinite_gradient"}  # only this could have caught it
    assert all(value.isfinite().all() for value in model.state_dict().values())


@pytest.mark.parametrize("when", ["given", "later"])
def test_a_bad_weight_is_reported_as_initial_or_as_changed(when: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    if when == "given":
        corrupt_weight(model.weight)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(policy=Policy.observe()))
    for i in range(3):
        if when == "later" and i == 2:
            corrupt_weight(model.weight)
        guard.step(lambda x: model(x).square().mean(), torch.randn(4, 3))

    cause = next(incident.cause for incident in guard.incidents if incident.cause is not None)
    assert (cause.phase, cause.name) == ("parameter", "weight")
    assert ("the checkpoint" in cause.note) == (when == "given")
    assert ("The gradients of step 1 were finite" in cause.note) == (when == "later")
    assert ("by the step of SGD" in cause.note) == (when == "later")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), AttributeError("numpy"), MemoryError()])
def test_a_batch_that_cannot_be_kept_is_still_diagnosed(tmp_path: Path, error: Exception) -> None:
    model, guard = make(tmp_path)

    class Awkward(Tensor):
        """Cannot be stored."""

        def cpu(self, *_args: Any, **_kwargs: Any) -> Tensor:  # type: ignore[override]
            raise error

    guard.step(lambda x, _: model(x).square().mean(), batch(bad=True), torch.ones(2).as_subclass(Awkward))
    cause = guard.incidents[0].cause
    assert cause is not None
    assert (cause.line, cause.batch) == (CULPRIT, None)
    guard.close()


@pytest.mark.parametrize("wrapped", [False, True], ids=["a layer of torch", "a sequence of layers"])
def test_a_bad_input_of_a_loss_is_reported_with_the_users_line(wrapped: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 1)) if wrapped else nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((2, 4), torch.nan)
    output = model(x)  # the user's line
    guard.step(output.square().mean())
    cause = guard.incidents[0].cause
    assert cause is not None
    assert cause.phase == "input"
    assert cause.file == __file__
    assert cause.source == "output = model(x)"
    assert "contextlib" not in str(cause)


def test_the_exception_of_a_halt_quotes_the_cause() -> None:
    model = Net()
    config = GuardConfig(on_nonfinite=Action.HALT)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    with pytest.raises(TrainingHalted) as caught:
        guard.step(loss_of(model), batch(bad=True))
    assert f"test_investigator.py:{CULPRIT}" in str(caught.value)
    assert "aten.div" in str(caught.value)


def test_a_loss_of_two_networks_is_traced_to_its_calls() -> None:
    """A discriminator's guard also sees calls that belong only to the generator's loss."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 2), nn.Linear(2, 1)
    making = Guard(maker, torch.optim.SGD(maker.parameters(), 0.1))
    judging = Guard(judge, torch.optim.SGD(judge.parameters(), 0.1))
    for step in range(4):
        real, noise, draws = torch.randn(8, 2), torch.randn(8, 4), torch.randn(8, 4)
        if step == 1:
            draws[3] = math.nan
        if step == 2:
            real[5] = math.nan
        judging.step(judge(real).mean() - judge(maker(noise).detach()).mean())
        making.step(-judge(maker(draws)).mean())

    caused = {(name, i.step): i.cause for name, g in (("m", making), ("j", judging)) for i in g.incidents}
    making.close()
    judging.close()
    assert set(caused) == {("m", 1), ("j", 2)}
    for cause, name, sample in ((caused["m", 1], "draws", 3), (caused["j", 2], "real", 5)):
        assert cause is not None
        assert (cause.phase, cause.name, cause.samples) == ("input", name, (sample,))


def test_another_networks_bad_output_is_reported_as_an_input() -> None:
    maker, judge = nn.Linear(4, 2), nn.Linear(2, 1)
    judging = Guard(judge, torch.optim.SGD(judge.parameters(), 0.1))
    noise = torch.randn(8, 4)
    noise[3] = math.inf

    judging.step(judge(maker(noise)).mean())

    cause = judging.incidents[-1].cause
    judging.close()
    assert cause is not None
    assert (cause.phase, cause.name) == ("input", "maker(noise)")


class Warner(nn.Module):
    """Warns on every call, and takes the logarithm of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("the program's own", stacklevel=1)
        return self.inner(x.log())


def test_a_replay_does_not_repeat_a_warning_of_the_program() -> None:
    model = Warner()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for step in range(4):
            guard.step(lambda x: model(x).square().mean(), torch.full((2, 4), -1.0 if step == 2 else 1.0))

    assert guard.incidents[0].cause is not None
    assert [str(one.message) for one in shown] == ["the program's own"]


def test_the_bad_one_of_several_calls_behind_a_loss_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    good, bad = torch.randn(3, 4), torch.full((3, 4), math.nan)

    guard.step((model(good) - model(bad)).square().mean())

    cause = guard.incidents[0].cause
    assert cause is not None
    assert cause.note.startswith("In the second of 2 calls of the model.")


class NoClass:
    """Like a lazy proxy outside of its context."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of its context")


class NoAttributes:
    """Like settings whose names are looked up in a file."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class NothingAtAll:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class NoDict:
    @property
    def __dict__(self) -> Any:
        raise RuntimeError("closed")


class NoItems(dict[str, Any]):
    """Like a store whose connection is closed."""

    def __len__(self) -> int:
        raise OSError("closed")

    def items(self) -> Any:
        raise OSError("closed")


class NoLength(list[Any]):
    def __len__(self) -> int:
        raise OSError("closed")

    def __iter__(self) -> Any:
        raise OSError("closed")


UNREADABLE = [NoClass, NoAttributes, NothingAtAll, NoDict, NoItems, NoLength]
unreadable = pytest.mark.parametrize("kind", UNREADABLE, ids=lambda kind: kind.__name__)


def make_root() -> tuple[nn.Linear, Guard]:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.0))


@unreadable
@pytest.mark.parametrize("where", ["closure", "argument"])
def test_an_unreadable_object_does_not_prevent_the_diagnosis(kind: type, where: str) -> None:
    model, guard = make_root()
    thing, calls = kind(), []

    def from_closure(x: Tensor) -> Tensor:
        calls.append(thing)
        return model(x).sqrt().mean()

    def from_argument(x: Tensor, _thing: Any) -> Tensor:
        calls.append(_thing)
        return model(x).sqrt().mean()

    for value in (-5.0, 5.0):
        x = torch.full((2, 2), value)
        guard.step(*((from_closure, x) if where == "closure" else (from_argument, x, thing)))

    (incident,) = guard.incidents
    assert (incident.step, incident.outcome.action) == (0, Action.SKIP)
    assert incident.cause is not None
    assert incident.cause.op == "aten.sqrt"
    assert len(calls) == 2, "what the replays changed of readable objects is put back"


@unreadable
def test_an_unreadable_argument_does_not_end_a_training(kind: type) -> None:
    class Scale(nn.Linear):
        def forward(self, x: Tensor, _thing: Any) -> Tensor:
            return super().forward(x)

    model = Scale(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    guard.step(lambda x, thing: model(x, thing).square().mean(), torch.ones(2, 2), kind())
    guard.step(model(torch.ones(2, 2), kind()).square().mean())
    guard.step(model(torch.ones(2, 2), _thing=kind()).square().mean())

    assert guard.last is not None
    assert (guard.last.step, guard.incidents) == (2, [])
