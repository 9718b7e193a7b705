"""GuardCallback with manual optimization, several optimizers, or half precision."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_trainings import (
    NUM_BATCHES,
    Classifier,
    ListLogger,
    ManualClassifier,
    assert_equal,
    fit,
    is_finite,
    make_batches,
    spoil,
    state_of,
)
from torch import Tensor, nn

from steadygrad import GuardConfig, Severity
from steadygrad.adapters.lightning import GuardCallback


class Gan(pl.LightningModule):
    """Two players, two optimizers, each with its own step; one player's loss can be made bad."""

    def __init__(self, bad: tuple[str, int] | None = None, *, toggles: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.bad, self.toggles = bad, toggles

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        critic, generator = self.optimizers()
        real = batch[0]
        critic.zero_grad()
        loss = self.critic(self.generator(real).detach()).mean() - self.critic(real).mean()
        self.manual_backward(self._spoil(loss, "critic", batch_idx))
        critic.step()
        generator.zero_grad()
        if self.toggles:  # Lightning's advice: keep the critic's gradients
            self.toggle_optimizer(generator)
        self.manual_backward(self._spoil(-self.critic(self.generator(real)).mean(), "generator", batch_idx))
        generator.step()
        if self.toggles:
            self.untoggle_optimizer(generator)

    def _spoil(self, loss: Tensor, who: str, batch_idx: int) -> Tensor:
        return loss * math.nan if self.bad == (who, batch_idx) else loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.critic.parameters(), lr=1e-2),
            torch.optim.AdamW(self.generator.parameters(), lr=1e-2),
        ]


# --- manual optimization --------------------------------------------------------------------------------------------


def test_a_quiet_manual_run_is_bit_identical() -> None:
    plain, guarded, callback = ManualClassifier(), ManualClassifier(), GuardCallback()
    expected = state_of(plain, fit(plain, make_batches()))
    found = state_of(guarded, fit(guarded, make_batches(), callback))
    assert_equal(found, expected)
    assert callback.guard.stats()["num_steps"] == NUM_BATCHES
    assert not callback.guard.incidents


@pytest.mark.parametrize("fault", ["nan", "masked", "overflow"])
def test_a_bad_batch_leaves_no_trace_in_a_manual_run(fault: str) -> None:
    batches = make_batches()
    spoiled = [spoil(batch, fault) if i == 3 else batch for i, batch in enumerate(batches)]
    plain, guarded, without, callback = ManualClassifier(), ManualClassifier(), ManualClassifier(), GuardCallback()
    fit(plain, spoiled)
    assert not is_finite(plain)

    found = state_of(guarded, fit(guarded, spoiled, callback))
    del batches[3]
    expected = state_of(without, fit(without, batches))

    assert_equal(found, expected)
    assert {f.step for f in callback.guard.findings} == {3}
    assert callback.guard.stats()["num_skipped"] == 1


def test_a_closure_given_to_the_optimizer_runs_once() -> None:
    class Closing(ManualClassifier):
        num_calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> None:
                self.num_calls += 1
                optimizer.zero_grad()
                self.manual_backward(self.compute_loss(batch))

            optimizer.step(closure=closure)

    plain, guarded = Closing(), Closing()
    expected = state_of(plain, fit(plain, make_batches()))
    found = state_of(guarded, fit(guarded, make_batches(), GuardCallback()))
    assert_equal(found, expected)
    assert guarded.num_calls == NUM_BATCHES


# --- several optimizers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("toggles", [True, False])
def test_a_quiet_gan_is_bit_identical(toggles: bool) -> None:
    plain, guarded, callback = Gan(toggles=toggles), Gan(toggles=toggles), GuardCallback()
    expected = state_of(plain, fit(plain, make_batches()))
    found = state_of(guarded, fit(guarded, make_batches(), callback))
    assert_equal(found, expected)
    assert [guard.stats()["num_steps"] for guard in callback.guards] == [NUM_BATCHES, NUM_BATCHES]
    if toggles:
        assert all(f.severity is Severity.INFO for guard in callback.guards for f in guard.findings)


@pytest.mark.parametrize("who", ["critic", "generator"])
def test_a_bad_loss_of_one_player_skips_only_that_player(who: str, tmp_path: Path) -> None:
    plain, guarded = Gan((who, 3)), Gan((who, 3))
    callback = GuardCallback(run_dir=tmp_path / "run")
    fit(plain, make_batches())
    assert not is_finite(plain)

    fit(guarded, make_batches(), callback)

    assert is_finite(guarded)
    skipped = [guard.stats()["num_skipped"] for guard in callback.guards]
    assert skipped == ([1, 0] if who == "critic" else [0, 1])
    number = skipped.index(1)
    lines = (tmp_path / "run" / f"optimizer_{number}" / "steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if json.loads(line)["skipped"]] == [3]


def test_the_numbers_of_each_optimizer_are_logged_under_its_name() -> None:
    logger = ListLogger()
    fit(Gan(), make_batches(), GuardCallback(), logger=logger)
    names = {name for line in logger.lines for name in line if name.startswith("grad/global_norm")}
    assert names == {"grad/global_norm/optimizer_0", "grad/global_norm/optimizer_1"}


# --- half precision -------------------------------------------------------------------------------------------------


def half(init_scale: float) -> MixedPrecision:
    """Use real fp16 with a scaler: `precision="16-mixed"` would silently be bf16 on a CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("init_scale", [2.0**8, 2.0**30], ids=["fits", "overflows"])
def test_fp16_is_bit_identical_during_the_search_for_the_loss_scale(fused: bool, init_scale: float) -> None:
    # A skip of the plain scaler changes BatchNorm's statistics, ours restores them: so no BatchNorm here.
    plain, guarded = (Classifier(fused=fused, interval="epoch", norm=False) for _ in range(2))
    precisions = half(init_scale), half(init_scale)
    callback = GuardCallback()

    expected = state_of(plain, fit(plain, make_batches(24), plugins=[precisions[0]]))
    found = state_of(guarded, fit(guarded, make_batches(24), callback, plugins=[precisions[1]]))

    assert precisions[0].scaler.get_scale() == precisions[1].scaler.get_scale()
    assert_equal(found, expected)
    assert all(f.severity is Severity.INFO for f in callback.guard.findings)
    assert (callback.guard.stats()["num_skipped"] > 0) == (init_scale > 2.0**20)


def test_losses_and_norms_under_a_scaler_are_unscaled() -> None:
    logger, callback = ListLogger(), GuardCallback()
    fit(Classifier(), make_batches(2), callback, plugins=[half(2.0**8)], logger=logger)
    line = next(line for line in logger.lines if "grad/global_norm" in line)
    assert callback.guard.last is not None
    assert line["grad/global_norm"] < 5
    assert callback.guard.last.loss == pytest.approx(logger.lines[-1]["train_loss"], rel=1e-3)
    assert callback.guard.last.loss_scale == 2.0**8


def test_fused_clipping_under_fp16_raises_in_lightning_and_works_here() -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(Classifier(fused=True), make_batches(), plugins=[half(2.0**8)], gradient_clip_val=0.3)

    callback, module = GuardCallback(), Classifier(fused=True)
    fit(module, make_batches(), callback, plugins=[half(2.0**8)], gradient_clip_val=0.3)

    assert is_finite(module)
    assert callback.guard.stats()["num_clipped"] == NUM_BATCHES
    assert callback.guard.last is not None
    assert callback.guard.last.clip_coefficient == pytest.approx(0.3 / callback.guard.last.grad_norm, rel=1e-4)


def test_a_bad_batch_under_fp16_does_not_change_the_scale() -> None:
    batches = make_batches()
    batches[3] = spoil(batches[3], "nan")
    precision, module, callback = half(2.0**8), Classifier(), GuardCallback(GuardConfig(clip=None))
    fit(module, batches[:5], callback, plugins=[precision])
    assert is_finite(module)
    assert callback.guard.stats()["num_skipped"] == 1
    assert precision.scaler.get_scale() == 2.0**9, "three good steps let it grow, the bad loss did not lower it"
