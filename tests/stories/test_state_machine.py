"""Random programs of steps, skips, rollbacks, saves, kills and edits: each equals a plain loop that does the same.

`Plain` is that loop: a bad step is `continue` with restored buffers, a rollback is an older copy of everything handed
over, a kill is the copy of the last save. Each program takes a tenth of a second of CPU time; the long run is

    for seed in $(seq 10); do STEADYGRAD_TEST_PROGRAMS=1000 pytest --hypothesis-seed=$seed <this file>; done
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from steadygrad import Guard, GuardConfig, Policy
from steadygrad.config import DiagnoseConfig, SnapshotConfig
from steadygrad.facts import Action, Verdict

PROGRAMS = int(os.environ.get("STEADYGRAD_TEST_PROGRAMS", "20"))
FOLDERS = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the run folders are: in memory if possible, because no program here loses power."""
NAN = float("nan")
CONFIG = GuardConfig(
    clip=None,
    policy=Policy.observe(),  # only the program's own actions happen
    snapshots=SnapshotConfig(every=2, good_after=1, keep=3),
    diagnose=DiagnoseConfig(enabled=False),
)


class Averaging(torch.optim.SGD):
    """State in an attribute, behind a custom `state_dict`, and under a key that is not a parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)
        self.slow: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        params = [p for group in self.param_groups for p in group["params"]]
        self.slow += [p.detach().clone() for p in params[len(self.slow) :]]
        count = self.state["all"]["n"] = self.state["all"].get("n", 0) + 1  # type: ignore[index]
        for p, slow in zip(params, self.slow):
            slow.lerp_(p.detach(), 0.5)
            if count % 3 == 0:
                p.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "slow"})
        self.slow = list(state["slow"])


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "averaging": Averaging,
}


@dataclass(frozen=True)
class Kind:
    """The components of a training, and the form of its steps."""

    optimizer: str
    schedule: str
    """`handed` to the guard, the program's `own`, or `none`."""
    scaler: bool
    ema: bool
    form: str


kinds = st.builds(
    Kind,
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    schedule=st.sampled_from(["none", "handed", "own"]),
    scaler=st.booleans(),
    ema=st.booleans(),
    form=st.sampled_from(["function", "loss", "backward"]),
)


class Training:
    """A model and everything that changes with it."""

    def __init__(self, kind: Kind, *, unfrozen: bool = False) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.model[0].requires_grad_(False)
        self.optimizer = OPTIMIZERS[kind.optimizer](self.model[1:].parameters())
        self.scheduler: Any = None
        if kind.schedule != "none":
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.9)
        # Powers of two, so that dividing by the scale is exact.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if kind.scaler else None
        average = get_ema_multi_avg_fn(0.5)
        self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True) if kind.ema else None
        self.unfrozen = False
        if unfrozen:
            self.unfreeze()

    def unfreeze(self) -> None:
        self.unfrozen = True
        self.model[0].requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.model[0].parameters()), "lr": 0.02})

    def loss(self, x: Tensor, factor: float) -> Tensor:
        torch.manual_seed(int(x[0, 0].abs().nan_to_num() * 1000))  # dropout of this microbatch, whichever loop runs it
        return factor * (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def scale(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def edit(self, amount: float) -> None:
        """Load other weights, as `load_state_dict` does."""
        state = {k: v + amount if v.is_floating_point() else v for k, v in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def edit_moments(self, factor: float) -> None:
        """Load the state of another optimizer, as `load_state_dict` does."""
        state = copy.deepcopy(self.optimizer.state_dict())
        for entry in state["state"].values():
            for key in entry.keys() & {"momentum_buffer", "exp_avg"}:
                entry[key] *= factor
        self.optimizer.load_state_dict(state)

    def look(self) -> dict[str, Any]:
        """Return a copy of everything."""
        things = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": self.ema,
        }
        return copy.deepcopy({name: thing.state_dict() for name, thing in things.items() if thing is not None})


class Plain(Training):
    """The loop without a guard."""

    factor = 1.0

    def step(self, batches: list[Tensor], factors: list[float]) -> None:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        bad = any(factor != factor for factor in factors)
        for x, factor in zip(batches, factors):
            loss = self.loss(x, factor)
            if not bad or self.kind.form == "backward":
                self.scale(loss).backward()
        if bad:
            for buffer, before in zip(self.model.buffers(), buffers):
                buffer.data.copy_(before)
            if self.scaler is not None and self.kind.form == "backward":
                self.scaler.step(self.optimizer)  # a loop that sees only gradients takes it for an overflow
                self.scaler.update()
        else:
            self._apply()
        self.optimizer.zero_grad()
        if self.kind.schedule == "own":
            self.scheduler.step()

    def _apply(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        if self.kind.schedule == "handed":
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def refuse(self, batches: list[Tensor]) -> None:
        """Omit a step of the window after a rollback."""
        if self.kind.schedule == "own":
            self.scheduler.step()

    def go_back(self, then: dict[str, Any]) -> None:
        """Restore what was handed over; keep groups, and the rates of the program's scheduler."""
        then = copy.deepcopy(then)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.model.load_state_dict(then["model"])
        groups = then["optimizer"]["param_groups"]
        now = self.optimizer.state_dict()["param_groups"]
        then["optimizer"]["param_groups"] = [*groups, *now[len(groups) :]]
        self.optimizer.load_state_dict(then["optimizer"])
        for i, group in enumerate(self.optimizer.param_groups):
            if self.kind.schedule != "handed" or i >= len(groups):
                group["lr"] = rates[i]
        if self.kind.schedule == "handed":
            self.scheduler.load_state_dict(then["scheduler"])
        for name in ("scaler", "ema"):
            if name in then:
                getattr(self, name).load_state_dict(then[name])


class Guarded(Training):
    """The same with a guard."""

    def __init__(self, kind: Kind, run_dir: Path, *, unfrozen: bool = False) -> None:
        super().__init__(kind, unfrozen=unfrozen)
        self.guard = Guard(
            self.model,
            self.optimizer,
            config=CONFIG,
            scheduler=self.scheduler if kind.schedule == "handed" else None,
            scaler=self.scaler,
            ema=self.ema,
            extras={"own": self.scheduler} if kind.schedule == "own" else None,
            run_dir=run_dir,
        )

    def microbatch(self, x: Tensor, factor: float) -> None:
        if self.kind.form == "function":
            self.guard.backward(self.loss, x, factor)
        elif self.kind.form == "loss":
            self.guard.backward(self.loss(x, factor))
        else:
            self.scale(self.loss(x, factor)).backward()

    def finish(self) -> None:
        self.guard.step()
        if self.kind.form == "backward":
            self.optimizer.zero_grad()
        if self.kind.schedule == "own":
            self.scheduler.step()


class Programs(RuleBasedStateMachine):
    """Applies the same actions to both, and compares them after each one."""

    @initialize(kind=kinds)
    def start(self, kind: Kind) -> None:
        warnings.simplefilter("ignore")
        self.kind, self.folder = kind, Path(tempfile.mkdtemp(dir=FOLDERS))
        self.plain, self.guarded = Plain(kind), Guarded(kind, self.folder)
        self.history: dict[int, dict[str, Any]] = {}
        """Record the plain loop after each step of the guard, which is when a snapshot is taken."""
        self.saved: tuple[Path, dict[str, Any], float, bool] | None = None
        self.num_drawn = 0

    @property
    def guard(self) -> Guard:
        return self.guarded.guard

    def draw(self, num: int) -> list[Tensor]:
        self.num_drawn += num
        generator = torch.Generator().manual_seed(self.num_drawn)
        return [torch.randn(4, 3, generator=generator) for _ in range(num)]

    @rule(num=st.integers(1, 3), bad=st.sampled_from([None, None, None, 0, 1]), interrupted=st.booleans())
    def step(self, num: int, bad: int | None, interrupted: bool) -> None:
        """Take one step of some microbatches, one of which may be bad; the process may die between the first two."""
        if self.guard.num_steps == 0:
            self.history[0] = self.plain.look()
        batches = self.draw(num)
        factors = [NAN if i == bad else 1.0 / num for i in range(num)]
        refused = self.guard._rollback.is_open
        if refused:
            self.plain.refuse(batches)
        else:
            self.plain.step(batches, factors)
        for i, (x, factor) in enumerate(zip(batches, factors)):
            self.guarded.microbatch(x, factor)
            if i == 0 and num > 1 and interrupted and not refused and bad != 0:
                self._reopen(self._save(), unfrozen=self.guarded.unfrozen)
                self.saved = None  # it may belong to the same step, and is this one now
        self.guarded.finish()
        self.history[self.guard.num_steps] = self.plain.look()
        self.compare()

    @rule()
    def save(self) -> None:
        self.saved = (self._save(), self.plain.look(), self.plain.factor, self.plain.unfrozen)

    def _save(self) -> Path:
        saved = self.guard.save()
        assert saved is not None, [finding.message for finding in self.guard.findings]
        where = saved.wait()
        assert where is not None
        return where

    @precondition(lambda self: self.saved is not None)
    @rule()
    def kill(self) -> None:
        """Kill the process, and continue in another one from the last save."""
        assert self.saved is not None
        path, state, factor, unfrozen = self.saved
        left = Path(tempfile.mkdtemp(dir=FOLDERS))  # the current files, which SIGKILL leaves
        shutil.copytree(self.folder, left, dirs_exist_ok=True)
        (left / "run.lock").unlink(missing_ok=True)  # from a dead process
        self.guard.close()
        shutil.rmtree(self.folder)
        path, self.folder = left / path.relative_to(self.folder), left
        self.saved = (path, state, factor, unfrozen)
        self._reopen(path, unfrozen=unfrozen)
        self.plain = Plain(self.kind, unfrozen=unfrozen)
        self.plain.factor = factor
        for name, value in copy.deepcopy(state).items():
            getattr(self.plain, name).load_state_dict(value)
        self.compare()

    def _reopen(self, path: Path, *, unfrozen: bool) -> None:
        self.guard.close()
        self.guarded = Guarded(self.kind, self.folder, unfrozen=unfrozen)
        assert self.guard.resume(path) is not None
        self.history = {}

    @precondition(lambda self: self.guard._rollback.snapshots.newest_good in self.history)
    @rule()
    def roll_back(self) -> None:
        actor = self.guard._requests.actor
        self.guard.flush()
        verdict = Verdict(action=Action.ROLLBACK, reason="for the test")
        outcome = actor.carry_out(verdict, None, step=self.guard.num_steps - 1)
        assert outcome.action is Action.ROLLBACK
        self.guard._rollback.follow()
        self.plain.go_back(self.history[int(outcome.after["step"])])
        self.compare()

    @rule(factor=st.sampled_from([0.5, 0.25, 2.0]))
    def scale_rate(self, factor: float) -> None:
        self.guard.scale_lr(factor, "as a test")
        self.plain.factor *= factor

    @rule(factor=st.sampled_from([0.9, 1.1]))
    def decay_by_hand(self, factor: float) -> None:
        for training in (self.plain, self.guarded):
            for group in training.optimizer.param_groups:
                group["lr"] *= factor

    @precondition(lambda self: not self.plain.unfrozen)
    @rule()
    def add_group(self) -> None:
        self.plain.unfreeze()
        self.guarded.unfreeze()

    @rule(amount=st.sampled_from([0.1, -0.2]))
    def load_weights(self, amount: float) -> None:
        self.plain.edit(amount)
        self.guarded.edit(amount)

    @rule(factor=st.sampled_from([0.5, 2.0]))
    def load_moments(self, factor: float) -> None:
        self.plain.edit_moments(factor)
        self.guarded.edit_moments(factor)

    @rule(is_clean=st.booleans())
    def fork(self, is_clean: bool) -> None:
        """Fork the process and exit the copy: without cleaning up, like a DataLoader's worker, or with it."""
        child = os.fork()  # which writes buffered lines, so that one exists
        if child == 0:
            has_written = True
            try:
                records = self._read_records()
                if is_clean:
                    self.guard.close()
                has_written = self._read_records() != records
            finally:
                os._exit(has_written)
        assert os.waitpid(child, 0)[1] == 0

    def _read_records(self) -> dict[Path, bytes]:
        names = ("steps.jsonl", "incidents.jsonl", "train.log", "run.json", "run.lock")
        return {path: path.read_bytes() for name in names if (path := self.folder / name).exists()}

    def compare(self) -> None:
        assert_equal(self.plain.look(), self.guarded.look())
        assert self.guard.stats()["learning_rate_factor"] == self.plain.factor

    def teardown(self) -> None:
        if hasattr(self, "guarded"):
            self.guard.close()
            steps = [json.loads(line)["step"] for line in (self.folder / "steps.jsonl").read_text().splitlines()]
            assert len(steps) == len(set(steps)), "a step is in the record twice"
            shutil.rmtree(self.folder, ignore_errors=True)


def assert_equal(left: Any, right: Any, path: str = "") -> None:
    """Assert the same structure with the same values, bit for bit."""
    if isinstance(left, Tensor):
        assert torch.equal(left, right), f"{path} differs: {left} and {right}"
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), f"{path}: {left.keys() ^ right.keys()} on one side only"
        for key in left:
            assert_equal(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, pair in enumerate(zip(left, right)):
            assert_equal(*pair, f"{path}.{i}")
    else:
        assert left == right, f"{path}: {left!r} and {right!r}"


Programs.TestCase.settings = settings(
    max_examples=PROGRAMS,
    stateful_step_count=14,
    deadline=None,
    derandomize=PROGRAMS <= 100,  # the short run is always the same
    suppress_health_check=list(HealthCheck),
    database=None,
)
TestPrograms = pytest.mark.filterwarnings("ignore")(Programs.TestCase)
if PROGRAMS > 100:
    TestPrograms = pytest.mark.timeout(0)(TestPrograms)
