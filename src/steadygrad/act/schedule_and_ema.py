"""ScheduleAndEma: scheduler and EMA, which advance after an applied step and stay put after a skipped one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from steadygrad.act.buffers import BufferKeeper
from steadygrad.config import Interval
from steadygrad.errors import UsageError


class ScheduleAndEma:
    """Steps the scheduler and EMA that were passed to Guard; others remain the user's."""

    def __init__(
        self, scheduler: Any, ema: Any, *, model: nn.Module, interval: Interval, buffers: BufferKeeper
    ) -> None:
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            raise UsageError(f"the scheduler must have step(), got {type(scheduler).__name__}.")
        self._scheduler, self._interval, self._buffers = scheduler, interval, buffers
        self._needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._update_ema = _find_update(ema, model)

    def after_applied(self) -> None:
        """Advance after the judged step was applied, while the weights are still those it left.

        Judgement may come after the next forward has changed the buffers: the EMA copy sees them as the step left them.
        """
        if self._scheduler is not None and self._interval is Interval.STEP and not self._needs_metric:
            self._scheduler.step()
        if self._update_ema is not None:
            with self._buffers.as_saved():
                self._update_ema()

    def after_epoch(self, validation_loss: float | None) -> None:
        """Advance at the end of an epoch; `validation_loss` is its last finite one."""
        if self._scheduler is None:
            return
        if self._needs_metric:
            if validation_loss is not None:
                self._scheduler.step(validation_loss)
        elif self._interval is Interval.EPOCH:
            self._scheduler.step()


def _find_update(ema: Any, model: nn.Module) -> Callable[[], Any] | None:
    if ema is None:
        return None
    update = getattr(ema, "update_parameters", None) or getattr(ema, "update", None)
    if not callable(update):
        raise UsageError(
            f"the EMA must have update_parameters(model) or update(), got {type(ema).__name__}. "
            "torch.optim.swa_utils.AveragedModel has it."
        )
    wants_model = any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in inspect.signature(update).parameters.values()
    )
    return (lambda: update(model)) if wants_model else update
