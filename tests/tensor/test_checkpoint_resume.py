"""guard.save() and guard.resume(): a training interrupted anywhere ends with the weights of an uninterrupted one.

Dropout, BatchNorm, shuffling, noise drawn by the data set, a scheduler, EMA, AMP and bad batches are all enabled. The
second process is a second set of objects, created from other seeds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training import assert_same, snapshot

from steadygrad import AdaGC, FixedNorm, Guard, GuardConfig, Severity, UsageError, ZClip
from steadygrad.checkpoint import MismatchError
from steadygrad.checkpoint.run import SKIPS_IN_A_ROW
from steadygrad.config import CheckpointConfig, DetectConfig, Policy, ProveConfig
from steadygrad.detect import rule

QUIET = "ignore:.*runs without fused=True"
pytestmark = pytest.mark.filterwarnings(QUIET)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows with noise; some of them are NaN."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(40, 6, generator=generator)
        self.y = torch.randint(3, (40,), generator=generator)
        for row in bad:
            self.x[row] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(6) * random.random() * float(numpy.random.rand())
        return self.x[i] + noise, self.y[i]


class Program:
    """A whole training: two epochs of ten batches, two microbatches per step."""

    def __init__(
        self,
        run_dir: Path | None,
        *,
        seed: int,
        accumulate: int = 2,
        workers: int = 0,
        bad: tuple[int, ...] = (),
        amp: str | None = "bf16",
        scaler: bool = False,
        lr: float = 0.02,
        width: int = 16,
        config: dict[str, Any] | None = None,
    ) -> None:
        for set_seed in (random.seed, numpy.random.seed, torch.manual_seed):
            set_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=lr, total_steps=40)
        self.ema = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.loader = DataLoader(Rows(bad), 4, shuffle=True, num_workers=workers)
        self.accumulate = accumulate
        scaling = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) if scaler else None
        self.scaler = scaling
        settings = {"clip": ZClip(warmup=3, z=1.0, max_norm=1.0), "autocast": amp} | (config or {})
        self.guard = Guard(
            self.model,
            self.optimizer,
            config=GuardConfig(**settings),
            scheduler=self.scheduler,
            scaler=scaling,
            ema=self.ema,
            run_dir=run_dir,
        )
        self.num_batches = 0

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]).float(), batch[1]) / self.accumulate

    def train(self, *, stop: int | None = None, epochs: int = 2) -> None:
        """Run to the end, or until after `stop` batches, which may be in the middle of an accumulation."""
        count = self.guard.num_microbatches
        for _ in range(self.guard.epoch, epochs):
            for batch in self.guard.batches(self.loader):
                self.guard.backward(self.loss, batch)
                count += 1
                if count % self.accumulate == 0:
                    self.guard.step()
                self.num_batches += 1
                if self.num_batches == stop:
                    return
            self.guard.validate(1.0)
            self.guard.end_epoch()

    @property
    def trained(self) -> dict[str, Tensor]:
        return snapshot(self.model, self.optimizer, self.scheduler, self.ema)

    @property
    def state(self) -> dict[str, Tensor]:
        return snapshot(self.model, self.optimizer, self.scheduler, self.ema, self.guard)


def stop_and_go_on(tmp_path: Path, stop: int, **settings: Any) -> tuple[Program, Program]:
    """Return the uninterrupted run, and the one that was interrupted after `stop` batches and resumed."""
    whole = Program(tmp_path / "whole", seed=1, **settings)
    whole.train()
    first = Program(tmp_path / "run", seed=1, **settings)
    first.train(stop=stop)
    save = first.guard.save()
    assert save is not None
    assert save.wait() is not None, save.error
    first.train(stop=stop + 3)  # everything after the save is lost with the process
    second = Program(tmp_path / "run", seed=99, **settings)
    assert second.guard.resume() == save.step
    second.train()
    return whole, second


@pytest.mark.parametrize("stop", [1, 2, 9, 10, 13, 20])
def test_a_resumed_training_ends_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole, second = stop_and_go_on(tmp_path, stop)
    assert_same(whole.state, second.state)
    now = {"current_gradient_norm", "current_loss"} if stop == 20 else set()  # of the last step in this process
    stats = [{k: v for k, v in p.guard.stats().items() if k not in now} for p in (whole, second)]
    assert stats[0] == stats[1]


@pytest.mark.parametrize("stop", [3, 13])
def test_worker_processes_are_resumed_too(tmp_path: Path, stop: int) -> None:
    whole, second = stop_and_go_on(tmp_path, stop, workers=2)
    assert_same(whole.state, second.state)


@pytest.mark.parametrize("stop", [5, 6])
def test_a_loss_scale_is_resumed(tmp_path: Path, stop: int) -> None:
    whole, second = stop_and_go_on(tmp_path, stop, amp="fp32", scaler=True)
    assert_same(whole.state, second.state)
    assert whole.scaler is not None
    assert second.scaler is not None
    assert whole.scaler.get_scale() == second.scaler.get_scale() > 256.0


@pytest.mark.parametrize("stop", range(1, 12))
def test_bad_batches_before_and_after_the_interruption_are_skipped_the_same(tmp_path: Path, stop: int) -> None:
    """Also during the accumulation of a step that will be skipped: buffers return to their values before it."""
    settings = {"bad": (3, 11), "config": {"policy": Policy.observe()}}
    whole = Program(tmp_path / "whole", seed=1, **settings)
    whole.train(epochs=1)
    first = Program(tmp_path / "run", seed=1, **settings)
    first.train(stop=stop, epochs=1)
    save = first.guard.save()
    if save is None:  # the first microbatch of the current step was bad: its gradients are not saved
        assert first.guard.incidents[-1].finding.kind == "checkpoint_failed"
        assert "gradients" in first.guard.incidents[-1].finding.message
        return
    save.wait()
    second = Program(tmp_path / "run", seed=99, **settings)
    second.guard.resume()
    second.train(epochs=1)
    assert whole.guard.stats()["num_skipped"] == second.guard.stats()["num_skipped"] == 2
    assert_same(whole.trained, second.trained)


def test_without_the_generator_states_a_resumed_training_would_differ(tmp_path: Path) -> None:
    whole, _ = stop_and_go_on(tmp_path, 5)
    second = Program(tmp_path / "run", seed=99)
    second.guard.resume()
    torch.manual_seed(3)
    second.guard._saver.checkpoints._positions._random = None
    second.train()
    assert not torch.equal(whole.model[0].weight, second.model[0].weight)


def test_a_loop_with_its_own_backward_is_resumed(tmp_path: Path) -> None:
    def train(program: Program, batches: int) -> None:
        for _, (x, y) in zip(range(batches), program.guard.batches(program.loader)):
            program.optimizer.zero_grad()
            nn.functional.cross_entropy(program.model(x), y).backward()
            program.guard.step()

    whole = Program(None, seed=1, amp=None)
    train(whole, 9)
    first = Program(tmp_path / "run", seed=1, amp=None)
    train(first, 4)
    save = first.guard.save()
    assert save is not None
    save.wait()
    second = Program(tmp_path / "run", seed=99, amp=None)
    assert second.guard.resume() == 4
    train(second, 5)
    assert_same(whole.trained, second.trained)


# --- where and when -----------------------------------------------------------------------------------------------


def test_a_new_run_has_nothing_to_resume(tmp_path: Path) -> None:
    assert Program(tmp_path, seed=1).guard.resume() is None


def test_saving_without_a_run_directory_raises_an_error() -> None:
    with pytest.raises(UsageError, match="give Guard a run_dir"):
        Program(None, seed=1).guard.save()


@pytest.mark.parametrize("place", ["run directory", "checkpoints", "one checkpoint"])
def test_a_path_can_be_given(tmp_path: Path, place: str) -> None:
    first = Program(tmp_path / "a", seed=1)
    first.train(stop=4)
    save = first.guard.save()
    assert save is not None
    path = save.wait()
    assert path is not None
    paths = {"run directory": tmp_path / "a", "checkpoints": tmp_path / "a" / "checkpoints", "one checkpoint": path}
    second = Program(None, seed=2)
    assert second.guard.resume(paths[place]) == 2
    assert_same(snapshot(first.model), snapshot(second.model))


def test_a_path_without_a_checkpoint_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        Program(None, seed=1).guard.resume(tmp_path)


def test_a_guard_saves_at_the_configured_interval(tmp_path: Path) -> None:
    program = Program(tmp_path, seed=1, config={"checkpoint": CheckpointConfig(every=3, keep_last=9)})
    program.train()
    program.guard.close()
    assert [info.step for info in program.guard.checkpoints.list()] == [3, 6, 9]


def test_a_checkpoint_becomes_good_after_healthy_steps_and_suspect_after_many_bad_ones(tmp_path: Path) -> None:
    settings = {"checkpoint": CheckpointConfig(good_after=2), "policy": Policy.observe()}
    program = Program(tmp_path, seed=1, accumulate=1, config=settings)
    store = program.guard.checkpoints
    batches = iter(program.guard.batches(program.loader))

    def step(*, bad: bool = False) -> None:
        x, y = next(batches)
        program.guard.step(program.loss, (x * torch.nan if bad else x, y))

    def look() -> list[tuple[int, bool, bool]]:
        store.wait()
        return [(info.step, info.good, info.suspect is not None) for info in store.list()]

    step()
    program.guard.save()
    assert look() == [(1, False, False)]
    step()
    step()
    assert look() == [(1, True, False)]
    program.guard.save()
    step(bad=True)  # a bad batch, skipped: it says nothing about the weights
    assert look() == [(1, True, False), (3, False, False)]
    step()
    step(bad=True)
    step()
    assert look() == [(1, True, False), (3, True, False)]
    program.guard.save()
    for _ in range(SKIPS_IN_A_ROW):
        program.guard.step(program.loss, (torch.full((4, 6), torch.nan), torch.zeros(4, dtype=torch.int64)))
    assert look() == [(1, True, False), (3, True, False), (7, False, True)]
    assert store.newest is not None
    assert store.newest.step == 3


@pytest.mark.parametrize("why", ["spikes", "a custom rule"])
def test_warnings_not_about_the_weights_do_not_make_resume_go_back(tmp_path: Path, why: str) -> None:
    """Some batches belong to another task, and the paired test is off; or a custom rule always warns."""
    complain = rule("complaint", severity=Severity.WARNING)(lambda _: "as always")
    config = GuardConfig(
        checkpoint=CheckpointConfig(every=20),
        prove=ProveConfig(enabled=False),
        clip=None,
        detect=DetectConfig(rules=(complain,) if why != "spikes" else ()),
    )

    def make() -> tuple[nn.Module, Guard]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        return model, Guard(model, torch.optim.Adam(model.parameters()), config=config, run_dir=tmp_path)

    model, guard = make()
    for t in range(205):
        x, task = torch.randn(64, 4), int(why == "spikes" and t > 100 and t % 15 == 0)
        guard.step(lambda x, task: (model(x)[:, task] - x.sum(1) * (1, 30)[task]).square().mean(), x, task)
    warned = {incident.finding.kind for incident in guard.incidents if incident.finding.severity is Severity.WARNING}
    assert warned & ({"loss_spike", "exploding_gradient"} if why == "spikes" else {"complaint"})
    guard.close()
    assert [(info.step, info.good, info.suspect) for info in guard.checkpoints.list()] == [
        (160, True, None),
        (180, True, None),
        (200, False, None),
    ]
    assert make()[1].resume() == 200


def test_the_validation_loss_of_a_checkpoint_is_found_before_and_after_it(tmp_path: Path) -> None:
    program = Program(tmp_path, seed=1, config={"checkpoint": CheckpointConfig(keep_last=1, keep_best=1)})
    program.train(stop=2)
    program.guard.validate(0.5)
    program.guard.save()
    program.train(stop=4)
    program.guard.save()
    program.guard.validate(0.2)
    program.train(stop=6)
    program.guard.save()
    program.guard.close()
    store = program.guard.checkpoints
    assert [(info.step, info.metrics) for info in store.list()] == [(2, {"val_loss": 0.2}), (3, {})]
    assert store.best is not None
    assert store.best.step == 2


def test_the_ledger_has_each_step_once(tmp_path: Path) -> None:
    first = Program(tmp_path / "run", seed=1)
    first.train(stop=6)
    first.guard.save()
    first.train(stop=12)
    first.guard.close()
    second = Program(tmp_path / "run", seed=1)
    assert second.guard.resume() == 3
    second.train()
    second.guard.close()
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(10))


# --- changed settings ---------------------------------------------------------------------------------------------


def test_a_new_learning_rate_wins_and_all_else_is_exact(tmp_path: Path) -> None:
    first = Program(tmp_path, seed=1, lr=0.02)
    first.train(stop=6)
    first.guard.save()
    first.guard.close()
    rate = first.optimizer.param_groups[0]["lr"]
    second = Program(tmp_path, seed=99, lr=0.005)
    second.guard.resume()
    [group] = second.optimizer.param_groups
    assert group["lr"] == pytest.approx(rate / 4)
    assert group["max_lr"] == pytest.approx(0.005)
    assert_same(snapshot(first.model, first.ema), snapshot(second.model, second.ema))
    [finding] = [f for f in second.guard.findings if f.kind == "resumed"]
    assert finding.severity is Severity.WARNING
    assert "lr 0.0008 -> 0.0002" in finding.message
    text = (tmp_path / "incidents.jsonl").read_text()
    assert "as set now" in text
    second.train()  # the schedule continues, only lower
    whole = Program(None, seed=1, lr=0.02)
    whole.train()
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(whole.optimizer.param_groups[0]["lr"] / 4)


def test_a_rate_lowered_by_the_policy_changes_once(tmp_path: Path) -> None:
    def make(lr: float) -> tuple[nn.Linear, torch.optim.Optimizer, Guard]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return model, optimizer, Guard(model, optimizer, run_dir=tmp_path)

    def train(model: nn.Linear, guard: Guard, steps: int) -> None:
        for _ in range(steps):
            guard.step(lambda x: model(x).square().mean(), torch.ones(2, 3))

    model, optimizer, guard = make(0.1)
    guard._rollback.rates.scale_lr(0.5)
    train(model, guard, 2)
    guard.save()
    guard.close()
    model, optimizer, guard = make(0.02)
    guard.resume()
    train(model, guard, 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02)
    assert guard.last is not None
    assert guard.last.learning_rates[0] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "clip", [FixedNorm(max_norm=0.5), AdaGC(), None], ids=lambda clip: getattr(clip, "kind", "none")
)
def test_a_different_clip_strategy_starts_fresh_with_a_message(tmp_path: Path, clip: Any) -> None:
    first = Program(tmp_path, seed=1)
    first.train(stop=6)
    first.guard.save()
    first.guard.close()
    second = Program(tmp_path, seed=1, config={"clip": clip})
    assert second.guard.resume() == 3
    assert "the checkpoint has zclip" in second.guard.findings[-1].message
    second.train()
    assert second.guard.last is not None
    assert second.guard.last.step == 9


def test_a_changed_model_is_reported_tensor_by_tensor_and_stays_untouched(tmp_path: Path) -> None:
    first = Program(tmp_path, seed=1)
    first.train(stop=4)
    first.guard.save()
    first.guard.close()
    second = Program(None, seed=2, width=8)
    before = snapshot(second.model, second.optimizer)
    with pytest.raises(MismatchError, match=r"0\.weight has shape \(8, 6\), the saved one \(16, 6\)"):
        second.guard.resume(tmp_path)
    assert_same(before, snapshot(second.model, second.optimizer))


class Grown(nn.Module):
    """A net with an optional head."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.old = nn.Linear(4, 1) if not head else None
        self.new = nn.Linear(4, 2) if head else None

    def forward(self, x: Tensor) -> Tensor:
        head = self.old if self.new is None else self.new
        assert head is not None
        made: Tensor = head(self.body(x))
        return made


def test_strict_false_loads_what_fits_and_reports_the_rest(tmp_path: Path) -> None:
    def make(*, head: bool) -> tuple[Grown, torch.optim.Optimizer, Guard]:
        model = Grown(head=head)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, Guard(model, optimizer, run_dir=tmp_path)

    old, _, guard = make(head=False)
    guard.step(lambda x: old(x).square().mean(), torch.ones(2, 4))
    guard.save()
    guard.close()
    new, optimizer, guard = make(head=True)
    with pytest.raises(MismatchError, match=r"missing new\.weight.*unexpected old\.weight"):
        guard.resume()
    assert guard.resume(strict=False) == 1
    assert torch.equal(new.body.weight, old.body.weight)
    assert set(optimizer.state) == {new.body.weight, new.body.bias}
    assert "missing new.weight" in guard.findings[-1].message
    guard.step(lambda x: new(x).square().mean(), torch.ones(2, 4))
    assert guard.last is not None
    assert not guard.last.skipped


# --- corners ------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Has a mask of -inf, tied weights, a buffer outside of any state_dict, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.notes = {"seen": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.notes["seen"] += 1
        scores = (self.a(x) @ self.b(x).T) + self.mask
        made: Tensor = scores.softmax(-1).square().sum()
        return made

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.notes)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.notes = dict(state)


def test_masks_ties_and_hidden_buffers_survive(tmp_path: Path) -> None:
    first = Masked()
    guard = Guard(first, torch.optim.SGD(first.parameters(), lr=0.1), run_dir=tmp_path)
    for _ in range(3):
        guard.step(first, torch.eye(3))
    assert guard.save() is not None
    guard.close()
    second = Masked()
    guard = Guard(second, torch.optim.SGD(second.parameters(), lr=0.1), run_dir=tmp_path)
    guard.resume()
    assert second.a.weight is second.b.weight
    assert torch.equal(first.a.weight, second.a.weight)
    assert (second.count, second.notes) == (torch.tensor(3.0), {"seen": 3})
    [info] = guard.checkpoints.list()
    assert info.num_bytes < 40_000


class Strange:
    """A scheduler whose state only its own code could read."""

    def step(self) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def test_an_unsaveable_state_is_reported_once_at_the_start_and_the_rest_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    config = GuardConfig(checkpoint=CheckpointConfig(every=1))
    guard = Guard(model, torch.optim.SGD(model.parameters()), config=config, scheduler=Strange(), run_dir=tmp_path)
    [incident] = guard.incidents
    assert incident.finding.kind == "uncopied_state"
    assert "the state of the scheduler holds a Strange" in incident.finding.message
    for _ in range(3):
        guard.step(lambda x: model(x).square().mean(), torch.ones(2, 3))
    assert guard.incidents == [incident]
    guard.close()
    assert [info.step for info in guard.checkpoints.list()] == [1, 2, 3]


def test_a_nonfinite_state_is_not_saved_and_this_is_reported(tmp_path: Path) -> None:
    program = Program(tmp_path, seed=1)
    program.train(stop=2)
    with torch.no_grad():
        program.model[0].weight[0, 0] = torch.nan
    assert program.guard.save() is None
    finding = program.guard.incidents[-1].finding
    assert finding.kind == "checkpoint_failed"
    assert "model.0.weight (1)" in finding.message
    assert not (tmp_path / "checkpoints").exists()


def test_moments_keep_their_precision(tmp_path: Path) -> None:
    """`Optimizer.load_state_dict` would cast them to the weights' bfloat16."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Guard]:
        model = nn.Linear(4, 1).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, Guard(model, optimizer, run_dir=tmp_path)

    model, optimizer, guard = make()
    guard.step(lambda x: model(x).square().mean(), torch.ones(2, 4, dtype=torch.bfloat16))
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    guard.save()
    guard.close()
    _, again, guard = make()
    guard.resume()
    for one, other in zip(optimizer.state.values(), again.state.values()):
        assert other["exp_avg"].dtype is torch.float32
        assert torch.equal(one["exp_avg"], other["exp_avg"])


def test_several_optimizers_and_channels_last_are_resumed(tmp_path: Path) -> None:
    def make() -> tuple[nn.Sequential, list[torch.optim.Optimizer], Guard]:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(model[0].parameters()),
            torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
        ]
        return model, optimizers, Guard(model, optimizers, run_dir=tmp_path)

    model, optimizers, guard = make()
    for _ in range(2):
        guard.step(lambda x: model(x).square().mean(), torch.randn(2, 3, 8, 8))
    guard.save()
    guard.close()
    again, others, guard = make()
    guard.resume()
    assert_same(snapshot(model, *optimizers), snapshot(again, *others))
    moments = others[0].state[again[0].weight]["exp_avg"]
    assert moments.stride() == again[0].weight.stride()


def each_scheduler() -> Iterator[tuple[str, Callable[[torch.optim.Optimizer], Any]]]:
    s = torch.optim.lr_scheduler
    yield "lambda", lambda o: s.LambdaLR(o, lambda step: 0.9**step)
    yield "steps", lambda o: s.MultiStepLR(o, [2, 3], gamma=0.5)
    yield "cosine", lambda o: s.CosineAnnealingLR(o, 8)
    yield "cyclic", lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=2)
    yield (
        "warm-up",
        lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=2), s.ExponentialLR(o, 0.9)], milestones=[2]),
    )


@pytest.mark.parametrize("make_scheduler", [pytest.param(make, id=name) for name, make in each_scheduler()])
def test_every_kind_of_schedule_continues(tmp_path: Path, make_scheduler: Callable[[Any], Any]) -> None:
    def make(place: Path) -> tuple[nn.Module, torch.optim.Optimizer, Guard]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        return model, optimizer, Guard(model, optimizer, scheduler=make_scheduler(optimizer), run_dir=place)

    def train(model: nn.Module, optimizer: Any, guard: Guard, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            guard.step(lambda x: model(x).square().mean(), torch.ones(2, 2))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    whole = make(tmp_path / "whole")
    rates = train(*whole, 6)
    first = make(tmp_path / "run")
    begun = train(*first, 3)
    first[2].save()
    first[2].close()
    second = make(tmp_path / "run")
    second[2].resume()
    assert begun + train(*second, 3) == rates
    assert_same(snapshot(*whole[:2]), snapshot(*second[:2]))


def test_saving_does_not_change_the_training(tmp_path: Path) -> None:
    quiet = Program(None, seed=1)
    quiet.train()
    saving = Program(tmp_path, seed=1, config={"checkpoint": CheckpointConfig(every=1)})
    saving.train()
    assert len(saving.guard.checkpoints.list()) > 1
    assert_same(quiet.state, saving.state)


class Tally:
    """A custom object of the program that must survive a crash."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = list(state["counts"])


def test_extras_of_the_program_are_saved_and_restored(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    first = Tally()
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path, extras={"tally": first}) as guard:
        guard.step(lambda x: model(x).mean(), torch.ones(2, 3))
        first.counts += [3, 4]
        guard.save()
    second = Tally()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path, extras={"tally": second})
    assert guard.resume() == 1
    assert second.counts == [3, 4]


@pytest.mark.parametrize(
    ("extras", "words"), [({"ema": Tally()}, "Use ema="), ({"note": 3}, r"a int, which cannot be saved.*state_dict")]
)
def test_invalid_extras_are_refused_by_name(extras: dict[str, Any], words: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(UsageError, match=words):
        Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), extras=extras)
