"""Rollback from the user's view: exact, counted, bounded, reported. Also the other actions that a run survives."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from steadygrad import Action, FixedNorm, Guard, GuardConfig, NonFiniteError, Severity, TrainingHalted
from steadygrad.config import Policy, SnapshotConfig
from steadygrad.testing import corrupt_weight, poison_batches, poison_loss

Batch = tuple[Tensor, Tensor]
pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")

QUIET = FixedNorm(max_norm=1e9)
SNAPSHOTS = SnapshotConfig(every=10, good_after=5)
"""Snapshots at 0, 10, 20, ..., each good five healthy steps later."""


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


@dataclass(kw_only=True)
class Subject:
    """A training with everything that has state: dropout, BatchNorm, moments, a scheduler, an EMA, a scaler."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    ema: AveragedModel
    scaler: torch.amp.GradScaler | None

    @classmethod
    def make(cls, *, scaler: bool = False) -> Subject:
        torch.manual_seed(1)
        random.seed(1)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)
        ).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return cls(
            model=model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + 0.1 * step)),
            ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            scaler=torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=7) if scaler else None,
        )

    def loss(self, batch: Batch) -> Tensor:
        noise = 0.01 * random.random()  # Python's generator is also part of the state
        return nn.functional.cross_entropy(self.model(batch[0] + noise), batch[1])

    def guard(self, *, clip: FixedNorm | None = QUIET, **kwargs: Any) -> Guard:
        config = GuardConfig(clip=clip, snapshots=SNAPSHOTS, **kwargs)
        extras = {"scheduler": self.scheduler, "ema": self.ema, "scaler": self.scaler}
        return Guard(self.model, self.optimizer, config=config, **extras)

    def state(self) -> dict[str, Any]:
        """Return a copy of all state that a rollback restores; random generators belong to the program and move on."""
        things = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "ema": self.ema,
            "scaler": self.scaler,
        }
        states = {name: thing.state_dict() for name, thing in things.items() if thing is not None}
        return copy.deepcopy(states)

    def draw_only(self, batch: Batch) -> None:
        """Run a forward that leaves only its random draws behind."""
        buffers = copy.deepcopy(self.model.state_dict())
        self.loss(batch)
        self.model.load_state_dict(buffers)

    def step_plainly(self, batch: Batch) -> None:
        """Run the loop without any guard."""
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.ema.update_parameters(self.model)


def assert_equal_state(left: Any, right: Any, path: str = "state") -> None:
    """Assert the same structure with the same values, bit for bit."""
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor), path
        assert torch.equal(left, right), f"{path} differs"
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), f"{path}: {left.keys() ^ right.keys()} on one side only"
        for key in left:
            assert_equal_state(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for i, pair in enumerate(zip(left, right)):
            assert_equal_state(*pair, f"{path}.{i}")
    else:
        assert left == right, f"{path}: {left!r} and {right!r}"


def actions_of(guard: Guard) -> list[tuple[int, str]]:
    """Return step and name of every action beyond a skip."""
    done = [(i.step, i.outcome.action.value) for i in guard.incidents]
    return [(step, action) for step, action in done if action not in ("skip", "clip", "none")]


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaler", [False, True], ids=["plain", "scaler"])
def test_the_state_after_a_rollback_equals_the_snapshot_bit_for_bit(scaler: bool) -> None:
    subject = Subject.make(scaler=scaler)
    guard = subject.guard()
    states = []
    for step, batch in enumerate(make_batches(28)):
        states.append(subject.state())
        if step == 27:
            corrupt_weight(subject.model.get_parameter("4.weight"))
        guard.step(subject.loss, batch)

    (rollback,) = [i for i in guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert (rollback.step, rollback.outcome.before, rollback.outcome.after) == (27, {"step": 28}, {"step": 20})
    assert_equal_state(states[20], subject.state())
    with pytest.raises(AssertionError):
        assert_equal_state(states[19], subject.state())
    with pytest.raises(AssertionError):
        assert_equal_state(states[27], subject.state())


@pytest.mark.parametrize("uses_batches", [True, False], ids=["guard.batches", "steps refused"])
def test_omitting_the_window_gives_the_run_without_those_batches(uses_batches: bool) -> None:
    batches = make_batches(60)
    plain = Subject.make()
    # 47 went back to 40, and two more were omitted: a twentieth of 48 steps
    for number, batch in enumerate(batches):
        if not 40 <= number < 50:
            plain.step_plainly(batch)
        elif number < 48 or not uses_batches:
            plain.draw_only(batch)

    subject = Subject.make()
    guard = subject.guard()
    seen = 0
    for batch in guard.batches(batches) if uses_batches else batches:
        if torch.equal(batch[0], batches[47][0]):
            corrupt_weight(subject.model.get_parameter("0.weight"))
        guard.step(subject.loss, batch)
        seen += 1
    guard.flush()

    assert actions_of(guard) == [(47, "rollback")]
    assert_equal_state(plain.state(), subject.state())
    assert seen == (58 if uses_batches else 60)
    assert guard.stats()["num_skipped_batches"] == (2 if uses_batches else 0)
    assert guard.stats()["num_steps"] == seen
    assert guard.last is not None
    assert guard.last.step == seen - 1


def test_a_refused_step_returns_a_loss_and_leaves_no_trace() -> None:
    subject = Subject.make()
    guard = subject.guard()
    batches = make_batches(50)
    for batch in batches[:47]:
        guard.step(subject.loss, batch)
    corrupt_weight(subject.model.get_parameter("0.weight"))
    guard.step(subject.loss, batches[47])
    before = subject.state()

    loss = guard.step(subject.loss, batches[48])

    assert math.isfinite(float(loss))
    assert guard.last is not None
    assert (guard.last.step, guard.last.skipped) == (48, True)
    assert_equal_state(before, subject.state())
    assert all(p.grad is None for p in subject.model.parameters())


def test_a_backward_of_the_user_is_refused_too() -> None:
    subject = Subject.make()
    guard = subject.guard()
    batches = make_batches(52)
    for number, batch in enumerate(batches):
        if number == 47:
            corrupt_weight(subject.model.get_parameter("0.weight"))
        before = subject.state()
        subject.loss(batch).backward()
        guard.step()
        subject.optimizer.zero_grad()
        if number in (48, 49):
            after = subject.state()
            for part in ("model", "optimizer", "scheduler", "ema"):
                assert_equal_state(before[part], after[part], part)

    assert actions_of(guard) == [(47, "rollback")]
    (rollback,) = [i for i in guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert subject.scheduler.last_epoch == rollback.outcome.after["step"] + 2  # and 50 and 51


# --- escalation, budgets ---------------------------------------------------------------------------------------------


def train_on_bad_losses(guard: Guard, subject: Subject, count: int, bad: Iterable[int]) -> None:
    fn = poison_loss(subject.loss, at=set(bad))
    for batch in make_batches(count):
        guard.step(fn, batch)
    guard.flush()


def test_one_bad_step_is_skipped_three_halve_the_rate_ten_roll_back() -> None:
    subject = Subject.make()
    guard = subject.guard()

    train_on_bad_losses(guard, subject, 60, [5, *range(10, 12), *range(20, 23), *range(40, 50)])

    assert actions_of(guard) == [(22, "scale_lr"), (49, "rollback")]
    assert guard.stats()["learning_rate_factor"] == 0.5


def test_the_third_rollback_halts_with_a_full_report() -> None:
    subject = Subject.make()
    guard = subject.guard()

    with pytest.raises(TrainingHalted) as halted:
        train_on_bad_losses(guard, subject, 400, range(30, 400))

    assert isinstance(halted.value, NonFiniteError)
    assert [action for _, action in actions_of(guard)] == [
        "scale_lr",
        "rollback",
        "scale_lr",
        "rollback",
        "halt",
    ]
    assert halted.value.incidents == tuple(guard.incidents)
    for part in (
        "the loss is NaN",
        "10 non-finite steps in a row",
        "none of the last 2 rollbacks helped: the trouble was back within 100 steps",
    ):
        assert part in str(halted.value)
    assert all(p.isfinite().all() for p in subject.model.parameters())


def test_the_budget_of_rollbacks_recovers() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy(budget_steps=60))

    train_on_bad_losses(guard, subject, 300, [*range(30, 40), *range(100, 110), *range(170, 180), *range(240, 250)])

    assert [action for _, action in actions_of(guard) if action == "rollback"] == ["rollback"] * 4


def test_the_learning_rate_is_lowered_once_per_cooldown() -> None:
    bad = [*range(20, 23), *range(30, 33), *range(130, 133)]
    subject = Subject.make()
    guard = subject.guard(policy=Policy(cooldown_steps=50))

    train_on_bad_losses(guard, subject, 140, bad)

    assert actions_of(guard) == [(22, "scale_lr"), (132, "scale_lr")]
    (kept,) = [i for i in guard.incidents if "cooldown" in i.verdict.reason or "steps ago" in i.verdict.reason]
    assert kept.step == 32


def test_too_many_skips_halt() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy(max_skips=5))
    with pytest.raises(TrainingHalted, match="5 steps were skipped within 1000, and one more"):
        train_on_bad_losses(guard, subject, 60, range(1, 60, 7))
    assert guard.stats()["num_skipped"] == 6


def test_a_corrupted_weight_without_a_snapshot_halts_and_is_named() -> None:
    subject = Subject.make()
    guard = Guard(subject.model, subject.optimizer, config=GuardConfig(snapshots=SnapshotConfig(enabled=False)))
    batches = make_batches(10)
    for batch in batches[:5]:
        guard.step(subject.loss, batch)
    corrupt_weight(subject.model.get_parameter("4.weight"))

    with pytest.raises(TrainingHalted, match=r"4\.weight.*nothing to go back to") as halted:
        guard.step(subject.loss, batches[5])

    halting = next(i for i in halted.value.incidents if i.verdict.action is Action.HALT)
    assert halting.finding.kind == "nonfinite_parameter"
    assert "SnapshotConfig.enabled is False" in halting.outcome.message


# --- the learning rate -----------------------------------------------------------------------------------------------


def test_a_lowered_learning_rate_survives_a_lambda_schedule_and_is_in_the_record(tmp_path: Path) -> None:
    subject = Subject.make()
    config = GuardConfig(clip=QUIET, snapshots=SNAPSHOTS)
    guard = Guard(
        subject.model, subject.optimizer, config=config, scheduler=subject.scheduler, run_dir=tmp_path / "run"
    )

    train_on_bad_losses(guard, subject, 30, range(10, 13))
    guard.close()

    steps = [json.loads(line) for line in (tmp_path / "run/steps.jsonl").read_text().splitlines()]
    rates = {step["step"]: step["learning_rates"][0] for step in steps}
    for step in range(13):
        assert rates[step] == 0.01 * (1.0 / (1.0 + 0.1 * min(step, 10)))  # skipped steps do not advance the schedule
    for step in range(13, 30):
        assert rates[step] == pytest.approx(0.5 * 0.01 / (1.0 + 0.1 * (step - 3)), rel=1e-12)  # one rounding
    incidents = [json.loads(line) for line in (tmp_path / "run/incidents.jsonl").read_text().splitlines()]
    (lowered,) = [i for i in incidents if i["verdict"]["action"] == "scale_lr"]
    assert lowered["step"] == 12
    assert lowered["verdict"]["factor"] == 0.5
    assert lowered["outcome"]["after"]["lr"] == pytest.approx(0.5 * lowered["outcome"]["before"]["lr"], rel=1e-12)


def test_a_lowered_learning_rate_can_ramp_back_up() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy(ramp_back_steps=10))
    fn = poison_loss(subject.loss, at={10, 11, 12})
    factors = []
    for batch in make_batches(30):
        guard.step(fn, batch)
        factors.append(guard.stats()["learning_rate_factor"])

    assert factors[11:13] == [1.0, 0.5]
    assert all(a < b for a, b in itertools.pairwise(factors[12:23]))
    assert factors[22:] == [1.0] * 8
    assert (
        subject.optimizer.param_groups[0]["lr"] == subject.scheduler.get_last_lr()[0] == 0.01 * (1.0 / (1.0 + 0.1 * 27))
    )


def test_the_first_rollback_restores_an_ineffective_lower_rate_and_the_second_keeps_it() -> None:
    subject = Subject.make()
    guard = subject.guard()

    train_on_bad_losses(guard, subject, 40, range(30, 40))

    assert actions_of(guard) == [(32, "scale_lr"), (39, "rollback")]
    assert subject.scheduler.last_epoch == 20
    assert subject.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 3.0, rel=1e-12)

    train_on_bad_losses(guard, subject, 14, range(14))  # the window, three, ten, and a refused one

    assert [action for _, action in actions_of(guard)] == ["scale_lr", "rollback", "scale_lr", "rollback"]
    assert guard.stats()["learning_rate_factor"] == 0.5


# --- policies --------------------------------------------------------------------------------------------------------


def test_observing_changes_nothing_but_still_skips_bad_steps() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy.observe())
    bad = set(range(20, 40))
    batches = make_batches(50)
    for batch in poison_batches(batches, at=bad):
        guard.step(subject.loss, batch)
    plain = Subject.make()
    for number, batch in enumerate(batches):
        if number in bad:
            plain.draw_only(batch)
        else:
            plain.step_plainly(batch)

    assert actions_of(guard) == []
    assert {i.step for i in guard.incidents} >= bad
    assert_equal_state(plain.state()["optimizer"], subject.state()["optimizer"])
    assert_equal_state(plain.state()["ema"], subject.state()["ema"])


def test_a_strict_policy_halts_at_the_first_finding_above_info() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy.strict())
    with pytest.raises(TrainingHalted, match=r"step 7: .*the policy halts at the first warning"):
        train_on_bad_losses(guard, subject, 10, [7])
    assert [f.severity for f in guard.findings if f.severity is not Severity.INFO] == [Severity.ERROR]


def test_a_patient_policy_rolls_back_and_changes_no_hyperparameter() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy.patient())

    train_on_bad_losses(guard, subject, 60, range(40, 50))

    assert actions_of(guard) == [(49, "rollback")]
    assert guard.stats()["learning_rate_factor"] == 1.0


def test_a_custom_action_on_a_validation_rolls_back_from_there() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy(actions={"nonfinite_validation": Action.ROLLBACK}))
    batches = make_batches(48)
    states = []
    for batch in batches:
        states.append(subject.state())
        guard.step(subject.loss, batch)

    guard.validate(math.nan)

    (rollback,) = [i for i in guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert (rollback.outcome.before, rollback.outcome.after) == ({"step": 48}, {"step": 40})
    assert_equal_state(states[40], subject.state())
    before = subject.state()
    guard.step(subject.loss, batches[0])  # refused; the buffers that it restores are those of the snapshot
    assert_equal_state(before, subject.state())


def test_early_stopping_ignores_nonfinite_losses_and_keeps_the_best() -> None:
    subject = Subject.make()
    guard = subject.guard(policy=Policy(early_stopping_patience=2))
    stops = []
    for batch, loss in zip(make_batches(6), [1.0, 0.5, math.nan, 0.6, math.inf, 0.7]):
        guard.step(subject.loss, batch)
        guard.validate(loss)
        stops.append(guard.should_stop)

    assert stops == [False, False, False, False, False, True]
    assert guard.best == (1, 0.5)
    assert [i.finding.kind for i in guard.incidents] == ["nonfinite_validation"] * 2


# --- the summary -----------------------------------------------------------------------------------------------------


def test_the_summary_lists_the_actions_in_ten_lines() -> None:
    subject = Subject.make()
    guard = subject.guard(clip=FixedNorm(max_norm=0.3))
    poisoned: Sequence[int] = range(40, 50)
    train_on_bad_losses(guard, subject, 70, poisoned)

    text = guard.summary()
    lines = {line.split()[0]: line for line in text.splitlines() if not line.startswith(" ")}

    assert len(text.splitlines()) <= 10
    assert "70, 12 skipped" in lines["steps"]  # ten bad ones, and the two of the window
    assert lines["steps"].endswith(", 1 learning-rate change, 1 rollback")
    stats = guard.stats()
    assert f"clipped    {stats['num_clipped']} steps" in lines["clipped"]
    assert any(f"led by {name}" in lines["clipped"] for name, _ in subject.model.named_parameters())
    assert "a threshold of" in lines["clipped"]
    assert "(now 0.3)" in lines["clipped"]
    assert "of its schedule" not in lines["rate"], "the rollback took the lowered rate back"
    assert "snapshot" in lines["rate"]
    assert "of host memory" in lines["rate"]
    assert "rolled back from step 50 to the state before step" in text


def test_a_summary_of_a_poisoned_gradient_names_the_worst_layers_first() -> None:
    subject = Subject.make()
    guard = subject.guard()
    for batch in poison_batches(make_batches(20), at={5, 9}):
        guard.step(subject.loss, batch)
    (worst,) = [line for line in guard.summary().splitlines() if line.startswith("non-finite")]
    assert "0.weight (2x)" in worst
