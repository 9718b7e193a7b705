"""UltraOptimizedSEOTrainer: a Trainer that also compares the losses of epochs, and the building blocks it uses.

During training the shared Guard clips, skips and judges each step. The methods with a leading underscore do the same
things one by one, for a custom loop. At the end of an epoch, losses are compared with those of the previous epoch;
what the Guard has already responded to in that epoch is reported, but not responded to twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.act.sanitize import handle_nan_inf
from steadygrad.config import GuardConfig, Policy
from steadygrad.facts import Action, StepRecord
from steadygrad.measure.check import check_nan_inf
from steadygrad.trainer import Trainer
from steadygrad.trainer.batches import move_batch
from steadygrad.trainer.guessing import HARDLY, judge_start
from steadygrad.trainer.ranks import count_ranks, sum_over_ranks
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.model import UltraOptimizedSEOMetricsModule

logger = logging.getLogger("steadygrad.recipes.seo")
ANSWERS = {
    "train_loss_nan_inf": ("lr", 0.5, "Reducing learning rate to handle NaN/Inf in training loss"),
    "val_loss_nan_inf": ("lr", 0.5, "Reducing learning rate to handle NaN/Inf in validation loss"),
    "loss_explosion": ("lr", 0.1, "Reducing learning rate to handle loss explosion"),
    "overfitting": ("weight_decay", 1.5, "Increasing weight decay to handle overfitting"),
}
"""The response to each kind of instability: which rate, the factor, and the line in the log."""
GUESS = 1.0
"""Loss of the mean score, in standardised units."""
EPOCHS_TO_RECOVER = 2
"""Epochs after which the rate is lowered because the first losses exploded: twice is a hundredth."""
ERROR = "val_mae_"
"""Prefix of the errors of single metrics in an epoch's numbers."""
LOWERS_RATE = (Action.SCALE_LR, Action.ROLLBACK)
MOST_WEIGHT_DECAY = 1.5**10
"""Limit as a multiple of the config's weight decay, because noise alone raises it again and again."""


class UltraOptimizedSEOTrainer(Trainer):
    """`UltraOptimizedSEOTrainer(model, config).train(train_loader, val_loader)`; batches are those of `SEOData`."""

    model: UltraOptimizedSEOMetricsModule
    config: UltraOptimizedConfig

    def __init__(
        self, model: UltraOptimizedSEOMetricsModule, config: UltraOptimizedConfig | None = None, **options: Any
    ) -> None:
        options.setdefault("guard_config", GuardConfig(policy=Policy.eager()))  # the original's own corrections
        super().__init__(model, config if config is not None else UltraOptimizedConfig(), **options)

    # --- the training -----------------------------------------------------------------------------------------------

    def prepare_batch(self, batch: Any) -> Any:
        """Add how many scores of each metric all ranks have, so that their losses average to that of all pages."""
        if count_ranks() == 1:
            return batch
        features, words, scores, given, _ = _split_batch(batch)
        # A collective, so not in `compute_loss`: a replay on one rank would wait for the others
        return features, words, scores, given, sum_over_ranks(given.sum(0)).clamp_min(1) / count_ranks()

    def compute_loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean over the metrics of the squared error in standardised units, and each metric's own."""
        features, words, scores, given, num = _split_batch(batch)
        losses = score_losses(self.model(features, words), self.model.standardise(scores), given, num)
        return losses.mean(), dict(zip(self.model.metrics, losses))

    def evaluate(self, val_loader: Iterable[Any]) -> dict[str, float]:
        """Return the loss, R², and each metric's mean absolute error in its own units."""
        predicted, wanted, known = [], [], []
        for batch in val_loader:
            features, words, scores, given, _ = _split_batch(move_batch(batch, self.device))
            predicted.append(self.model(features, words).float())
            wanted.append(scores)
            known.append(given)
        made, scores, given = torch.cat(predicted), torch.cat(wanted), torch.cat(known)  # each [N, M]
        loss = float(score_losses(made, self.model.standardise(scores), given).mean())
        errors = measure_errors(made * self.model.score_std + self.model.score_mean, scores, given, self.model.metrics)
        return {"loss": loss, "r2": errors.pop("r2"), **errors}

    def guess_loss(self, val_loader: Iterable[Any]) -> float:
        """Return the loss of the mean of the training pages' scores, about 1.

        A model that was not given their scales does not know it: then it is the mean of these scores.
        """
        rows = [_split_batch(move_batch(batch, self.device)) for batch in val_loader]
        scores, given = torch.cat([row[2] for row in rows]), torch.cat([row[3] for row in rows])
        wanted = self.model.standardise(scores)
        mean = torch.zeros_like(wanted)
        if not self.model.score_mean.any():
            mean += torch.where(given, wanted, 0.0).sum(0) / given.sum(0).clamp_min(1)
        return float(score_losses(mean, wanted, given).mean())

    def end_step(self, record: StepRecord) -> None:
        """Log the gradient norms before and after clipping, which the Guard has measured anyway."""
        if not logger.isEnabledFor(logging.INFO):
            return
        logger.info(f"Gradient norm before clipping: {record.grad_norm:.6f}")
        logger.info(f"Gradient norm after clipping: {record.grad_norm * record.clip_coefficient:.6f}")

    def describe_epoch(self, metrics: Mapping[str, Any]) -> str:
        """Return the line of every Trainer, followed by how far the scores are off."""
        errors = {name.removeprefix(ERROR): value for name, value in metrics.items() if name.startswith(ERROR)}
        line = super().describe_epoch({name: value for name, value in metrics.items() if not name.startswith(ERROR)})
        if not errors:
            return line
        return f"{line}\n   Mean error - " + ", ".join(f"{name}: {value:.1f}" for name, value in errors.items())

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Compare this epoch with the previous one."""
        if not self.is_protected:
            return
        val_loss = metrics.get("val_loss", metrics["loss"])
        self._check_training_stability(metrics["loss"], val_loss)
        progress = self._progress
        early = len(self.train_history) <= EPOCHS_TO_RECOVER
        if early and val_loss > HARDLY * GUESS and judge_start(progress.first_loss, progress.peak, GUESS) is not None:
            logger.warning(
                "The first losses exploded, and the validation loss is no lower than that of guessing the mean score"
            )
            self._handle_training_instability("loss_explosion")

    # --- building blocks --------------------------------------------------------------------------------------------

    def _get_gradient_norm(self) -> float:
        """Return the global norm of the existing gradients."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def _clip_gradients(self, max_norm: float | None = None) -> None:
        """Clip gradients to prevent exploding gradients with comprehensive monitoring."""
        if max_norm is None:
            max_norm = self.config.max_grad_norm
        logger.info(f"Gradient norm before clipping: {self._get_gradient_norm():.6f}")
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and self._check_nan_inf(parameter.grad, f"gradient of {name}"):
                parameter.grad = self._handle_nan_inf(parameter.grad)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        logger.info(f"Gradient norm after clipping: {self._get_gradient_norm():.6f}")

    def _check_nan_inf(self, tensor: Tensor, name: str = "tensor") -> bool:
        """Check for NaN/Inf values in tensor."""
        return check_nan_inf(tensor, name)

    def _handle_nan_inf(self, tensor: Tensor, replacement_value: float = 0.0) -> Tensor:
        """Handle NaN/Inf values by replacing them."""
        return handle_nan_inf(tensor, replacement_value)

    # --- the epochs -------------------------------------------------------------------------------------------------

    def _check_training_stability(self, train_loss: float, val_loss: float) -> None:
        """Check for training instability and take corrective actions."""
        if not math.isfinite(train_loss):
            logger.error(f"Training loss is {train_loss}, training may be unstable")
            self._handle_training_instability("train_loss_nan_inf")
        if not math.isfinite(val_loss):
            logger.error(f"Validation loss is {val_loss}, training may be unstable")
            self._handle_training_instability("val_loss_nan_inf")
        if len(self.train_history) > 1:
            prev_train_loss = self.train_history[-2]["loss"]
            if train_loss > prev_train_loss * 10:
                logger.warning(f"Training loss exploded from {prev_train_loss:.6f} to {train_loss:.6f}")
                self._handle_training_instability("loss_explosion")
        if len(self.val_history) > 1 and len(self.train_history) > 1:
            prev_val_loss = self.val_history[-2]["loss"]
            prev_train_loss = self.train_history[-2]["loss"]
            if val_loss > prev_val_loss and train_loss < prev_train_loss:
                logger.warning("Potential overfitting detected")
                self._handle_training_instability("overfitting")

    def _handle_training_instability(self, issue_type: str) -> None:
        """Handle training instability issues."""
        key, factor, line = ANSWERS[issue_type]
        if self._was_answered(key):
            logger.info(f"{issue_type}: the guard has already changed the {key} in this epoch")
            return
        if key == "weight_decay" and self._weight_decay >= self.config.weight_decay * MOST_WEIGHT_DECAY:
            logger.info(f"{issue_type}: the weight decay is {self._weight_decay:.4g}, and is not raised any further")
            return
        policy = self.guard_config.policy
        if not (policy.act and policy.change_hyperparameters):
            self._tell(f"   {issue_type}: reported only, since the policy changes no hyperparameter")
            return
        logger.info(line)
        before = self._find_setting(key)
        reason = f"{issue_type} from one epoch to the next"
        if self.guard is None:
            for group in self._param_groups:
                group[key] *= factor
        elif key == "lr":
            self.guard.scale_lr(factor, reason)
        else:
            self.guard.scale_weight_decay(factor, reason)
        self._tell(f"   {line}: {before:.4g} -> {self._find_setting(key):.4g}")

    def _was_answered(self, key: str) -> bool:
        """Return whether the Guard has responded to it since the previous epoch ended."""
        if self.guard is None:
            return False
        actions = LOWERS_RATE if key == "lr" else (Action.SCALE_WEIGHT_DECAY,)
        since = self.train_history[-2].get("step", 0) if len(self.train_history) > 1 else 0
        return any(i.outcome.action in actions and i.step >= since for i in self.guard.incidents)

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def _weight_decay(self) -> float:
        return self._find_setting("weight_decay")

    def _find_setting(self, key: str) -> float:
        """Return the rate or weight decay a step uses: the Guard applies its factor only while the optimizer steps."""
        own = float(max(group[key] for group in self._param_groups))
        if self.guard is None:
            return own
        factor = self.guard.stats()["learning_rate_factor" if key == "lr" else "weight_decay_factor"]
        return own * float(1.0 if factor is None else factor)

    # --- queries ----------------------------------------------------------------------------------------------------

    def monitor_training_health(self) -> dict[str, bool]:
        """Monitor the health of the training process."""
        health_status = super().monitor_training_health()
        for name, parameter in self.model.named_parameters():
            if self._check_nan_inf(parameter, f"parameter {name}"):
                health_status["parameters_healthy"] = False
                logger.error(f"Unhealthy parameter detected: {name}")
            if parameter.grad is not None and self._check_nan_inf(parameter.grad, f"gradient {name}"):
                health_status["gradients_healthy"] = False
                logger.error(f"Unhealthy gradient detected: {name}")
        parts = {name: fine for name, fine in health_status.items() if name != "overall_healthy"}
        return {**parts, "overall_healthy": all(parts.values())}

    def get_training_stats(self) -> dict[str, Any]:
        """Return current rates and norms, counts, and the histories."""
        stats = super().get_training_stats()
        if stats["current_gradient_norm"] is None:
            stats["current_gradient_norm"] = self._get_gradient_norm()
        return {**stats, "current_weight_decay": self._weight_decay}


def _split_batch(batch: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Return features, words, scores, which were given, and how many; of two, features and scores, all are given."""
    if len(batch) >= 4:
        features, words, scores, given, *num = batch
        return features, words, scores, given, num[0] if num else None
    features, *words, scores = batch
    return features, words[0] if words else None, scores, torch.ones_like(scores, dtype=torch.bool), None


# --- metrics ------------------------------------------------------------------------------------------------------
# Predicted and given scores -> losses and errors, metric by metric. A missing score counts for nothing.


def score_losses(predicted: Tensor, wanted: Tensor, given: Tensor, num: Tensor | None = None) -> Tensor:
    """Return the mean squared error of each metric [M] from [B, M], in standardised units; 0 where none was given.

    `num` [M]: the number to divide by, where it is not that of this batch.
    """
    # Missing scores are removed before the difference: a mask after it could leave 0 * Inf in the gradient.
    errors = (predicted.float() - torch.where(given, wanted, predicted.detach().float())).square()
    return errors.sum(0) / (given.sum(0).clamp_min(1) if num is None else num)


def measure_errors(predicted: Tensor, wanted: Tensor, given: Tensor, metrics: Sequence[str]) -> dict[str, float]:
    """Return each metric's mean absolute error in its own units, and R² over all: 1 is perfect, 0 the mean score."""
    num = given.sum(0).clamp_min(1)
    errors = torch.where(given, predicted - wanted, 0.0)
    mean = torch.where(given, wanted, 0.0).sum(0) / num
    spread = torch.where(given, wanted - mean, 0.0).square().sum(0)
    share = errors.square().sum(0) / spread.clamp_min(1e-12)  # equal scores have no spread
    errors_by_name = {f"mae_{name}": float(value) for name, value in zip(metrics, errors.abs().sum(0) / num)}
    return {**errors_by_name, "r2": float(1.0 - share.mean())}
