"""GuardCallback in real trainings of transformers: faults, clipping, logs, resume, and a quiet run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from trainer_trainings import (
    BATCH,
    NUM_STEPS,
    InOrder,
    Regression,
    assert_equal,
    is_finite,
    make_language_model,
    make_rows,
    make_texts,
    spoil,
    state_of,
    steps_of,
    train,
)

from steadygrad import Action, FixedNorm, GuardConfig, NonFiniteError, Policy, SnapshotConfig, UsageError, ZClip
from steadygrad.adapters.transformers import GradientMonitoringCallback, GuardCallback
from steadygrad.testing import poison_gradient

TIMES = ("train_runtime", "train_samples_per_second", "train_steps_per_second")


# --- quiet ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}, {"optim": "sgd"}, {"max_grad_norm": 0.0}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_quiet_run_is_bit_identical(options: dict[str, Any], tmp_path: Path) -> None:
    callback = GuardCallback()
    plain = train(Regression(), make_rows(), tmp_path, **options)
    guarded = train(Regression(), make_rows(), tmp_path, callback, **options)

    assert_equal(state_of(guarded), state_of(plain))
    assert not callback.guard.incidents
    assert callback.guard.stats()["num_steps"] == plain.state.global_step
    for ours, theirs in zip(guarded.state.log_history, plain.state.log_history, strict=True):
        # torch sums the squares of the norm in float32, we in float64
        norms = [line.pop("grad_norm", 0.0) for line in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert {k: v for k, v in ours.items() if k not in TIMES} == {k: v for k, v in theirs.items() if k not in TIMES}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_is_bit_identical(use_reentrant: bool, tmp_path: Path) -> None:
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        "gradient_accumulation_steps": 2,
    }
    callback = GuardCallback()
    plain = train(make_language_model(), make_texts(), tmp_path, **options)
    guarded = train(make_language_model(), make_texts(), tmp_path, callback, **options)

    assert_equal(state_of(guarded), state_of(plain))
    assert not callback.guard.incidents


def test_the_trainer_is_restored_when_training_is_over(tmp_path: Path) -> None:
    plain = train(Regression(), make_rows(), tmp_path)
    trainer = train(Regression(), make_rows(), tmp_path, GuardCallback())
    assert vars(trainer).keys() == vars(plain).keys()
    assert vars(trainer.accelerator).keys() == vars(plain.accelerator).keys()
    assert vars(trainer.optimizer).keys() == vars(plain.optimizer).keys()
    assert trainer.optimizer.step.__qualname__ == plain.optimizer.step.__qualname__
    assert trainer.optimizer.step_was_skipped is False
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["nan", "overflow"])
def test_a_bad_batch_ruins_the_plain_run_but_not_the_guarded_one(fault: str, tmp_path: Path) -> None:
    rows = make_rows()
    spoiled = spoil(rows, 3, fault)
    plain = train(Regression(), spoiled, tmp_path)
    assert not is_finite(plain.model)

    callback = GuardCallback(run_dir=tmp_path / "run")
    guarded = train(Regression(), spoiled, tmp_path, callback, lr_scheduler_type="constant")
    del rows[3 * BATCH : 4 * BATCH]
    without = train(Regression(), rows, tmp_path, lr_scheduler_type="constant")

    assert is_finite(guarded.model)
    assert_equal(state_of(guarded), state_of(without))
    guard = callback.guard
    kinds = {"nonfinite_loss", "nonfinite_gradient"} | ({"nonfinite_input"} if fault == "nan" else set())
    assert kinds <= {f.kind for f in guard.findings}
    assert {f.step for f in guard.findings} == {3}
    assert {i.outcome.action for i in guard.incidents} == {Action.SKIP}
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["skipped"]] == [3]


def test_the_learning_rate_does_not_advance_at_a_skipped_step(tmp_path: Path) -> None:
    trainer = train(Regression(), spoil(make_rows(), 3, "nan"), tmp_path, GuardCallback())
    rates = [line["learning_rate"] for line in steps_of(trainer)]
    assert rates[3] == rates[4]
    assert len(set(rates)) == NUM_STEPS - 1


def test_a_bad_first_step_causes_no_scheduler_warning(tmp_path: Path) -> None:
    trainer = train(Regression(), spoil(make_rows(), 0, "nan"), tmp_path, GuardCallback())
    assert is_finite(trainer.model)


def test_a_lowered_learning_rate_is_logged_and_follows_the_schedule(tmp_path: Path) -> None:
    rows = make_rows()
    for step in (2, 3, 4):
        rows = spoil(rows, step, "nan")
    callback = GuardCallback()
    trainer = train(Regression(), rows, tmp_path, callback)

    assert [i.step for i in callback.guard.incidents if i.outcome.action is Action.SCALE_LR] == [4]
    rates = [line["learning_rate"] for line in steps_of(trainer)]
    schedule = [0.01 * (1 - done / NUM_STEPS) for done in (0, 1, 2, 2, 2, 2, 3, 4)]
    assert rates == pytest.approx(schedule[:5] + [rate / 2 for rate in schedule[5:]])


def test_a_bad_gradient_with_a_good_loss_is_caught_before_the_trainer_clips(tmp_path: Path) -> None:
    def poison(trainer: transformers.Trainer) -> None:
        poison_gradient(trainer.model.net[0].weight, at={2})

    plain = train(Regression(), make_rows(), tmp_path, prepare=poison)
    assert not any(p.isfinite().all() for p in plain.model.parameters()), "clipping has spread one NaN to all"

    callback = GuardCallback()
    guarded = train(Regression(), make_rows(), tmp_path, callback, prepare=poison)

    assert is_finite(guarded.model)
    (finding,) = callback.guard.findings
    assert (finding.kind, finding.step) == ("nonfinite_gradient", 2)
    assert "net.0.weight" in finding.message
    assert "1 of " in finding.message


def test_sanitize_repairs_the_gradient_and_steps(tmp_path: Path) -> None:
    callback = GuardCallback(GuardConfig(on_nonfinite=Action.SANITIZE))
    trainer = train(
        Regression(),
        make_rows(),
        tmp_path,
        callback,
        prepare=lambda trainer: poison_gradient(trainer.model.net[0].weight, at={2}),
    )
    assert is_finite(trainer.model)
    assert callback.guard.stats()["num_skipped"] == 0
    incidents = [i for i in callback.guard.incidents if i.finding.kind == "nonfinite_gradient"]
    assert [(i.step, i.outcome.action) for i in incidents] == [(2, Action.SANITIZE)]


def test_one_bad_microbatch_skips_its_step(tmp_path: Path) -> None:
    rows = make_rows()
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    callback = GuardCallback()
    guarded = train(Regression(), spoil(rows, 3, "nan"), tmp_path, callback, **options)
    del rows[2 * BATCH : 4 * BATCH]
    without = train(Regression(), rows, tmp_path, **options)

    assert_equal(state_of(guarded), state_of(without))
    assert {f.step for f in callback.guard.findings} == {1}


def test_a_batch_without_labels_is_hidden_by_the_trainer_and_reported(tmp_path: Path) -> None:
    texts = make_texts(masked=(4, 5))
    plain = train(make_language_model(), texts, tmp_path)
    assert steps_of(plain)[2]["loss"] == 0.0, "a NaN, which the Trainer leaves out of its log"

    callback = GuardCallback()
    guarded = train(make_language_model(), texts, tmp_path, callback)

    assert math.isnan(steps_of(guarded)[2]["loss"])
    assert steps_of(guarded)[2]["num_skipped_steps"] == 1
    assert {f.kind for f in callback.guard.findings} == {"nonfinite_loss", "all_labels_masked"}


def test_many_bad_batches_in_a_row_roll_back_and_the_run_finishes(tmp_path: Path) -> None:
    rows = make_rows(60 * BATCH)
    for step in range(40, 46):
        rows = spoil(rows, step, "nan")
    policy = Policy(nonfinite_steps_to_scale_lr=2, nonfinite_steps_to_rollback=5, change_hyperparameters=False)
    snapshots = SnapshotConfig(every=10, good_after=5, skip_batches=3)
    callback = GuardCallback(GuardConfig(policy=policy, snapshots=snapshots))

    trainer = train(Regression(), rows, tmp_path, callback)

    assert is_finite(trainer.model)
    assert [i.step for i in callback.guard.incidents if i.outcome.action is Action.ROLLBACK] == [44]
    assert trainer.state.global_step == 60


def test_raising_ends_the_training(tmp_path: Path) -> None:
    callback = GuardCallback(GuardConfig(on_nonfinite=Action.RAISE))
    with pytest.raises(NonFiniteError):
        train(Regression(), spoil(make_rows(), 3, "nan"), tmp_path, callback)
    assert callback.guard.last is not None
    assert callback.guard.last.step == 3


def test_an_exception_in_compute_loss_passes_through_and_is_recorded_and_training_can_restart(tmp_path: Path) -> None:
    class Broken(InOrder):
        broken = True

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.broken and self.state.global_step == 2:
                raise KeyError("mine")
            return super().compute_loss(*args, **kwargs)

    callback = GuardCallback()
    trainers: list[Any] = []
    with pytest.raises(KeyError, match="mine"):
        train(Regression(), make_rows(), tmp_path, callback, kind=Broken, prepare=trainers.append)
    (finding,) = callback.guard.findings
    assert (finding.kind, finding.step) == ("exception", 2)

    trainers[0].broken = False
    trainers[0].train()

    assert callback.guard.stats()["num_steps"] == NUM_STEPS
    assert not callback.guard.findings


# --- clipping and numbers -------------------------------------------------------------------------------------------


def test_max_grad_norm_is_used_and_numbers_equal_those_of_a_plain_torch_loop(tmp_path: Path) -> None:
    callback = GuardCallback()
    trainer = train(Regression(), make_rows(), tmp_path, callback, max_grad_norm=0.5, lr_scheduler_type="constant")

    losses, norms, model = train_plainly(make_rows(), max_norm=0.5)
    assert callback.guard.config.clip == FixedNorm(max_norm=0.5)
    # The clip coefficient differs in its last bits; Adam and a BatchNorm over two samples amplify that.
    assert [line["loss"] for line in steps_of(trainer)] == pytest.approx(losses, rel=1e-3)
    assert [line["grad_norm"] for line in steps_of(trainer)] == pytest.approx(norms, rel=1e-3)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-3, atol=1e-4, msg=name)


def train_plainly(rows: list[dict[str, Tensor]], *, max_norm: float) -> tuple[list[float], list[float], nn.Module]:
    model, losses, norms = Regression(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        loss = model(torch.stack([row["x"] for row in part]), torch.stack([row["labels"] for row in part]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        losses.append(float(loss))
    return losses, norms, model


def test_a_strategy_in_the_config_overrides_max_grad_norm(tmp_path: Path) -> None:
    callback = GuardCallback(GuardConfig(clip=ZClip()))
    train(Regression(), make_rows(), tmp_path, callback, max_grad_norm=1.0)
    assert callback.guard.config.clip == ZClip()


def test_true_losses_reach_other_callbacks_too_and_the_mean_recovers(tmp_path: Path) -> None:
    class Listener(transformers.TrainerCallback):
        heard: list[float]

        def __init__(self) -> None:
            self.heard = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.heard += [logs["loss"]] if "loss" in logs else []

    listener = Listener()
    rows = spoil(make_rows(), 3, "nan")
    trainer = train(Regression(), rows, tmp_path, listener, GuardCallback(), logging_steps=2)

    assert [math.isfinite(loss) for loss in listener.heard] == [True, False, True, True]
    assert [line["loss"] for line in steps_of(trainer)][2:] == listener.heard[2:]
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


def test_evaluation_reaches_the_guard_and_early_stopping_stops_the_trainer(tmp_path: Path) -> None:
    class Flat(Regression):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            result = super().forward(x, labels)
            return result if self.training else {**result, "loss": torch.ones(())}

    callback = GuardCallback(GuardConfig(policy=Policy(early_stopping_patience=2)))
    trainer = train(
        Flat(),
        make_rows(),
        tmp_path,
        callback,
        validation=make_rows(4),
        eval_strategy="steps",
        eval_steps=1,
        num_train_epochs=3,
        label_names=["labels"],
    )
    assert callback.guard.best is not None
    assert trainer.state.global_step == 3


# --- resume ---------------------------------------------------------------------------------------------------------


def test_a_resumed_training_continues_with_the_state_of_the_guard(tmp_path: Path) -> None:
    config = GuardConfig(clip=ZClip())
    rows = spoil(make_rows(), 1, "nan")
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    straight = GuardCallback(config)
    whole = train(Regression(), rows, tmp_path / "whole", straight, **options)

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    train(Regression(), rows, tmp_path / "parts", GuardCallback(config), Stop(), **options)
    resumed = GuardCallback(config)
    rest = train(Regression(), rows, tmp_path / "parts", resumed, resume=True, **options)

    assert_equal(state_of(rest), state_of(whole))
    stats, expected = resumed.guard.stats(), straight.guard.stats()
    assert stats["num_skipped"] == 1, "from before the checkpoint"
    names = expected.keys() - {"num_incidents"}  # incidents are those of this process
    assert {name: stats[name] for name in names} == {name: expected[name] for name in names}


def test_a_failed_save_neither_ends_the_training_nor_leaves_a_state_that_resume_would_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows, save = make_rows(), torch.save

    def fill_the_disk(thing: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if not str(path).startswith(str(tmp_path)) or "steadygrad" not in Path(path).name:
            return save(thing, path, *args, **kwargs)
        Path(path).write_bytes(b"PK half of a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fill_the_disk)
    callback = GuardCallback()
    train(Regression(), rows, tmp_path, callback, save_strategy="steps", save_steps=4)
    monkeypatch.undo()
    assert callback.guard.stats()["num_steps"] == len(rows) // BATCH
    assert [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()] != []
    assert list(tmp_path.rglob("steadygrad*")) == []

    resumed = GuardCallback()
    train(Regression(), rows, tmp_path, resumed, resume=str(tmp_path / "checkpoint-4"))
    assert resumed.guard.stats()["num_steps"] == len(rows) // BATCH - 4, "it begins with what it sees"


# --- the rest -------------------------------------------------------------------------------------------------------


def test_steadygrad_off_leaves_the_trainer_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(Regression(), make_rows(), tmp_path, max_grad_norm=0.1)
    callback = GuardCallback()
    train(Regression(), make_rows(), tmp_path, callback)
    monkeypatch.setenv("STEADYGRAD", "off")
    off = train(Regression(), make_rows(), tmp_path, callback, max_grad_norm=0.1)
    assert_equal(state_of(off), state_of(plain))


def test_using_the_guard_too_early_raises_an_error() -> None:
    with pytest.raises(UsageError, match=r"during or after train\(\)"):
        _ = GuardCallback().guard


def test_outside_of_a_trainer_the_callback_says_what_it_needs() -> None:
    control = transformers.TrainerControl()
    with pytest.raises(UsageError, match=r"transformers\.Trainer"):
        GuardCallback().on_train_begin(None, transformers.TrainerState(), control)


# --- warnings -------------------------------------------------------------------------------------------------------


def test_a_zero_loss_at_every_step_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Regression):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {**super().forward(x, labels), "loss": self.net(x).sum() * 0.0}

    with caplog.at_level("WARNING", logger="steadygrad"):
        train(Silent(), make_rows(), tmp_path, GuardCallback(), logging_steps=100)
    (message,) = [record.getMessage() for record in caplog.records if "exactly 0" in record.getMessage()]
    assert "labels are not all masked (-100)" in message


def test_a_nonfinite_norm_in_the_log_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    callback = GuardCallback()
    with caplog.at_level("WARNING", logger="steadygrad"):
        for _ in range(2):
            logs = {"loss": 0.7, "grad_norm": float("nan")}
            callback.on_log(None, transformers.TrainerState(global_step=7), None, logs=logs)
    assert [record.getMessage().partition(".")[0] for record in caplog.records] == ["step 7: grad_norm is nan"]


def test_the_old_name_is_the_same_class() -> None:
    assert GradientMonitoringCallback is GuardCallback
