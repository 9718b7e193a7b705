"""Optimizers: the optimizers of a training, and what advances with their steps."""

from __future__ import annotations

import torch

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.engine import EngineScale
from steadygrad.act.rates import Rates
from steadygrad.act.scaler import LossScale, ScalerDriver
from steadygrad.act.schedule_and_ema import ScheduleAndEma
from steadygrad.guard.training import Training


class Optimizers:
    """Steps all optimizers, and clears all their gradients, as one."""

    def __init__(self, training: Training, buffers: BufferKeeper) -> None:
        self.given: tuple[torch.optim.Optimizer, ...] = training.optimizers
        self.rates = Rates(self.given)
        self.scaler: LossScale = (
            training.scaler if isinstance(training.scaler, EngineScale) else ScalerDriver(training.scaler, self.given)
        )
        self.schedule_and_ema = ScheduleAndEma(
            training.scheduler,
            training.ema,
            model=training.model,
            interval=training.config.scheduler_interval,
            buffers=buffers,
        )

    def maximise(self) -> bool:
        """Whether any of them maximises."""
        return any(group.get("maximize") for optimizer in self.given for group in optimizer.param_groups)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self.given:
            optimizer.zero_grad(set_to_none=True)
