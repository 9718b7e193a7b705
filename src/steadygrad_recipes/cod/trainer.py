"""CodTrainer: the shared Trainer with the loss, metrics, output and pictures of camouflage segmentation.

Everything numerical is left to the Guard. Without protection this is the loop that broke: it clips, checks loss and
gradients before each step, and ends with an error at the first value that is not finite.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.config.switch import is_switched_off
from steadygrad.facts import StepRecord
from steadygrad.losses import structure_loss
from steadygrad.trainer import Stage, Trainer, TrainerConfig
from steadygrad.trainer.ranks import is_first
from steadygrad.trainer.stages import Optimizers
from steadygrad_recipes.cod import words
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.cod.data import Sample
from steadygrad_recipes.cod.metrics import MaskScores
from steadygrad_recipes.cod.model import build_network, take_outputs
from steadygrad_recipes.cod.pictures import write_pictures
from steadygrad_recipes.cod.stages import make_stages


class CodTrainer(Trainer):
    """Trains a CamouflageNet in two stages."""

    def __init__(
        self,
        config: CodConfig,
        *,
        run_dir: Path | None = None,
        tell: Callable[[str], None] | None = None,
        shown: Sequence[tuple[str, Sample]] = (),
    ) -> None:
        """`shown`: name and sample of each picture whose prediction is written to the run directory."""
        self.cod = config
        device, precision = choose_place(config)
        self._stop = None if config.protect and not is_switched_off() else self._make_stop()
        torch.manual_seed(config.seed)  # the same initial weights, whatever the caller drew before
        super().__init__(
            build_network(config),
            make_trainer_config(config, device, precision),
            stages=make_stages(
                config,
                fused=device.startswith("cuda") and self._stop is None,
                make_scaler=partial(self._make_scaler, device.split(":")[0]) if precision == "fp16" else None,
            ),
            run_dir=run_dir,
            tell=tell,
        )
        self._shown = list(shown)
        self._epoch_began: float | None = None
        self._num_high, self._is_advised = 0, False
        self._last_loss, self._last_norm = math.nan, math.nan

    def _make_stop(self) -> NonfiniteStop:
        return NonfiniteStop(
            self.cod.grad_clip,
            find_batch=lambda: self._progress.num_batches - 1,
            tell=lambda line: self._tell(line),
        )

    def _make_scaler(self, device: str, settings: dict[str, Any]) -> torch.amp.GradScaler:
        if self._stop is not None:
            return StoppingScaler(self._stop, device, **settings)
        return torch.amp.GradScaler(device, **settings)

    # --- what is learned ----------------------------------------------------------------------------------------------

    def compute_loss(self, batch: Sample) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the structure loss of the finest output plus the weighted mean of the coarser ones'."""
        if self._epoch_began is None:
            self._epoch_began = time.monotonic()
        # Drawn inside what is replayed, which restores the generators: a replay flips the same images
        images, masks = mirror(batch["image"], batch["mask"]) if self.cod.mirror else (batch["image"], batch["mask"])
        outputs = take_outputs(self.model(images), masks.shape[-2:])
        fine, *coarse = (structure_loss(logits.float(), masks) for logits in outputs)
        side = torch.stack(coarse).mean() if coarse else torch.zeros_like(fine)
        loss = fine + self.cod.side_weight * side
        if self._stop is not None:
            self._stop.check_loss(loss)
        return loss, {"mask": fine.detach(), "side": side.detach()}

    def evaluate(self, val_loader: Iterable[Sample]) -> dict[str, float]:
        """Return structure loss, IoU, Dice, MAE, S-measure, weighted F and E-measure."""
        scores, losses = MaskScores(), []
        for batch in val_loader:
            images, masks = batch["image"].to(self.device), batch["mask"].to(self.device)
            logits = take_outputs(self.model(images), masks.shape[-2:])[0].float()
            losses += structure_loss(logits, masks, reduction="none").flatten().tolist()
            scores.add(logits.sigmoid(), masks)
        return {"loss": sum(losses) / max(1, len(losses)), **scores.mean()}

    def guess_loss(self, val_loader: Iterable[Sample]) -> float:
        """Return the structure loss of the best answer that is the same at every pixel."""
        # Not the share of objects: the loss weighs edges more, and its IoU prefers masks that are too large.
        answers = torch.linspace(-3.0, 3.0, 13, device=self.device)
        losses: list[Tensor] = []  # [13, N] each
        for batch in val_loader:
            masks = batch["mask"].to(self.device)
            same = [structure_loss(answer.expand_as(masks), masks, reduction="none") for answer in answers]
            losses.append(torch.stack([loss.flatten() for loss in same]))
        return float(torch.cat(losses, dim=1).mean(1).min())

    def build_optimizer(self, stage: Stage) -> Optimizers:
        """Return the stage's optimizer; without protection and scaler, it checks the gradients before each step."""
        optimizer = super().build_optimizer(stage)
        if self._stop is not None and stage.scaler is None and isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(self._stop.check_gradients)
        return optimizer

    # --- output -------------------------------------------------------------------------------------------------------

    def end_step(self, record: StepRecord) -> None:
        """Warn early about high norms, once per epoch, and report each step that was left out."""
        if record.skipped:
            for line in self._spell_skipped(record):
                self._tell(line)
            return
        self._last_loss = math.nan if record.loss is None else record.loss
        self._last_norm = record.grad_norm
        if record.grad_norm > words.HIGH_NORM * self.cod.grad_clip:
            self._num_high += 1
            if self._num_high == 1:
                self._tell(words.spell_high_norm(record.grad_norm, self.cod.grad_clip))

    def _spell_skipped(self, record: StepRecord) -> list[str]:
        batch = self._find_batch(record.step)
        after = f"   The step was skipped, no weight has changed (step {record.step})."
        if record.loss is not None and not math.isfinite(record.loss):
            return [*words.spell_bad_loss(batch, record.loss), after]
        if record.num_nonfinite:
            return [*words.spell_bad_gradients(batch, record.grad_norm), after]
        return [f"   Batch {batch} was left out (step {record.step})."]  # in the window after a rollback

    def _find_batch(self, step: int) -> int:
        """Return the last batch of a step, counted from 0 within its epoch."""
        history = self.train_history
        first = history[-1]["step"] if history else 0
        last = (step - first + 1) * self.cod.accumulation_steps - 1
        return max(0, min(last, self._progress.num_batches - 1))  # an epoch may end with a short accumulation window

    def describe_epoch(self, metrics: Mapping[str, Any]) -> str:
        """Format the finished bar, the metrics and the norms."""
        if self._stop is not None and self._stop.norms:
            norms, self._stop.norms = self._stop.norms, []
            metrics = {**metrics, "grad_norm_mean": sum(norms) / len(norms), "grad_norm_max": max(norms)}
            self._last_norm = norms[-1]
        began = self._epoch_began
        seconds = 0.0 if began is None else time.monotonic() - began
        done = self._progress.num_batches
        norm = None if math.isnan(self._last_norm) else self._last_norm
        loss = metrics["loss"] if math.isnan(self._last_loss) else self._last_loss
        lines = [
            words.spell_bar(metrics["epoch"] + 1, self.cod.epochs, done, done, seconds, loss, norm),
            words.spell_metrics(metrics),
            words.spell_norms(metrics),
        ]
        if self._num_high:
            lines.append(f"   High gradient norm in {self._num_high} of {metrics['num_steps']:.0f} steps.")
            lines += [] if self._is_advised else [words.spell_advice(self.cod.grad_clip)]
            self._is_advised = True
        return "\n".join(lines)

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Write pictures of the current predictions; the next epoch may warn again."""
        self._epoch_began, self._num_high = None, 0
        if self.run_dir is not None and self._shown:
            self._write_pictures(f"epoch {metrics['epoch'] + 1}")

    def _write_pictures(self, when: str) -> None:
        assert self.run_dir is not None
        images, masks = (torch.stack([sample[key] for _, sample in self._shown]) for key in ("image", "mask"))
        with self._as_evaluated(), torch.no_grad(), self.autocast():
            answers = (take_outputs(self.model(image[None].to(self.device)), image.shape[-2:]) for image in images)
            found = torch.cat([answer[0].float().sigmoid() for answer in answers])
        names = [name for name, _ in self._shown]
        # Below the forward: with shards it is a collective that every rank must enter
        if is_first():
            write_pictures(self.run_dir, images, masks, found, names=names, when=when)


def make_trainer_config(config: CodConfig, device: str, precision: str) -> TrainerConfig:
    """Convert to the settings of the shared loop."""
    return TrainerConfig(
        epochs=config.epochs,
        learning_rate=config.lr,
        weight_decay=config.weight_decay,
        max_grad_norm=config.grad_clip,
        accumulation_steps=config.accumulation_steps,
        precision=precision,
        eval_every=config.eval_every,
        save_every=config.save_every,
        keep_last=config.keep_last,
        ema_decay=config.ema_decay or None,
        seed=config.seed,
        device=device,
        strategy=config.strategy,
        clip=config.clip,
        policy=config.policy,
        log_every=config.log_every,
        tensorboard=config.tensorboard,
        wandb=config.wandb,
        protect=config.protect,
    )


def choose_place(config: CodConfig) -> tuple[str, str]:
    """Choose device and precision where the config leaves them open: fp16 with its scaler on CUDA, fp32 elsewhere."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = config.precision
    if precision == "auto":
        precision = "fp16" if device.startswith("cuda") else "fp32"
    return device, precision


def mirror(images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Flip each image at random, and its mask with it."""
    chosen = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(chosen, images.flip(-1), images), torch.where(chosen, masks.flip(-1), masks)


# --- without a guard ----------------------------------------------------------------------------------------------
# The loop without a guard, as it was written before: check loss and gradients, give up at the first bad one.
#
# It clips as the guarded loop does. With float16 it checks after the gradients are unscaled and before the scaler
# could have skipped the step, which is how an overflow, the very case a loss scaler is for, ended a run of 44 epochs.


class NonfiniteStop:
    """Ends the training with an error; `find_batch` returns the current batch, `tell` receives the lines before."""

    def __init__(self, grad_clip: float, *, find_batch: Callable[[], int], tell: Callable[[str], None]) -> None:
        self._grad_clip, self._find_batch, self._tell = grad_clip, find_batch, tell
        self.norms: list[float] = []
        """Gradient norms of this epoch."""

    def check_loss(self, loss: Tensor) -> None:
        """Raise unless it is finite. The host waits for it here; a guard does not."""
        if not bool(torch.isfinite(loss)):
            self._stop(words.spell_bad_loss(self._find_batch(), float(loss.detach())), "loss")

    def check_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip, and raise unless the norm is finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._grad_clip))
        if not math.isfinite(norm):
            self._stop(words.spell_bad_gradients(self._find_batch(), norm), "gradients")
        self.norms.append(norm)

    def _stop(self, lines: list[str], what: str) -> None:
        for line in lines:
            self._tell(line)
        raise ValueError(f"Training stopped due to NaN/Inf {what}.")


class StoppingScaler(torch.amp.GradScaler):
    """A loss scaler that checks the unscaled gradients before it steps."""

    def __init__(self, stop: NonfiniteStop, device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._stop = stop

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, check, step."""
        self.unscale_(optimizer)
        self._stop.check_gradients(optimizer)
        return super().step(optimizer, *args, **kwargs)
