"""Optimizers: the optimizers of a training, and what advances with their steps."""

from __future__ import annotations

from pathlib import Path

import torch

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.engine_scale import EngineScale
from steadygrad.act.own_scale import OwnScale
from steadygrad.act.rates import Rates
from steadygrad.act.scaler import LossScale, ScalerDriver
from steadygrad.act.schedule_and_ema import ScheduleAndEma
from steadygrad.guard.training import Training

_TORCHS = torch.optim.Optimizer.zero_grad
_IS_TORCHS = Path(_TORCHS.__code__.co_filename).is_relative_to(Path(torch.__file__).parent)
"""Whether that is torch's own function, and not one that a program has put in its place."""


class Optimizers:
    """Steps all optimizers, and clears all their gradients, as one."""

    def __init__(self, training: Training, buffers: BufferKeeper) -> None:
        self.given: tuple[torch.optim.Optimizer, ...] = training.optimizers
        self.rates = Rates(self.given)
        self.scaler = _find_scale(training)
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
            if _clears_as_torch_does(optimizer):
                # All that torch's own does: 7 us instead of 27, in which it asks the compiler and marks a profile.
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=True)


def _find_scale(training: Training) -> LossScale:
    """Return who scales the loss: an engine, an optimizer that may do so itself, or a GradScaler, if any."""
    if isinstance(training.scaler, EngineScale):
        return training.scaler
    if training.scaler is None and len(training.optimizers) == 1:
        return OwnScale(training.optimizers[0])
    return ScalerDriver(training.scaler, training.optimizers)


def _clears_as_torch_does(optimizer: torch.optim.Optimizer) -> bool:
    is_own = _IS_TORCHS and type(optimizer).zero_grad is _TORCHS and "zero_grad" not in vars(optimizer)
    return is_own and not torch._C._autograd._profiler_enabled()
