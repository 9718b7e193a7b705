"""A rollback restores what was handed to the guard, completely or not at all; what the user keeps has moved on."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from steadygrad import Guard, GuardConfig, Policy, Severity
from steadygrad.config import CheckpointConfig, SnapshotConfig
from steadygrad.errors import MismatchError
from steadygrad.facts import Action, Verdict

NAN = float("nan")
CONFIG = GuardConfig(clip=None, policy=Policy.observe(), snapshots=SnapshotConfig(every=10, good_after=2))
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(guard: Guard, model: nn.Module, count: int, *, then: Callable[[], Any] = lambda: None) -> None:
    for _ in range(count):
        guard.step(loss_of(model), torch.randn(16, 8))
        then()


def roll_back(guard: Guard) -> str:
    """Roll back as a policy would, and return the outcome; no batches are omitted afterwards."""
    actor = guard._requests.actor
    outcome = actor.carry_out(Verdict(action=Action.ROLLBACK, reason="for the test"), None, step=guard.num_steps - 1)
    assert outcome.action is Action.ROLLBACK
    guard._rollback.follow()
    guard._rollback.window.num_left = 0
    return outcome.message


# --- what the user keeps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedules.MultiStepLR(o, [22], gamma=0.01),
        lambda o: schedules.CosineAnnealingLR(o, 60),
        lambda o: schedules.ExponentialLR(o, 0.98),
        lambda o: schedules.OneCycleLR(o, 0.1, total_steps=60),
    ],
    ids=["MultiStepLR", "CosineAnnealingLR", "ExponentialLR", "OneCycleLR"],
)
def test_rates_of_the_users_scheduler_follow_the_schedule(make: Callable[[Any], Any]) -> None:
    def run(*, broken: bool) -> list[float]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        guard = Guard(model, optimizer, config=CONFIG)
        train(guard, model, 25, then=scheduler.step)
        if broken:
            roll_back(guard)
        train(guard, model, 15, then=scheduler.step)
        return [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]

    assert run(broken=True) == run(broken=False)


def test_rates_of_a_guarded_scheduler_are_rolled_back_with_it() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedules.MultiStepLR(optimizer, [22], gamma=0.01)
    guard = Guard(model, optimizer, scheduler=scheduler, config=CONFIG)
    train(guard, model, 25)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    roll_back(guard)
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (20, 0.1)


def test_a_rate_lowered_manually_by_the_program_ends_where_it_would_have() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, config=GuardConfig(clip=None))
    wanted = 0.1
    for step in range(60):
        factor = NAN if step in (20, 21, 22) else 1.0
        guard.step(lambda x, f: loss_of(model)(x) * f, torch.randn(8, 8), factor)
        optimizer.param_groups[0]["lr"] *= 0.99
        wanted *= 0.99
    assert guard.stats()["learning_rate_factor"] == 0.5
    assert optimizer.param_groups[0]["lr"] == wanted
    assert guard.last is not None
    assert guard.last.learning_rates[0] == pytest.approx(0.5 * wanted / 0.99)


@pytest.mark.parametrize("generator", ["torch", "own"])
def test_no_random_batch_is_repeated(generator: str) -> None:
    model = make_model()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config=CONFIG)
    own = torch.Generator().manual_seed(3) if generator == "own" else None
    seen: list[float] = []

    def draw(factor: float) -> Tensor:
        x = torch.randn(8, 8, generator=own)
        seen.append(float(x.sum()))
        return loss_of(model)(x) * factor

    for step in range(60):
        guard.step(draw, NAN if step == 30 else 1.0)
        if step == 40:
            roll_back(guard)
    drawn = [x for x, later in zip(seen, [*seen[1:], None]) if x != later]  # a replay draws the batch of its step again
    assert len(drawn) == len(set(drawn))


# --- complete, or reported -------------------------------------------------------------------------------------------


def test_a_group_added_since_the_snapshot_is_accepted() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
    guard = Guard(model, optimizer, config=CONFIG)
    train(guard, model, 15)
    guard.scale_lr(0.5, "as a test")
    train(guard, model, 10)
    before = copy.deepcopy(model.state_dict())
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(guard, model, 1)
    roll_back(guard)
    assert len(optimizer.param_groups) == 2
    assert not any(torch.equal(before[name], value) for name, value in model[2].state_dict(prefix="2.").items())
    assert all(p not in optimizer.state for p in model[0].parameters())
    train(guard, model, 5)


@pytest.mark.parametrize(("then", "now"), [(4, 6), (1, 3), (6, 4)])
def test_a_resized_weight_is_kept_and_reported(then: int, now: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, then))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, config=CONFIG)

    def fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    states = []
    for _ in range(25):
        states.append(copy.deepcopy(model[0].state_dict()))
        guard.step(fn, torch.randn(16, 8))
    with torch.no_grad():
        for p in model[2].parameters():
            optimizer.state.pop(p, None)
            p.grad = None
            p.data = torch.randn(now, *p.shape[1:]) * 0.1
    guard.step(fn, torch.randn(16, 8))
    resized = copy.deepcopy(model[2].state_dict())

    assert "had a different shape then" in roll_back(guard)
    assert all(torch.equal(states[20][name], value) for name, value in model[0].state_dict().items())
    assert all(torch.equal(resized[name], value) for name, value in model[2].state_dict().items())
    for _ in range(3):
        guard.step(fn, torch.randn(16, 8))


def test_a_changed_dtype_also_applies_to_the_moments() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, config=CONFIG)
    train(guard, model, 25)
    model.double()
    optimizer.state.clear()
    roll_back(guard)
    assert all(state["exp_avg"].dtype is torch.float64 for state in optimizer.state.values())
    for _ in range(4):
        guard.step(lambda x: model(x).square().mean(), torch.randn(16, 8, dtype=torch.float64))


def test_an_extra_that_cannot_load_its_state_leaves_nothing_half_restored() -> None:
    class Stubborn:
        def step(self) -> None: ...

        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("b")

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, scheduler=Stubborn(), config=CONFIG)
    states = []
    for _ in range(25):
        states.append(copy.deepcopy(model.state_dict()))
        train(guard, model, 1)
    assert "the scheduler could not load its state: KeyError('b')" in roll_back(guard)
    assert all(torch.equal(states[20][name], value) for name, value in model.state_dict().items())


# --- what cannot be copied -------------------------------------------------------------------------------------------


class Warmup:
    """A callable that holds a lock, for logging for example."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.gain = 0.5

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / 10) * self.gain


def test_an_uncopyable_scheduler_is_reported_at_the_start_and_its_rest_is_rolled_back(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any, Guard]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = schedules.LambdaLR(optimizer, Warmup())
        return model, scheduler, Guard(model, optimizer, scheduler=scheduler, config=CONFIG, run_dir=tmp_path)

    model, scheduler, guard = make()
    (found,) = [f for f in guard.findings if f.kind == "uncopied_state"]
    assert (found.severity, found.step) == (Severity.WARNING, 0)
    assert "lock of the scheduler" in found.message
    train(guard, model, 25)
    lock = scheduler.lr_lambdas[0].lock
    roll_back(guard)
    assert scheduler.last_epoch == 20
    assert scheduler.lr_lambdas[0].lock is lock
    saved = guard.save()
    assert saved is not None
    saved.wait()
    guard.close()

    _, scheduler, guard = make()
    guard.resume()
    assert scheduler.last_epoch == 20
    assert scheduler.lr_lambdas[0].gain == 0.5


class Projector:
    """An object that can be copied but has no plain form."""


class Curriculum:
    """A user's object whose state contains such an object, or cannot be read."""

    def __init__(self, *, raises: bool = False) -> None:
        self.state, self.raises = {"level": 3, "projector": Projector()}, raises

    def state_dict(self) -> dict[str, Any]:
        if self.raises:
            raise RuntimeError("not now")
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("raises", [False, True])
def test_an_extra_without_a_plain_form_is_reported_at_the_start_and_the_rest_is_saved(
    tmp_path: Path, raises: bool
) -> None:
    def make() -> tuple[nn.Module, Guard]:
        model = make_model()
        optimizer, extras = torch.optim.SGD(model.parameters(), lr=0.1), {"curriculum": Curriculum(raises=raises)}
        return model, Guard(model, optimizer, extras=extras, config=CONFIG, run_dir=tmp_path)

    model, guard = make()
    found = [f for f in guard.findings if f.kind == "uncopied_state"]
    assert [(f.severity, f.step) for f in found] == [(Severity.WARNING, 0)]
    assert "curriculum" in found[0].message
    train(guard, model, 3)
    saved = guard.save()
    assert saved is not None
    saved.wait()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    guard.close()

    model, guard = make()
    assert guard.resume() == 3
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert any("curriculum" in f.message for f in guard.findings if f.kind == "resumed")


def test_without_a_run_directory_checkpoints_are_not_mentioned() -> None:
    model = make_model()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), extras={"curriculum": Curriculum()})
    assert [f for f in guard.findings if f.kind == "uncopied_state"] == []


def test_an_optimizer_whose_state_has_no_plain_form_is_reported_after_its_first_step(tmp_path: Path) -> None:
    """Its state does not exist before that."""

    class Projecting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["projector"] = Projector()

    model = make_model()
    guard = Guard(model, Projecting(model.parameters(), lr=0.1, momentum=0.9), config=CONFIG, run_dir=tmp_path)
    assert [f for f in guard.findings if f.kind == "uncopied_state"] == []
    train(guard, model, 3)
    (found,) = [f for f in guard.findings if f.kind == "uncopied_state"]
    assert found.step == 0
    assert "Projecting holds a Projector" in found.message
    assert guard.save() is not None


def test_a_module_whose_extra_state_has_no_plain_form_is_saved_without_it(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return Projector()

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError("there is none")

    def make() -> tuple[nn.Module, Guard]:
        model = nn.Sequential(Odd(8, 4))
        return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG, run_dir=tmp_path)

    model, guard = make()
    (found,) = [f for f in guard.findings if f.kind == "uncopied_state"]
    assert "extra state of 0" in found.message
    train(guard, model, 2)
    saved = guard.save()
    assert saved is not None
    saved.wait()
    guard.close()
    assert make()[1].resume() == 2


def test_a_failing_state_dict_does_not_end_the_training() -> None:
    class Broken:
        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

        def load_state_dict(self, state: Any) -> None: ...

    model = make_model()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), scheduler=Broken(), config=CONFIG)
    assert any("the state of the scheduler" in f.message for f in guard.findings if f.kind == "uncopied_state")
    train(guard, model, 25)
    roll_back(guard)


def test_modules_on_meta_are_left_out(tmp_path: Path) -> None:
    model = make_model()
    model.side = nn.Linear(3, 3, device="meta")
    trained = nn.ModuleList([model[0], model[2]])
    guard = Guard(model, torch.optim.SGD(trained.parameters(), lr=0.1), config=CONFIG, run_dir=tmp_path)

    for _ in range(25):
        guard.step(lambda x: model[2](model[1](model[0](x))).square().mean(), torch.randn(4, 8))
    roll_back(guard)
    assert guard.save() is not None


# --- strict ----------------------------------------------------------------------------------------------------------

Make = Callable[[Any], torch.optim.Optimizer]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        ((torch.float32, adam), (torch.float64, adam), "weight is float64, the saved one float32"),
        ((torch.float64, adam), (torch.bfloat16, adam), "weight is bfloat16, the saved one float64"),
        (
            (torch.float32, adam),
            (torch.float32, sgd),
            "is a torch.optim.sgd.SGD, the saved one was a torch.optim.adam.Adam",
        ),
        (
            (torch.float32, sgd),
            (torch.float32, adam),
            "is a torch.optim.adam.Adam, the saved one was a torch.optim.sgd.SGD",
        ),
    ],
)
def test_another_dtype_or_class_is_refused_and_loaded_as_far_as_possible_without_strict(
    saved: tuple[torch.dtype, Make], given: tuple[torch.dtype, Make], expected: str, tmp_path: Path
) -> None:
    def make(dtype: torch.dtype, optimizer: Make) -> tuple[nn.Module, Guard]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, dtype=dtype)
        return model, Guard(model, optimizer(model.parameters()), run_dir=tmp_path)

    def step(model: nn.Module, guard: Guard) -> None:
        guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4).to(next(model.parameters()).dtype))

    model, guard = make(*saved)
    for _ in range(3):
        step(model, guard)
    save = guard.save()
    assert save is not None
    save.wait()
    guard.close()
    weights = copy.deepcopy(model.state_dict())

    model, guard = make(*given)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MismatchError, match=expected):
        guard.resume()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    guard.resume(strict=False)
    assert all(torch.equal(weights[name].to(given[0]), value) for name, value in model.state_dict().items())
    for _ in range(3):
        step(model, guard)


# --- custom optimizers -----------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Has state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        whole = self.state["all"]
        whole["n"] = whole.get("n", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"] / whole["n"] ** 0.5)


class Lookahead(torch.optim.Optimizer):
    """The usual wrapper: an inner optimizer with the same groups, and slow weights in its own dict."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 5) -> None:
        self.inner, self.k, self.n = inner, k, 0
        self.slow: dict[Tensor, Tensor] = {}
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.n += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.slow.setdefault(p, p.detach().clone())
            if self.n % self.k == 0:
                p.data.copy_(slow.lerp_(p.detach(), 0.5))

    def state_dict(self) -> dict[str, Any]:
        params = [p for group in self.param_groups for p in group["params"] if p in self.slow]
        return {"inner": self.inner.state_dict(), "n": self.n, "slow": [self.slow[p] for p in params]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.n = state["n"]
        self.slow = dict(zip([p for group in self.param_groups for p in group["params"]], state["slow"]))


OWN: dict[str, Make] = {
    "state of all": lambda p: Counting(p, lr=0.1),
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.05)),
}
every_own = pytest.mark.parametrize("make", OWN.values(), ids=OWN.keys())


@every_own
def test_custom_state_is_resumed(make: Make, tmp_path: Path) -> None:
    def run(run_dir: Path, *, cut: bool) -> Tensor:
        def new() -> tuple[nn.Module, Guard]:
            model = make_model()
            config = GuardConfig(clip=None, checkpoint=CheckpointConfig())
            return model, Guard(model, make(model.parameters()), run_dir=run_dir, config=config)

        model, guard = new()
        for step in range(24):
            if step == 12 and cut:
                save = guard.save()
                assert save is not None
                save.wait()
                guard.close()
                model, guard = new()
                guard.resume()
            guard.step(loss_of(model), torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(tmp_path / "whole", cut=False), run(tmp_path / "cut", cut=True))


@every_own
def test_custom_state_is_rolled_back_and_rates_are_not(make: Make) -> None:
    model = make_model()
    optimizer = make(model.parameters())
    guard = Guard(model, optimizer, config=CONFIG)
    states: list[Any] = []
    for _ in range(23):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        train(guard, model, 1)
    optimizer.param_groups[0]["lr"] = 0.01
    roll_back(guard)

    weights, state = states[20]
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.01
    if isinstance(optimizer, Lookahead):
        assert optimizer.n == state["n"] == 20
        assert all(torch.equal(a, b) for a, b in zip(optimizer.slow.values(), state["slow"]))
        assert optimizer.inner.param_groups[0] is optimizer.param_groups[0]
    else:
        assert optimizer.state["all"]["n"] == 20  # type: ignore[index]
