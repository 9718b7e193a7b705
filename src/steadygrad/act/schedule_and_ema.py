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
from steadygrad.facts import Finding, Severity

NUM_DOUBLED = 3
"""Steps in a row between which the scheduler must have moved on by itself."""


class ScheduleAndEma:
    """Steps the scheduler and EMA that were passed to Guard; others remain the user's."""

    def __init__(
        self, scheduler: Any, ema: Any, *, model: nn.Module, interval: Interval, buffers: BufferKeeper
    ) -> None:
        # An optimizer has step() too, and would move the weights twice.
        is_stepped = callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, torch.optim.Optimizer)
        if scheduler is not None and not is_stepped:
            raise UsageError(
                f"Guard's scheduler must be a scheduler with step() or None, got {type(scheduler).__name__}."
            )
        self._scheduler, self._interval, self._buffers = scheduler, interval, buffers
        self._needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._update_ema = _find_update(ema, model)
        self._last_epoch: int | None = None  # of the scheduler, as our last step left it
        self._num_doubled = 0
        self.is_doubled = False
        """Whether the program steps the scheduler too, once for each of our steps, and that is not reported yet."""

    def after_applied(self) -> None:
        """Advance after the judged step was applied, while the weights are still those it left.

        Judgement may come after the next forward has changed the buffers: the EMA copy sees them as the step left them.
        """
        if self._scheduler is not None and self._interval is Interval.STEP and not self._needs_metric:
            self._step()
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
            self._step()

    def report_doubled(self, step: int) -> Finding:
        """Return the finding that the program steps the scheduler too; it is not looked for again."""
        self.is_doubled = False
        return Finding(
            kind="doubled_schedule",
            severity=Severity.WARNING,
            step=step,
            message="the scheduler is stepped by the Guard and once more by the program: it runs twice as fast",
            advice="Remove scheduler.step() from the loop, or do not pass the scheduler to Guard.",
        )

    def _step(self) -> None:
        if self._last_epoch is not None:
            # Exactly one: a rollback moves it back, and a resumed run may move it on, once.
            is_moved = getattr(self._scheduler, "last_epoch", None) == self._last_epoch + 1
            self._num_doubled = self._num_doubled + 1 if is_moved else 0
            self.is_doubled |= self._num_doubled == NUM_DOUBLED
        self._scheduler.step()
        last = getattr(self._scheduler, "last_epoch", None)
        self._last_epoch = last if isinstance(last, int) else None


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
