"""Stage: a phase of training with its own trainable parameters, optimizer and schedule. Settings only, no state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steadygrad.config.trainer import TrainerConfig

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Stage:
    """What one phase of a training does differently; the Trainer supplies what is None."""

    name: str = "train"
    epochs: int | None = None
    """Number of passes over the data; None means `TrainerConfig.epochs`."""
    prepare: Callable[[nn.Module], None] | None = None
    """Called once when the stage begins, also after a resume: freeze and unfreeze here."""
    optimizer: Callable[[nn.Module], Optimizers] | None = None
    """Creates the stage's optimizer, over the parameters that `prepare` left trainable."""
    scheduler: Callable[[Any, int | None], Any] | None = None
    """Creates its scheduler from the optimizer and the number of steps, which is None if unknown."""
    scaler: Callable[[], torch.amp.GradScaler | None] | None = None
    """Creates its loss scaler; None means one for fp16 and none otherwise."""


def make_schedule(
    optimizer: torch.optim.Optimizer, config: TrainerConfig, num_steps: int | None
) -> torch.optim.lr_scheduler.LambdaLR | None:
    """Return a schedule with linear warm-up, then constant or cosine; None if the learning rate stays fixed."""
    if config.schedule == "constant" and not config.warmup_steps:
        return None
    warmup, falls = config.warmup_steps, config.schedule == "cosine"
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: shape_rate(step, warmup, num_steps if falls else None)
    )


def shape_rate(step: int, warmup: int, num_steps: int | None) -> float:
    """Return the share of the peak rate at a step: linear rise, then a cosine to 0, or constant if `num_steps` is None.

    >>> [round(shape_rate(step, 2, 6), 2) for step in range(7)]
    [0.33, 0.67, 1.0, 0.85, 0.5, 0.15, 0.0]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)  # a rate of exactly 0 would waste the first step
    if num_steps is None:
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, num_steps - warmup))))
