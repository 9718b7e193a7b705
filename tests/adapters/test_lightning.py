"""GuardCallback in real Lightning trainings: faults, clipping, schedulers, logs, resume, and a quiet run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_trainings import (
    NUM_BATCHES,
    Classifier,
    ListLogger,
    assert_equal,
    fit,
    is_finite,
    load,
    make_batches,
    spoil,
    state_of,
)
from torch import Tensor, nn

from steadygrad import Action, ClipValue, FixedNorm, GuardConfig, NonFiniteError, Policy, SnapshotConfig, ZClip
from steadygrad.adapters.lightning import GuardCallback

FAULTS = {
    "nan": {"nonfinite_loss", "nonfinite_gradient", "nonfinite_input"},
    "masked": {"nonfinite_loss", "nonfinite_gradient", "all_labels_masked"},
    "overflow": {"nonfinite_loss", "nonfinite_gradient"},
}


# --- quiet ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 1e9},
        {"max_epochs": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_quiet_run_is_bit_identical(options: dict[str, Any]) -> None:
    plain, guarded, callback = Classifier(), Classifier(), GuardCallback()

    expected = state_of(plain, fit(plain, make_batches(), **options))
    found = state_of(guarded, fit(guarded, make_batches(), callback, **options))

    assert_equal(found, expected)
    assert callback.guard.stats()["num_steps"] == math.ceil(
        NUM_BATCHES / options.get("accumulate_grad_batches", 1)
    ) * options.get("max_epochs", 1)
    assert not callback.guard.incidents


def test_the_random_numbers_of_dropout_equal_those_of_the_plain_run() -> None:
    class Dropped(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(2, nn.Dropout(0.3))

    plain, guarded = Dropped(), Dropped()
    torch.manual_seed(5)
    expected = state_of(plain, fit(plain, make_batches()))
    torch.manual_seed(5)
    found = state_of(guarded, fit(guarded, make_batches(), GuardCallback(GuardConfig(clip=None))))

    assert_equal(found, expected)


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_batch_ruins_the_plain_run_but_not_the_guarded_one(fault: str) -> None:
    batches = make_batches()
    spoiled = [spoil(batch, fault) if i == 3 else batch for i, batch in enumerate(batches)]
    plain, guarded, without, callback = Classifier(), Classifier(), Classifier(), GuardCallback()

    fit(plain, spoiled)
    assert not is_finite(plain)

    found = state_of(guarded, fit(guarded, spoiled, callback))
    del batches[3]
    expected = state_of(without, fit(without, batches))

    assert is_finite(guarded)
    assert_equal(found, expected)  # including the learning rate of the schedule
    guard = callback.guard
    assert FAULTS[fault] <= {f.kind for f in guard.findings}
    assert {f.step for f in guard.findings} == {3}
    assert {i.outcome.action for i in guard.incidents} <= {Action.SKIP, Action.NONE}
    assert (guard.stats()["num_steps"], guard.stats()["num_skipped"]) == (NUM_BATCHES, 1)


def test_the_cause_of_a_bad_step_is_found_in_the_users_line() -> None:
    class Fragile(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.compute_loss(batch)
            self.log("train_loss", loss)  # which a replay must not repeat
            return loss + (self.net[3].bias.sum() - batch_idx).square().neg().log() if batch_idx == 3 else loss

    logger, callback = ListLogger(), GuardCallback()
    fit(Fragile(), make_batches(), callback, logger=logger)

    causes = [i.cause for i in callback.guard.incidents if i.cause is not None]
    assert causes
    assert causes[0].op == "aten.log"
    assert causes[0].source is not None
    assert ".neg().log()" in causes[0].source
    assert sum("train_loss" in line for line in logger.lines) == NUM_BATCHES


def test_one_bad_microbatch_skips_its_step() -> None:
    batches = make_batches()
    spoiled = [spoil(batch, "nan") if i == 3 else batch for i, batch in enumerate(batches)]
    guarded, without, callback = Classifier(), Classifier(), GuardCallback()

    found = state_of(guarded, fit(guarded, spoiled, callback, accumulate_grad_batches=2))
    expected = state_of(without, fit(without, batches[:2] + batches[4:], accumulate_grad_batches=2))

    assert_equal(found, expected)
    assert {f.step for f in callback.guard.findings} == {1}


def test_a_bad_first_step_causes_no_scheduler_warning() -> None:
    batches = make_batches()
    module = Classifier()
    fit(module, [spoil(batches[0], "nan"), *batches[1:]], GuardCallback())
    assert is_finite(module)


def test_raising_ends_the_fit_and_leaves_the_trainer_unchanged() -> None:
    module, callback = Classifier(), GuardCallback(GuardConfig(on_nonfinite=Action.RAISE))
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=0.5,
        callbacks=[callback],
    )

    with pytest.raises(NonFiniteError):
        trainer.fit(module, load([spoil(make_batches()[0], "nan")]))

    assert trainer.gradient_clip_val == 0.5
    assert "optimizer_step" not in vars(trainer.precision_plugin)
    assert "lr_scheduler_step" not in vars(module)
    assert is_finite(module)
    assert "exception" not in {f.kind for f in callback.guard.findings}


def test_an_exception_of_the_user_passes_through_and_is_recorded(tmp_path: Path) -> None:
    class Broken(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise ZeroDivisionError("mine")
            return self.compute_loss(batch)

    callback = GuardCallback(run_dir=tmp_path / "run")
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(Broken(), make_batches(), callback)

    (finding,) = callback.guard.findings
    assert (finding.kind, finding.step) == ("exception", 2)
    assert "ZeroDivisionError: mine" in (tmp_path / "run" / "incidents.jsonl").read_text()


def test_many_bad_batches_in_a_row_roll_back_and_the_run_finishes() -> None:
    batches = make_batches(60)
    spoiled = [spoil(batch, "nan") if 40 <= i < 46 else batch for i, batch in enumerate(batches)]
    policy = Policy(nonfinite_steps_to_scale_lr=2, nonfinite_steps_to_rollback=5, change_hyperparameters=False)
    callback = GuardCallback(
        GuardConfig(clip=None, policy=policy, snapshots=SnapshotConfig(every=10, good_after=5, skip_batches=3))
    )
    module = Classifier(interval="epoch")

    fit(module, spoiled, callback)

    assert is_finite(module)
    rollbacks = [i for i in callback.guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert len(rollbacks) == 1
    assert rollbacks[0].step == 44
    assert callback.guard.stats()["num_steps"] == 60


def test_a_training_step_without_a_loss_is_ignored() -> None:
    class Sometimes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return None if batch_idx % 2 else self.compute_loss(batch)

    plain, guarded, callback = Sometimes(interval="epoch"), Sometimes(interval="epoch"), GuardCallback()
    expected = state_of(plain, fit(plain, make_batches()))
    found = state_of(guarded, fit(guarded, make_batches(), callback))

    assert_equal(found, expected)
    assert callback.guard.stats()["num_steps"] == NUM_BATCHES / 2


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_trainers_clipping_is_used(algorithm: str) -> None:
    limit = 0.3 if algorithm == "norm" else 0.02
    options = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    plain, guarded, callback = Classifier(), Classifier(), GuardCallback(GuardConfig())

    expected = state_of(plain, fit(plain, make_batches(), **options))
    trainer = fit(guarded, make_batches(), callback, **options)

    strategy = FixedNorm(max_norm=limit) if algorithm == "norm" else ClipValue(value=limit)
    assert callback.guard.config.clip == strategy
    assert trainer.gradient_clip_val == limit, "it is the trainer's again"
    for name, value in state_of(guarded, trainer).items():
        # our norm is summed in float64, torch's in float32: the coefficient differs in its last bits
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_strategy_in_the_config_overrides_the_trainers_value() -> None:
    callback = GuardCallback(GuardConfig(clip=ZClip()))
    fit(Classifier(), make_batches(), callback, gradient_clip_val=0.5)
    assert callback.guard.config.clip == ZClip()


def test_without_a_config_only_the_trainers_clipping_applies() -> None:
    callback = GuardCallback()
    fit(Classifier(), make_batches(), callback)
    assert callback.guard.config.clip is None


# --- numbers --------------------------------------------------------------------------------------------------------


def test_logged_numbers_equal_those_of_a_plain_torch_loop() -> None:
    logger, batches = ListLogger(), make_batches()
    module = Classifier()
    reference = Classifier()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    losses, norms = [], []
    for batch in batches:
        loss = reference.compute_loss(batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        losses.append(float(loss))

    fit(module, batches, GuardCallback(), logger=logger, gradient_clip_val=0.5)

    lines = [line for line in logger.lines if "grad/global_norm" in line]
    assert [line["train_loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert [line["grad/global_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    assert [line["grad/clip_coefficient"] for line in lines] == pytest.approx([0.5 / n for n in norms], rel=1e-4)


def test_a_skipped_step_is_logged() -> None:
    logger, batches = ListLogger(), make_batches()
    batches[3] = spoil(batches[3], "nan")

    fit(Classifier(), batches, GuardCallback(), logger=logger)

    lines = [line for line in logger.lines if "grad/global_norm" in line]
    assert [line["health/num_skipped"] for line in lines] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert math.isnan(lines[3]["grad/global_norm"])


def test_validation_losses_reach_the_guard_and_early_stopping_stops_the_trainer() -> None:
    class Validated(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.tensor(1.0 + self.current_epoch))

    callback = GuardCallback(GuardConfig(policy=Policy(early_stopping_patience=2)))
    trainer = fit(Validated(), make_batches(2), callback, validation=make_batches(1), max_epochs=10)

    assert callback.guard.best is not None
    assert callback.guard.best[1] == 1.0
    assert trainer.current_epoch == 3
    trainer.validate(Validated(), load(make_batches(1)), verbose=False)  # after the fit: nothing is reported
    assert callback.guard.best[1] == 1.0


# --- resume ---------------------------------------------------------------------------------------------------------


def test_a_resumed_fit_continues_with_the_state_of_the_guard(tmp_path: Path) -> None:
    config = GuardConfig(clip=ZClip())
    batches = make_batches(6)
    batches[2] = spoil(batches[2], "nan")
    whole, straight = Classifier(), GuardCallback(config)
    expected = state_of(whole, fit(whole, batches, straight, max_epochs=4))

    first, second = GuardCallback(config), GuardCallback(config)
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    fit(Classifier(), batches, first, saver, max_epochs=2, enable_checkpointing=True)
    resumed = Classifier()
    trainer = fit(resumed, batches, second, max_epochs=4, ckpt_path=tmp_path / "last.ckpt")

    assert_equal(state_of(resumed, trainer), expected)
    assert _without_lists(second.guard.stats()) == _without_lists(straight.guard.stats())
    assert second.guard.stats()["num_skipped"] == 4, "two of them from before the checkpoint"
    assert _without_time(second.guard.state_dict()) == _without_time(straight.guard.state_dict())


def _without_lists(stats: dict[str, Any]) -> dict[str, Any]:
    """Return a state without findings and incidents, which are those of this process."""
    return {name: value for name, value in stats.items() if name != "num_incidents"}


def _without_time(state: Any) -> Any:
    """Return a state as comparable plain values; NaN equals itself."""
    if isinstance(state, dict):
        return {key: _without_time(value) for key, value in state.items() if "time" not in str(key)}
    if isinstance(state, list | tuple):
        return [_without_time(value) for value in state]
    if isinstance(state, Tensor):
        return _without_time(state.tolist())
    return repr(state)


# --- disabling it ---------------------------------------------------------------------------------------------------


def test_steadygrad_off_leaves_lightning_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    plain, guarded, callback = Classifier(), Classifier(), GuardCallback()

    expected = state_of(plain, fit(plain, make_batches(), gradient_clip_val=0.1))
    found = state_of(guarded, fit(guarded, make_batches(), callback, gradient_clip_val=0.1))

    assert_equal(found, expected)
    assert callback.guards == []


def test_microbatches_cannot_be_dropped_here() -> None:
    from steadygrad import ConfigError

    with pytest.raises(ConfigError, match="Lightning runs backward"):
        GuardCallback(dataclasses.replace(GuardConfig(), drop_bad_microbatches=True))
