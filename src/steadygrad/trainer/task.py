"""Task: what is trained, and how it is measured: the methods of a Trainer that a subclass may override.

The defaults train any model whose output is a loss, or whose output and targets `loss_fn` takes, with AdamW. Nothing
here knows about epochs, guards or files; the Trainer calls these at the right time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.config.trainer import TrainerConfig
from steadygrad.errors import UsageError
from steadygrad.facts import StepRecord
from steadygrad.measure.loss import find_loss
from steadygrad.trainer.batches import move_batch
from steadygrad.trainer.ranks import strip_replica
from steadygrad.trainer.stages import Optimizers, Stage, make_schedule

Metrics = dict[str, float]


class Task:
    """Loss, evaluation, optimizer and schedule of a training. Not for use by itself: a Trainer sets the attributes."""

    config: TrainerConfig
    device: torch.device
    model: nn.Module
    optimizer: Optimizers
    _loss_fn: Callable[..., Tensor] | None

    @property
    def bare_model(self) -> nn.Module:
        """The model as it was given, without what several ranks wrap around it."""
        return strip_replica(self.model)

    def prepare_batch(self, batch: Any) -> Any:
        """Return what `compute_loss` gets: the batch on the device. Runs before the step, outside what is replayed.

        What the ranks must agree on, such as `sum_over_ranks` of what a mean divides by, belongs here.
        """
        return batch

    def compute_loss(self, batch: Any) -> Any:
        """Return the loss of one batch, or the loss and a dict of terms to record. Runs under autocast; replayable."""
        if self._loss_fn is not None:
            inputs, targets = batch
            return self._loss_fn(self.model(inputs), targets)
        if isinstance(batch, Mapping):
            return find_loss(self.model(**batch))
        return find_loss(self.model(*batch) if isinstance(batch, list | tuple) else self.model(batch))

    def evaluate(self, val_loader: Iterable[Any]) -> Metrics:
        """Return metrics of the model, including "loss"; called in eval mode, without gradients, under autocast."""
        total, num = 0.0, 0
        for batch in val_loader:
            loss, _ = split_terms(self.compute_loss(move_batch(batch, self.device)))
            total, num = total + float(loss), num + 1  # waits for the device; in an evaluation that is affordable
        if num == 0:
            raise UsageError("the validation loader has no batch. Give one with data, or none at all.")
        return {"loss": total / num}

    def guess_loss(self, val_loader: Iterable[Any]) -> float | None:  # noqa: ARG002
        """Return the validation loss of the best answer that ignores the input; None if unknown.

        A run that does not get below it is reported: it has learned nothing, however far its loss fell.
        """
        return None

    def build_optimizer(self, stage: Stage) -> Optimizers:
        """Create the optimizer of a stage: AdamW over the trainable parameters."""
        if stage.optimizer is not None:
            return stage.optimizer(self.bare_model)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        # Fused: the guard clips and skips inside its kernel, without a read by the host at each step
        rate, decay, fused = self.config.learning_rate, self.config.weight_decay, self.device.type == "cuda"
        return torch.optim.AdamW(trainable, lr=rate, weight_decay=decay, fused=fused)

    def build_scheduler(self, stage: Stage, num_steps: int | None) -> Any:
        """Create the scheduler of a stage, stepped after each applied step; None keeps the rate fixed."""
        if stage.scheduler is not None:
            return stage.scheduler(self.optimizer, num_steps)
        if isinstance(self.optimizer, list):
            return None
        return make_schedule(self.optimizer, self.config, num_steps)

    def end_step(self, record: StepRecord) -> None:
        """Hook: called with each judged step."""

    def end_epoch(self, metrics: Mapping[str, Any]) -> None:
        """Hook: called at the end of each epoch, after evaluation and before the checkpoint, with its metrics."""


def split_terms(result: Any) -> tuple[Tensor, dict[str, Any]]:
    """Split the result of `compute_loss` into the loss and its terms."""
    if isinstance(result, tuple):
        loss, terms = result
        # Detached: terms are kept for the record, and would keep the graph with them
        return loss, {name: value.detach() if isinstance(value, Tensor) else value for name, value in terms.items()}
    return result, {}
