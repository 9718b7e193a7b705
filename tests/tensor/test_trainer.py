"""Trainer: the same weights as a plain loop, exact resume from anywhere, stages, averages, early stopping, files."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import os
import pickle
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from steadygrad import ConfigError, GuardConfig, Trainer, TrainerConfig, UsageError
from steadygrad.cli import main
from steadygrad.errors import CheckpointError
from steadygrad.testing import poison_batches
from steadygrad.trainer import Stage, load_trained

CONFIG = TrainerConfig(epochs=2, learning_rate=0.01, device="cpu", eval_every=None, save_every=None)
STAGES = (
    Stage("frozen", 2, prepare=lambda model: freeze(model, True)),
    Stage("free", 2, prepare=lambda model: freeze(model, False)),
)


class Crash(Exception):
    """Simulates the death of the process."""


def freeze(model: nn.Module, frozen: bool) -> None:
    model.get_submodule("0").requires_grad_(not frozen)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))


def make_data(num: int = 26) -> TensorDataset:
    x = torch.randn(num, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def make_loaders(batch_size: int = 4) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(make_data(), batch_size, shuffle=True), DataLoader(make_data(), 13, shuffle=True)


def make_trainer(config: TrainerConfig = CONFIG, **options: Any) -> Trainer:
    return Trainer(make_model(), config, loss_fn=mse_loss, tell=lambda _: None, **options)


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [value.detach().clone() for value in trainer.model.state_dict().values()]


def assert_same(one: Trainer, other: Trainer) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(other)))
    assert one.train_history == other.train_history
    assert one.val_history == other.val_history
    assert one.step_history == other.step_history
    if one.ema is not None and other.ema is not None:
        assert all(torch.equal(a, b) for a, b in zip(one.ema.state_dict().values(), other.ema.state_dict().values()))
    states = [t.optimizer.state_dict()["state"] for t in (one, other)]  # type: ignore[union-attr]
    assert all(torch.equal(states[0][k][n], states[1][k][n]) for k in states[0] for n in states[0][k])


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_a_quiet_training_gives_the_weights_of_the_plain_loop() -> None:
    model, (loader, _) = make_model(), make_loaders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=1e-4)
    torch.manual_seed(0)
    for _ in range(2):
        for x, y in loader:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    trainer = make_trainer(dataclasses.replace(CONFIG, max_grad_norm=None))

    stats = trainer.train(make_loaders()[0])

    assert stats["num_steps"] == 14
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights_of(trainer)))


def test_accumulated_batches_equal_one_large_batch_and_a_short_rest_counts_fully() -> None:
    config = dataclasses.replace(CONFIG, epochs=1, accumulation_steps=3, max_grad_norm=None)
    plain = nn.Linear(6, 1)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    data = make_data(20)
    for rows in (slice(0, 12), slice(12, 20)):  # 3 and 2 batches of 4
        mse_loss(plain(data.tensors[0][rows]), data.tensors[1][rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = nn.Linear(6, 1)
    model.load_state_dict(start)
    stage = Stage(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    trainer = Trainer(model, config, loss_fn=mse_loss, stages=[stage])

    stats = trainer.train(DataLoader(data, 4))

    assert stats["num_steps"] == 2
    for own, wanted in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-6)  # a mean of means, in another order of summation


def test_evaluating_more_often_does_not_change_the_training() -> None:
    often = make_trainer(dataclasses.replace(CONFIG, eval_every=1))
    often.train(*make_loaders())
    never = make_trainer()

    never.train(make_loaders()[0])

    assert len(often.step_history) == 14
    assert all(torch.equal(a, b) for a, b in zip(weights_of(often), weights_of(never)))


def test_a_bad_batch_ruins_an_unguarded_training_and_is_skipped_by_the_trainer() -> None:
    data = list(make_loaders()[0])
    ends = {}
    for protect in (True, False):
        trainer = make_trainer(dataclasses.replace(CONFIG, protect=protect))
        trainer.train(list(poison_batches(data, at={3})))
        ends[protect] = trainer.monitor_training_health()["parameters_healthy"]
        assert trainer.is_protected is protect

    assert ends == {True: True, False: False}
    assert "STEADYGRAD" not in os.environ


def test_norms_and_losses_of_skipped_steps_are_excluded_from_averages() -> None:
    trainer = make_trainer()

    trainer.train(list(poison_batches(list(make_loaders()[0]), at={3})))

    for epoch in trainer.train_history:
        assert epoch["num_skipped"] == 1
        assert math.isfinite(epoch["loss"])
        assert 0 < epoch["grad_norm_mean"] <= epoch["grad_norm_max"] < math.inf


def test_the_line_of_an_epoch_has_losses_and_mean_and_maximum_of_the_norm() -> None:
    printed: list[str] = []
    trainer = Trainer(make_model(), CONFIG, loss_fn=mse_loss, tell=printed.append)

    trainer.train(*make_loaders())

    last = trainer.train_history[-1]
    assert len(printed) == 2
    assert printed[-1].startswith(f"Epoch 2/2: loss={last['loss']:.4f}, val_loss=")
    assert f"grad avg={last['grad_norm_mean']:.4g} max={last['grad_norm_max']:.4g}, lr=0.01" in printed[-1]


def test_the_terms_of_a_loss_are_in_the_record(tmp_path: Path) -> None:
    class TwoTerms(Trainer):
        def compute_loss(self, batch: Any) -> Any:
            x, y = batch
            fit, size = mse_loss(self.model(x), y), self.model(x).square().mean()
            return fit + 0.1 * size, {"fit": fit, "size": size}

    TwoTerms(make_model(), CONFIG, run_dir=tmp_path).train(make_loaders()[0])

    line = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[-1])
    assert line["loss"] == pytest.approx(line["extra"]["fit"] + 0.1 * line["extra"]["size"], rel=0.3)  # dropout differs
    assert set(line["extra"]) == {"fit", "size"}


def test_a_model_may_compute_its_loss_from_a_dict_of_inputs() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 1)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": mse_loss(self.inner(x), y)}

    x, y = make_data().tensors
    stats = Trainer(Own(), CONFIG).train([{"x": x, "y": y}] * 3)

    assert stats["num_steps"] == 6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_half_precision_is_used_and_fp16_has_a_scaler(precision: str) -> None:
    seen = []

    class Watching(Trainer):
        def compute_loss(self, batch: Any) -> Any:
            out = self.model(batch[0])
            seen.append(out.dtype)
            return mse_loss(out.float(), batch[1])

    trainer = Watching(nn.Linear(6, 1), dataclasses.replace(CONFIG, epochs=1, precision=precision))
    trainer.train(DataLoader(make_data(), 13), DataLoader(make_data(), 13))

    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert (trainer.get_training_stats()["loss_scale"] is not None) is (precision == "fp16")


def test_auto_is_fp32_on_a_cpu() -> None:
    assert make_trainer(dataclasses.replace(CONFIG, precision="auto")).guard_config.autocast is None


def test_warm_up_and_cosine_change_the_rate_at_each_applied_step() -> None:
    rates: list[float] = []

    class Watching(Trainer):
        def end_step(self, record: Any) -> None:
            rates.append(record.learning_rates[0])

    config = dataclasses.replace(CONFIG, warmup_steps=4, schedule="cosine")
    Watching(make_model(), config, loss_fn=mse_loss).train(make_loaders()[0])

    assert rates[:4] == pytest.approx([0.002, 0.004, 0.006, 0.008])
    assert rates[4] == pytest.approx(0.01)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert rates[-1] < 0.0005


# --- stages, averages, stopping ---------------------------------------------------------------------------------------


def test_a_stage_trains_what_it_prepares_and_step_numbers_continue(tmp_path: Path) -> None:
    frozen: list[tuple[str, bool]] = []

    class Watching(Trainer):
        def end_epoch(self, metrics: Any) -> None:
            frozen.append((metrics["stage"], torch.equal(self.model.get_parameter("0.weight"), start)))

    trainer = Watching(make_model(), CONFIG, stages=STAGES, loss_fn=mse_loss, run_dir=tmp_path)
    start = trainer.model.get_parameter("0.weight").detach().clone()
    stats = trainer.train(make_loaders()[0])

    assert frozen == [("frozen", True), ("frozen", True), ("free", False), ("free", False)]
    assert stats["num_steps"] == 28
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(28))
    assert [epoch["epoch"] for epoch in trainer.train_history] == [0, 1, 2, 3]


def test_a_second_training_starts_with_the_first_stage_again() -> None:
    trainer = make_trainer(stages=STAGES)
    trainer.train(make_loaders()[0])
    trainer.train(make_loaders()[0])
    assert [entry["stage"] for entry in trainer.train_history] == ["frozen", "frozen", "free", "free"] * 2


def test_incidents_of_every_stage_are_reported() -> None:
    trainer = make_trainer(stages=STAGES)

    trainer.train(list(poison_batches(list(make_loaders()[0]), at={3})))

    steps = {incident.step for incident in trainer.incidents if incident.finding.kind == "nonfinite_loss"}
    assert steps == {3, 10, 17, 24}


def test_the_averaged_weights_are_evaluated() -> None:
    trainer = make_trainer(dataclasses.replace(CONFIG, ema_decay=0.9))
    trainer.train(*make_loaders())
    assert trainer.ema is not None
    x, y = make_data().tensors
    with torch.no_grad():
        averaged, last = (float(mse_loss(model.eval()(x), y)) for model in (trainer.ema.module, trainer.model))

    assert trainer.val_history[-1]["loss"] == pytest.approx(averaged)
    assert averaged != pytest.approx(last, rel=1e-3)


def test_patience_ends_a_stage_and_the_next_one_starts() -> None:
    class Worse(Trainer):
        def evaluate(self, val_loader: Any) -> dict[str, float]:
            return {"loss": float(len(self.val_history))}

    stages = [dataclasses.replace(stage, epochs=10) for stage in STAGES]
    trainer = Worse(make_model(), dataclasses.replace(CONFIG, patience=2), stages=stages, loss_fn=mse_loss)
    trainer.train(*make_loaders())

    assert [epoch["stage"] for epoch in trainer.train_history] == ["frozen"] * 3 + ["free"] * 3


def test_modules_kept_in_eval_mode_by_a_stage_stay_so_after_an_evaluation() -> None:
    stage = Stage(prepare=lambda model: model.get_submodule("1").eval() and None)
    trainer = make_trainer(stages=[stage])
    before = trainer.model.get_buffer("1.running_mean").clone()

    trainer.train(*make_loaders())

    assert torch.equal(trainer.model.get_buffer("1.running_mean"), before)
    assert trainer.model.get_submodule("2").training


# --- resume -----------------------------------------------------------------------------------------------------------

LONG = dataclasses.replace(CONFIG, accumulation_steps=2, eval_every=3, save_every=2, ema_decay=0.9, schedule="cosine")


def crash_at(call: int, how: Callable[[], None]) -> type[Trainer]:
    """A Trainer that fails in forward number `call`."""

    class Crashing(Trainer):
        num_calls = 0

        def compute_loss(self, batch: Any) -> Any:
            if torch.is_grad_enabled():
                self.num_calls += 1
                if self.num_calls == call:
                    how()
            return super().compute_loss(batch)

    return Crashing


def crash() -> None:
    raise Crash


@pytest.mark.parametrize("call", [5, 12, 14, 15, 18, 27])
def test_a_training_killed_anywhere_continues_bit_for_bit(call: int, tmp_path: Path) -> None:
    whole = make_trainer(LONG, stages=STAGES, run_dir=tmp_path / "whole")
    whole.train(*make_loaders())
    crashing = crash_at(call, crash)(make_model(), LONG, stages=STAGES, loss_fn=mse_loss, run_dir=tmp_path / "cut")
    with pytest.raises(Crash):
        crashing.train(*make_loaders())

    resumed = make_trainer(LONG, stages=STAGES, run_dir=tmp_path / "cut")
    step = resumed.resume("latest")
    resumed.train(*make_loaders())

    assert step is not None
    assert step >= 2
    assert_same(whole, resumed)


class Noisy(TensorDataset):
    """Draws a random number for each row, where it is loaded."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.rand(()), y


@pytest.fixture
def _no_workers_stay() -> Iterator[None]:
    """End persistent workers that a crash has left: they hold what they inherited, such as the pipe to a browser."""
    yield
    for one in gc.get_objects():
        if type(one) is _MultiProcessingDataLoaderIter:
            one._shutdown_workers()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("_no_workers_stay")
@pytest.mark.parametrize("num_workers", [0, 1], ids=["own generator", "persistent workers"])
def test_a_training_killed_between_two_stages_continues_with_the_loader_as_it_was(
    num_workers: int, tmp_path: Path
) -> None:
    """The first stage's guard restores the loader's random state, and the second one makes the next pass."""

    def load() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        data, stays = Noisy(*make_data().tensors), num_workers > 0
        return DataLoader(data, 4, shuffle=True, generator=generator, num_workers=num_workers, persistent_workers=stays)

    whole = make_trainer(stages=STAGES, run_dir=tmp_path / "whole")
    whole.train(load())
    crashing = crash_at(15, crash)(make_model(), CONFIG, stages=STAGES, loss_fn=mse_loss, run_dir=tmp_path / "cut")
    with pytest.raises(Crash):
        crashing.train(load())

    resumed = make_trainer(stages=STAGES, run_dir=tmp_path / "cut")
    assert resumed.resume() == 14  # both epochs of the first stage
    resumed.train(load())

    assert_same(whole, resumed)


@pytest.mark.parametrize("call", [6, 12, 20])
def test_a_training_stopped_by_a_signal_continues_bit_for_bit(call: int, tmp_path: Path) -> None:
    """Call 6 ends step 3, after which the signal prevents a due evaluation."""
    whole = make_trainer(LONG, stages=STAGES, run_dir=tmp_path / "whole")
    whole.train(*make_loaders())
    stop = crash_at(call, lambda: signal.raise_signal(signal.SIGTERM))
    stopped = stop(make_model(), LONG, stages=STAGES, loss_fn=mse_loss, run_dir=tmp_path / "cut", tell=lambda _: None)
    with pytest.raises(SystemExit) as ended:
        stopped.train(*make_loaders())
    assert ended.value.code == 75

    resumed = make_trainer(LONG, stages=STAGES, run_dir=tmp_path / "cut")
    resumed.resume()
    resumed.train(*make_loaders())

    assert_same(whole, resumed)


class Interrupted(Trainer):
    """A validation loss that rises, and a process that ends where `at` says: in a method at a step, in some way."""

    at: tuple[str, int, Callable[[], None]] | None = None

    def evaluate(self, val_loader: Any) -> dict[str, float]:
        self._end_at("evaluate")
        assert self.guard is not None
        return {"loss": float(self.guard.num_steps)}

    def describe_epoch(self, metrics: Any) -> str:
        self._end_at("describe_epoch")
        return super().describe_epoch(metrics)

    def end_epoch(self, metrics: Any) -> None:
        self._end_at("end_epoch")

    def _end_at(self, method: str) -> None:
        assert self.guard is not None
        if self.at is not None and (method, self.guard.num_steps) == self.at[:2]:
            self.at[2]()


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


PATIENT = dataclasses.replace(CONFIG, patience=1, eval_every=3, save_every=3, schedule="cosine")


@pytest.mark.parametrize(
    ("config", "method", "step", "how"),
    [
        # Steps 6 and 12 end the stages: patience runs out in the middle of an epoch of 7 batches, and a save is due
        (PATIENT, "end_epoch", 6, crash),
        (PATIENT, "describe_epoch", 12, crash),
        (PATIENT, "evaluate", 3, terminate),
        (PATIENT, "evaluate", 6, terminate),
        (PATIENT, "evaluate", 12, terminate),
        (PATIENT, "end_epoch", 6, terminate),
        (CONFIG, "evaluate", 7, terminate),
        (CONFIG, "evaluate", 28, terminate),
        (CONFIG, "end_epoch", 14, terminate),
        # The newest checkpoint ends the first stage
        (CONFIG, "evaluate", 21, crash),
        (dataclasses.replace(CONFIG, max_steps=10), "evaluate", 10, crash),
        (dataclasses.replace(CONFIG, max_steps=10), "evaluate", 10, terminate),
    ],
)
def test_a_training_that_ends_while_it_evaluates_or_ends_an_epoch_continues_bit_for_bit(
    config: TrainerConfig, method: str, step: int, how: Callable[[], None], tmp_path: Path
) -> None:
    def make(folder: str) -> Interrupted:
        return Interrupted(make_model(), config, loss_fn=mse_loss, stages=STAGES, run_dir=tmp_path / folder)

    def make_own_loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
        # With a generator of its own, which the next stage must find as the stage before left it
        generator = torch.Generator().manual_seed(3)
        return DataLoader(make_data(), 4, shuffle=True, generator=generator), make_loaders()[1]

    whole, ended, resumed = make("whole"), make("cut"), make("cut")
    whole.train(*make_own_loaders())
    ended.at = method, step, how
    with pytest.raises((Crash, SystemExit)):
        ended.train(*make_own_loaders())

    resumed.resume()
    resumed.train(*make_own_loaders())

    assert_same(whole, resumed)
    assert whole.guard is not None
    assert resumed.guard is not None
    assert whole.guard.epoch == resumed.guard.epoch


def test_a_higher_step_limit_continues_in_the_middle_of_the_epoch(tmp_path: Path) -> None:
    config = dataclasses.replace(LONG, schedule="constant")
    whole = make_trainer(config)
    whole.train(*make_loaders())
    limited = make_trainer(dataclasses.replace(config, max_steps=5), run_dir=tmp_path)
    assert limited.train(*make_loaders())["num_steps"] == 5

    resumed = make_trainer(config, run_dir=tmp_path)
    assert resumed.resume() == 5
    resumed.train(*make_loaders())

    assert_same(whole, resumed)


def test_a_new_directory_has_nothing_to_resume_and_a_wrong_path_is_reported(tmp_path: Path) -> None:
    trainer = make_trainer(run_dir=tmp_path / "new")
    assert trainer.resume() is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        trainer.resume(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="no run directory to resume from"):
        make_trainer().resume()


def test_a_checkpoint_of_a_removed_stage_is_reported(tmp_path: Path) -> None:
    make_trainer(stages=STAGES, run_dir=tmp_path).train(make_loaders()[0])
    fewer = make_trainer(stages=STAGES[1:], run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"saved in stage 2, and this training has 1\. Resume with the same"):
        fewer.resume()


def test_the_last_three_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    trainer = make_trainer(dataclasses.replace(CONFIG, epochs=6), run_dir=tmp_path)

    trainer.train(*make_loaders())

    assert trainer.guard is not None
    steps = [info.step for info in trainer.guard.checkpoints.list()]
    assert steps[-3:] == [28, 35, 42]
    assert len(steps) <= 5


def test_the_best_weights_of_a_run_can_be_loaded_averaged_if_available(tmp_path: Path) -> None:
    trainer = make_trainer(dataclasses.replace(CONFIG, ema_decay=0.9, epochs=3), run_dir=tmp_path)
    trainer.train(*make_loaders())
    model = make_model()

    step = load_trained(tmp_path, model)

    x, y = make_data().tensors
    with torch.no_grad():
        loss = float(mse_loss(model.eval()(x), y))
    best = min(trainer.val_history, key=lambda entry: entry["loss"])
    assert (step, loss) == (best["step"], pytest.approx(best["loss"]))


# --- files and queries ------------------------------------------------------------------------------------------------


def test_a_saved_file_restores_model_optimizer_and_history(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.train(*make_loaders())
    trainer.save_checkpoint(tmp_path / "models" / "model.pth")
    other = make_trainer()

    assert other.load_checkpoint(tmp_path / "models" / "model.pth") is True
    assert_same(trainer, other)


def test_nonfinite_values_are_not_written_to_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.get_parameter("4.weight")[0, 2] = math.nan
    trainer.save_checkpoint(tmp_path / "model.pth", include_optimizer=False)

    saved = torch.load(tmp_path / "model.pth", weights_only=True)
    assert saved["model_state_dict"]["4.weight"][0, 2] == 0.0
    assert "optimizer_state_dict" not in saved
    assert "NaN/Inf detected in parameter 4.weight, cleaning before save" in caplog.messages
    assert "Model contained NaN/Inf values that were cleaned before saving" in caplog.messages


def test_nonfinite_values_are_not_read_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = make_model().state_dict()
    state["4.bias"][0] = math.inf
    torch.save({"model_state_dict": state}, tmp_path / "model.pth")
    trainer = make_trainer()

    assert trainer.load_checkpoint(tmp_path / "model.pth") is True
    assert trainer.model.get_parameter("4.bias")[0] == 0.0
    assert "NaN/Inf detected in parameter 4.bias, cleaning after load" in caplog.messages


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("echo evil > evil.txt",))


def test_a_file_that_wants_to_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model_state_dict": Evil()}, "torch.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "junk.pth").write_bytes(b"no checkpoint")
    trainer = make_trainer()
    before = weights_of(trainer)

    for name in ("torch.pth", "plain.pth", "junk.pth", "missing.pth"):
        assert trainer.load_checkpoint(name) is False, name

    assert not (tmp_path / "evil.txt").exists()
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(trainer)))
    assert len([m for m in caplog.messages if "cannot be loaded" in m]) == 4


def test_untrainable_inputs_are_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=r"model must be a torch.nn.Module, got int"):
        Trainer(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a TrainerConfig"):
        Trainer(model, {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="loss_fn must be a function"):
        Trainer(model, loss_fn=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="training loader has no batch"):
        Trainer(model, TrainerConfig(device="cpu")).train([])


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.save({"model_state_dict": nn.Linear(2, 2).state_dict()}, tmp_path / "other.pth")

    assert make_trainer().load_checkpoint(tmp_path / "other.pth") is False


def test_health_is_available_before_and_after_training() -> None:
    trainer = make_trainer()
    parts = {"model_healthy", "gradients_healthy", "losses_healthy", "parameters_healthy", "overall_healthy"}
    assert trainer.monitor_training_health() == dict.fromkeys(parts, True)
    with torch.no_grad():
        trainer.model.get_parameter("4.bias")[0] = math.nan
    assert trainer.monitor_training_health()["overall_healthy"] is False

    trained = make_trainer()
    trained.train(make_loaders()[0])

    assert trained.monitor_training_health() == dict.fromkeys(parts, True)
    assert trained.get_training_stats()["current_gradient_norm"] > 0
    assert trained.get_training_stats()["current_learning_rate"] == 0.01


def test_explicit_guard_settings_win_over_the_trainers() -> None:
    config = dataclasses.replace(CONFIG, max_grad_norm=0.5, patience=4)
    kept = make_trainer(config, guard_config=GuardConfig(clip=None)).guard_config
    own = make_trainer(config).guard_config

    assert (kept.clip, kept.policy.early_stopping_patience) == (None, 4)
    assert own.clip is not None
    assert getattr(own.clip, "max_norm", None) == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("max_steps", -1),
        ("learning_rate", 0.0),
        ("weight_decay", -1.0),
        ("max_grad_norm", 0.0),
        ("precision", "fp8"),
        ("schedule", "linear"),
        ("ema_decay", 1.0),
        ("patience", 0),
        ("seed", "x"),
        ("protect", "no"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"TrainerConfig\.{name} must .*got"):
        TrainerConfig(**{name: value})


def test_a_missing_device_is_reported() -> None:
    with pytest.raises(UsageError, match="cannot train on device 'nowhere'"):
        make_trainer(dataclasses.replace(CONFIG, device="nowhere"))


def test_an_empty_validation_loader_is_reported() -> None:
    with pytest.raises(UsageError, match="the validation loader has no batch"):
        make_trainer().train(make_loaders()[0], [])


def test_the_report_of_a_training_shows_its_validation_curve(tmp_path: Path) -> None:
    trainer = make_trainer(dataclasses.replace(CONFIG, eval_every=3), run_dir=tmp_path / "run")
    trainer.train(*make_loaders())
    assert main(["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    drawn = data["runs"]["run0"]["validation"]["val_loss"]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert drawn["x"] == [line["step"] for line in written]
    assert drawn["y"] == pytest.approx([line["val_loss"] for line in written], rel=1e-5)  # six digits are drawn
    assert len(drawn["x"]) >= 4
