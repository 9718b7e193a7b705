"""MMDiTTrainer: the Trainer with this recipe's losses, optimizer, validation and terminal output.

Skipping, clipping, recovery and the record are the Guard's. Without protection the optimizer is stepped as in the
program that broke: the norm is clipped, only NaN is checked for, gradients are zeroed and the step is taken anyway.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from steadygrad.config import GuardConfig
from steadygrad.facts import StepRecord
from steadygrad.trainer import Stage, Trainer, TrainerConfig
from steadygrad.trainer.ranks import count_ranks, sum_over_ranks
from steadygrad.trainer.stages import Optimizers
from steadygrad_recipes.mmdit.config import MMDiTConfig, OptimizerConfig
from steadygrad_recipes.mmdit.diffusion import Hidden
from steadygrad_recipes.mmdit.losses import JointLoss
from steadygrad_recipes.mmdit.metrics import Batch, ask, evaluate, hide_batch
from steadygrad_recipes.mmdit.model import MMDiT, group_parameters

DEFAULT_CLIP = 1.0
"""Norm to clip at when none is set: there is always a limit."""


class MMDiTTrainer(Trainer):
    """Trains an MMDiT on batches of `tokens`, `mask` and `latents`."""

    model: MMDiT

    def __init__(
        self,
        model: MMDiT,
        config: MMDiTConfig,
        *,
        run_dir: str | Path | None = None,
        guard_config: GuardConfig | None = None,
        tell: Callable[[str], None] = print,
        guess: Mapping[str, float] | None = None,
    ) -> None:
        """`guess`: `text_loss` and `latent_loss` of a guess (`measure_baseline`)."""
        self.recipe, self.guess = config, guess
        self._criterion = JointLoss(config.loss)
        settings = make_trainer_config(config)
        super().__init__(model, settings, run_dir=run_dir, guard_config=guard_config, tell=tell)
        if not self.is_protected:
            old = functools.partial(step_as_before, settings=config.optimizer, tell=self._warn_old)
            # On this optimizer only: it is built once, since there is one stage
            self.optimizer.register_step_pre_hook(old)  # type: ignore[union-attr]

    def hide(self, batch: Batch) -> Hidden:
        """Hide words and latents of a batch at random."""
        return hide_batch(self.model, batch, self.recipe)

    def prepare_batch(self, batch: Batch) -> Any:
        """With several ranks, hide the batch, and add this rank's share of all hidden words: words count alike."""
        if count_ranks() == 1:
            return batch
        # Here and not in `compute_loss`: the sum below is a collective, and a replay on one rank would wait
        hidden = self.hide(batch)
        num = hidden.is_hidden.sum()
        return hidden, num * count_ranks() / sum_over_ranks(num).clamp_min(1)

    def compute_loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum, and `text_loss` and `latent_loss` for the record."""
        hidden, share = batch if isinstance(batch, tuple) else (self.hide(batch), None)
        terms = self._criterion(*ask(self.model, hidden), hidden, text_share=share)
        return terms.pop("loss"), terms

    def evaluate(self, val_loader: Iterable[Batch]) -> dict[str, float]:
        """Return losses, word accuracy and latent cosine, on the same hidden positions every time."""
        return evaluate(self.model, val_loader, self.recipe)

    def guess_loss(self, val_loader: Iterable[Batch]) -> float | None:  # noqa: ARG002
        """Return the weighted sum of what a guess without a model gets."""
        if self.guess is None:
            return None
        weights = self.recipe.loss
        text, latent = self.guess["text_loss"], self.guess["latent_loss"]
        return weights.loss_scale * (weights.text_loss_weight * text + weights.latent_loss_weight * latent)

    def build_optimizer(self, stage: Stage) -> Optimizers:  # noqa: ARG002
        """Return AdamW; decay for matrices only."""
        settings = self.recipe.optimizer
        groups = group_parameters(self.bare_model, settings.weight_decay)
        betas = (0.9, settings.beta2)
        return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, fused=self.device.type == "cuda")

    def end_step(self, record: StepRecord) -> None:
        """Report a step that was skipped, and which loss caused it."""
        if not record.skipped:
            return
        if record.loss is not None and not math.isfinite(record.loss):
            self._tell(f"ERROR: Invalid loss at step {record.step}: {record.loss}")
            for name in ("text_loss", "latent_loss"):
                self._tell(f"  {name}: {record.extra.get(name, 0.0)}")
        elif record.num_nonfinite or not math.isfinite(record.grad_norm):
            self._tell(f"ERROR: NaN/Inf gradient norm at step {record.step}")
            self._tell("  Skipping batch and resetting gradients")

    @property
    def trained(self) -> MMDiT:
        """The model to use afterwards: the averaged weights where there are any."""
        model = self.bare_model if self.ema is None else self.ema.module
        assert isinstance(model, MMDiT)
        return model

    def _warn_old(self) -> None:
        assert self.guard is not None
        self._tell(f"Warning: NaN gradient detected at step {self.guard.num_steps}")


def make_trainer_config(config: MMDiTConfig) -> TrainerConfig:
    """Convert to the settings of the shared loop."""
    training = config.training
    return TrainerConfig(
        epochs=training.epochs,
        max_steps=training.max_steps,
        learning_rate=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        max_grad_norm=config.optimizer.grad_clip_norm or DEFAULT_CLIP,
        accumulation_steps=training.gradient_accumulation_steps,
        precision=training.dtype.value,
        warmup_steps=training.warmup_steps,
        schedule="cosine",
        eval_every=training.eval_every,
        save_every=training.save_every,
        keep_last=training.keep_last,
        ema_decay=training.ema_decay,
        seed=training.seed,
        device=training.device,
        strategy=training.strategy,
        clip=training.clip,
        policy=training.policy,
        log_every=training.log_every,
        tensorboard=training.tensorboard,
        wandb=training.wandb,
        protect=config.protect,
    )


@torch.no_grad()
def step_as_before(
    optimizer: torch.optim.Optimizer, args: Any, kwargs: Any, *, settings: OptimizerConfig, tell: Callable[[], None]
) -> None:
    """Do what the program that broke did before `optimizer.step()`. Inf passes: Inf · 0 is NaN, and that is applied."""
    del args, kwargs
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = clip_grad_norm_(parameters, settings.grad_clip_norm or 1e6)
    if torch.isnan(norm):
        tell()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
