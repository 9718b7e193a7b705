"""After a bad step every buffer has its value from before the bad forward, whatever changed it before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard, GuardConfig, SnapshotConfig
from steadygrad.act import buffer_places
from steadygrad.act.buffers import BufferKeeper
from steadygrad.measure.periodic_scans import FIRST_STEPS

NAN = float("nan")
FORMS = ("function", "loss", "backward")
every_form = pytest.mark.parametrize("form", FORMS)


class Training:
    """A model, its guard, and a step in one of the three forms."""

    def __init__(self, model: nn.Module, form: str = "function", *, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model, self.form, self.dtype = model, form, dtype
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)  # 70,000 inputs at once would make it diverge
        self.guard = Guard(model, self.optimizer, config=GuardConfig(clip=None))

    def step(self, *, bad: bool = False, size: int = 16) -> None:
        x = torch.randn(size, 8, dtype=self.dtype)
        if bad:
            x[0, 0] = NAN
        if self.form == "function":
            self.guard.step(lambda x: self.model(x).square().mean(), x)
        elif self.form == "loss":
            self.guard.step(self.model(x).square().mean())
        else:
            self.model(x).square().mean().backward()
            self.guard.step()
            self.optimizer.zero_grad()
        assert self.guard.last is not None
        assert self.guard.last.skipped is bad

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def look(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    def assert_a_bad_step_leaves_no_trace(self) -> None:
        before, ids = self.look(), {name: id(buffer) for name, buffer in self.model.named_buffers()}
        self.step(bad=True)
        after = self.look()
        assert after.keys() == before.keys()
        for name, value in before.items():
            assert value.dtype == after[name].dtype
            assert torch.equal(value, after[name]), name
        assert ids == {name: id(buffer) for name, buffer in self.model.named_buffers()}
        assert self.guard.stats()["num_rollbacks"] == 0


def make_normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class OwnNorm(nn.Module):
    """Statistics that `F.batch_norm` writes without changing the version."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class Keeps(nn.Module):
    """Does something with its input in a buffer."""

    kept: Tensor | None

    def __init__(
        self, kept: Tensor | None, change: Callable[[Keeps, Tensor], None], *, persistent: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.register_buffer("kept", kept, persistent=persistent)
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        self._change(self, x)
        return self.linear(x)


def keep_mean(module: Keeps, x: Tensor) -> None:
    module.kept = x.mean(0) if module.kept is None else 0.9 * module.kept + 0.1 * x.mean(0)


def grow(module: Keeps, x: Tensor) -> None:
    assert module.kept is not None
    module.kept = torch.cat([module.kept, x[:1]])


def resize(module: Keeps, x: Tensor) -> None:
    assert module.kept is not None
    module.kept.data = torch.cat([module.kept.data, x[:1]])


def expand(module: Keeps, x: Tensor) -> None:
    module.kept = x.mean().detach().expand(4, 4)


# --- changes by the user between steps -------------------------------------------------------------------------------


def load_other(model: nn.Module) -> None:
    model.load_state_dict({k: v + 1 if "running" in k else v for k, v in model.state_dict().items()})


def load_assigned(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() + ("running" in k) for k, v in model.state_dict().items()}, assign=True)


def reset(model: nn.Module) -> None:
    model[1].reset_running_stats()  # type: ignore[index, operator]


def update_statistics(model: nn.Module) -> None:
    torch.optim.swa_utils.update_bn([torch.randn(16, 8) + 3 for _ in range(4)], model)
    model.train()


def validate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8))
    model.train()
    reset(model)


def overwrite(model: nn.Module) -> None:
    model[1].running_mean.data.fill_(3.0)  # type: ignore[index, union-attr]


@every_form
@pytest.mark.parametrize("change", [load_other, reset, update_statistics, validate, overwrite])
def test_a_skip_restores_the_values_set_by_the_user(form: str, change: Callable[[nn.Module], None]) -> None:
    training = Training(make_normed(), form)
    training.steps(3)
    change(training.model)
    training.assert_a_bad_step_leaves_no_trace()
    training.step()
    training.assert_a_bad_step_leaves_no_trace()


@every_form
def test_a_forward_without_gradients_inside_the_step_is_undone_too(form: str) -> None:
    training = Training(make_normed(), form)
    training.steps(2)
    before = training.look()

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = training.model(x)  # in training mode, as a target network's often is
        return (training.model(x) - target).square().mean()

    x = torch.full((16, 8), NAN)
    if form == "function":
        training.guard.step(loss, x)
    elif form == "loss":
        training.guard.step(loss(x))
    else:
        loss(x).backward()
        training.guard.step()
    assert all(torch.equal(before[name], value) for name, value in training.look().items())


# --- later and replaced buffers --------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("steps_between", [0, 3])
def test_a_module_added_later_is_protected(form: str, steps_between: int) -> None:
    training = Training(nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 1)), form)
    training.steps(3)
    training.model[1] = nn.BatchNorm1d(8)  # type: ignore[operator]
    training.steps(steps_between)
    training.assert_a_bad_step_leaves_no_trace()


@every_form
@pytest.mark.parametrize("size", [8, 70_000], ids=["small", "large"])
def test_statistics_that_first_change_in_a_bad_step_are_protected(form: str, size: int) -> None:
    training = Training(nn.Sequential(nn.Linear(8, size), OwnNorm(size), nn.Linear(size, 1)), form)
    training.model[1].eval()  # type: ignore[index]
    training.step()
    training.model[1].train()  # type: ignore[index]
    training.assert_a_bad_step_leaves_no_trace()
    training.steps(2)
    training.assert_a_bad_step_leaves_no_trace()


@every_form
def test_a_changed_dtype_is_protected(form: str) -> None:
    training = Training(make_normed(), form)
    training.steps(2)
    training.model.double()
    training.dtype = torch.float64
    training.steps(1)
    training.assert_a_bad_step_leaves_no_trace()


@every_form
@pytest.mark.parametrize(
    ("kept", "change"),
    [
        pytest.param(None, keep_mean, id="filled later"),
        pytest.param(torch.zeros(8), keep_mean, id="replaced"),
        pytest.param(torch.zeros(1, 8), grow, id="grown"),
        pytest.param(torch.zeros(1, 8), resize, id="resized"),
        pytest.param(torch.zeros(4, 4), expand, id="expanded"),
    ],
)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_replaced_and_resized_buffers_are_restored(
    form: str, kept: Tensor | None, change: Callable[[Keeps, Tensor], None], steps: int
) -> None:
    training = Training(Keeps(None if kept is None else kept.clone(), change), form)
    training.steps(steps)
    training.assert_a_bad_step_leaves_no_trace()


def test_a_buffer_registered_by_a_bad_forward_is_removed() -> None:
    def register(module: Keeps, x: Tensor) -> None:
        if not hasattr(module, "scale"):
            module.register_buffer("scale", x.std())

    training = Training(Keeps(None, register))
    training.step(bad=True)
    assert not hasattr(training.model, "scale")
    training.step()
    training.assert_a_bad_step_leaves_no_trace()


def test_a_module_created_by_a_bad_forward_stays_complete() -> None:
    def make(module: Keeps, _x: Tensor) -> None:
        if not hasattr(module, "norm"):
            module.norm = nn.BatchNorm1d(8)

    training = Training(Keeps(None, make))
    training.step(bad=True)
    assert isinstance(training.model.norm.running_mean, Tensor)  # type: ignore[union-attr]


def test_a_grown_cache_keeps_its_size() -> None:
    """Rotary tables: a Python attribute holds the length, and a shorter table would be indexed past its end."""

    def lengthen(module: Keeps, x: Tensor) -> None:
        if len(x) > module.longest:  # type: ignore[operator]
            module.longest = len(x)  # type: ignore[assignment]
            module.kept = torch.arange(len(x), dtype=torch.float32)

    model = Keeps(torch.zeros(1), lengthen, persistent=False)
    model.longest = 1  # type: ignore[assignment]
    training = Training(model)
    training.step()
    training.step(bad=True, size=32)
    assert model.kept is not None
    assert len(model.kept) == model.longest == 32


# --- aliases ---------------------------------------------------------------------------------------------------------


@every_form
def test_a_module_that_keeps_its_input_does_not_overwrite_data(form: str) -> None:
    def keep(module: Keeps, x: Tensor) -> None:
        module.kept = x

    model = Keeps(torch.zeros(8, 8), keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer)
    data = torch.randn(6, 8, 8)
    data[2, 0, 0] = data[3, 1, 1] = NAN
    given = data.clone()
    for x in data:
        if form == "function":
            guard.step(lambda x: model(x).square().mean(), x)
        elif form == "loss":
            guard.step(model(x).square().mean())
        else:
            model(x).square().mean().backward()
            guard.step()
            optimizer.zero_grad()
    assert guard.stats()["num_skipped"] == 2
    assert torch.equal(data.nan_to_num(7e7), given.nan_to_num(7e7))


# --- several guards, and copies --------------------------------------------------------------------------------------


def test_two_guards_on_one_model_do_not_undo_each_others_steps() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(8), "a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})
    model.forward = lambda x, head: model[head](model["norm"](x))  # type: ignore[method-assign, assignment]
    guards = {
        head: Guard(model, torch.optim.SGD([*model[head].parameters(), *model["norm"].parameters()], lr=1e-3))
        for head in "ab"
    }
    for _ in range(3):
        guards["a"].step(model(torch.randn(16, 8), "a").square().mean())
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        guards["b"].step(model(torch.full((16, 8), NAN), "b").square().mean())
        assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_a_copy_of_a_guarded_model_belongs_to_no_guard() -> None:
    training = Training(make_normed(), "loss")
    twin = copy.deepcopy(training.model)
    twin(torch.full((4, 8), NAN))
    assert not training.guard._rollback.buffers.has_begun


def test_large_tables_are_copied_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_places, "MOST_BYTES", 0)
    model = nn.Module()
    model.register_buffer("table", torch.zeros(300, 300))
    model.register_buffer("mask", torch.zeros(8))
    keeper = BufferKeeper(model)
    keeper.begin()
    assert [place.name for place in keeper._singles] == []
    model.table.add_(1)  # type: ignore[operator]
    keeper.accept()
    keeper.begin()
    model.table.add_(1)  # type: ignore[operator]
    keeper.restore()
    assert torch.equal(model.table, torch.ones(300, 300))  # type: ignore[arg-type]


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("change", [keep_mean, expand, grow], ids=lambda change: change.__name__)
def test_a_select_gives_the_same_as_a_restore(found: float, change: Callable[[Keeps, Tensor], None]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), Keeps(torch.zeros(1, 8) if change is grow else None, change))
    keeper = BufferKeeper(model)
    for flag in (0.0, 0.0, found):
        keeper.begin()
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model(torch.randn(4, 8))
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        keeper.select(torch.tensor(flag))
        wanted: dict[str, Any] = before if flag else after
        assert wanted.keys() == dict(model.named_buffers()).keys()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, wanted[name])


@every_form
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_buffers_of_a_scripted_part_are_restored(form: str) -> None:
    torch.manual_seed(1)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    training = Training(nn.Sequential(scripted, nn.Linear(8, 1)), form)
    training.steps(3)
    training.assert_a_bad_step_leaves_no_trace()
    training.steps(2)


@every_form
def test_buffers_on_meta_are_ignored(form: str) -> None:
    model = make_normed()
    model.side = nn.BatchNorm1d(3, device="meta")
    training = Training(model, form)
    training.model.forward = lambda x: model[2](model[1](model[0](x)))  # type: ignore[method-assign, assignment]
    training.steps(2)
    before = {k: v.clone() for k, v in model[1].named_buffers()}
    training.step(bad=True)
    assert all(torch.equal(before[k], v) for k, v in model[1].named_buffers())


# --- compiled models ------------------------------------------------------------------------------------------------


def compile_model(how: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    if how == "wrapped":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    if how == "in place":
        model.compile(backend="eager")
    else:
        model[1].compile(backend="eager")
    return model


@pytest.mark.parametrize("form", ["loss", "backward"])
@pytest.mark.parametrize("how", ["wrapped", "in place", "a part"])
@pytest.mark.parametrize("what", ["load_state_dict", "reset_running_stats", "update_bn"])
def test_a_change_between_the_steps_of_a_compiled_model_stays(form: str, how: str, what: str) -> None:
    """torch traces the hooks of a compiled module into its graph, where nothing can be copied."""
    torch._dynamo.reset()
    training = Training(compile_model(how), form)
    training.steps(3)
    if what == "load_state_dict":
        training.model.load_state_dict({k: v + 1 for k, v in training.model.state_dict().items()})
    elif what == "reset_running_stats":
        next(m for m in training.model.modules() if isinstance(m, nn.BatchNorm1d)).reset_running_stats()
    else:
        torch.optim.swa_utils.update_bn([torch.randn(16, 8) + 3 for _ in range(4)], training.model)
        training.model.train()
    training.assert_a_bad_step_leaves_no_trace()


def test_a_model_compiled_after_the_guard_was_created_is_hooked_from_its_second_step() -> None:
    torch._dynamo.reset()
    training = Training(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), "loss")
    training.step()
    training.model.compile(backend="eager", fullgraph=True)
    training.steps(2)
    training.model[1].reset_running_stats()
    training.assert_a_bad_step_leaves_no_trace()


@every_form
def test_values_loaded_into_a_model_inside_a_compiled_function_stay(form: str) -> None:
    torch._dynamo.reset()
    training = Training(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), form)
    inner = training.model
    training.model = torch.compile(inner, backend="eager", fullgraph=True)  # type: ignore[assignment]
    training.steps(3)
    inner.load_state_dict({k: v + 1 for k, v in inner.state_dict().items()})
    training.assert_a_bad_step_leaves_no_trace()


def test_a_closed_guard_leaves_nothing_on_a_compiled_model() -> None:
    model = compile_model("in place")
    call, wrapper = model._compiled_call_impl, torch.compile(compile_model("a part"), backend="eager")
    for one in (model, wrapper):
        Training(one).guard.close()  # type: ignore[arg-type]
        assert not one._forward_pre_hooks
        assert not one._load_state_dict_post_hooks
    assert model._compiled_call_impl is call


def test_a_copy_of_a_model_that_loads_has_no_hooks() -> None:
    training = Training(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), "loss")
    other = copy.deepcopy(training.model)
    other.load_state_dict(training.model.state_dict())
    training.step()


# --- NaN that no step reads -------------------------------------------------------------------------------------------


class Recall(nn.Module):
    """A classifier that notes its recall of each class: 0/0 for a class that does not occur."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("recall", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.layer(x)
        with torch.no_grad():
            hits = torch.stack([((out.argmax(1) == i) & (y == i)).sum() for i in range(3)])
            self.recall.copy_(hits / torch.stack([(y == i).sum() for i in range(3)]))
        return nn.functional.cross_entropy(out, y)


def test_nan_in_a_metric_stops_neither_snapshots_nor_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recall()
    config = GuardConfig(clip=None, snapshots=SnapshotConfig(every=10, good_after=5))
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, run_dir=tmp_path) as guard:
        for step in range(100):
            y = torch.randint(3 if step < 25 else 2, (8,))
            y[0] = 0
            guard.step(model, torch.randn(8, 4), y)
        assert model.recall.isnan().any()
        newest = guard._judging._rollback.snapshots.newest_good
        guard.save()
        assert guard.health()["overall_healthy"]
    assert (newest or 0) >= 80
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step")]
    assert {finding.severity.value for finding in guard.findings} == {"info"}


def test_a_scan_that_finds_such_nan_excuses_it_after_the_next_finite_step() -> None:
    """The only way where buffers are on a device, and are not read in every step."""
    model = Recall()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(clip=None))
    scans, y = guard._judging._watched.periodic_scans, torch.zeros(8, dtype=torch.int64)
    meant = []
    for _ in range(12):
        guard.step(model, torch.randn(8, 4), y)
        meant.append(scans.meant_nonfinite)
    assert meant[FIRST_STEPS - 1] == frozenset()
    assert meant[FIRST_STEPS] == {"recall"}
