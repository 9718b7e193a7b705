"""Drive a `torch.amp.GradScaler`: unscale in our own pass and report to it what was found.

`GradScaler.step` would overwrite the optimizer's `found_inf` with its own count, so it is never called. After a step
with overflowed gradients the scale backs off; a step with a non-finite *loss* is not reported to the scaler at all,
since no scale would have helped. Guards may share a scaler: the first to step changes the scale while the others'
gradients still carry the old one, so each divides by the scale that its own backward was multiplied by.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from steadygrad.measure.uncleared_gradients import UsedMark

_drivers: weakref.WeakKeyDictionary[torch.amp.GradScaler, weakref.WeakSet[ScalerDriver]] = weakref.WeakKeyDictionary()


class LossScale(Protocol):
    """The loss scale of a training: of a GradScaler that the guard drives, or of an engine that drives itself."""

    unscales: bool
    """Whether the guard divides the gradients by the scale."""
    has_taken: bool
    """Whether `leave_out` was a step instead: the optimizer has cleaned its gradients, and everything is finite."""

    @property
    def now(self) -> Tensor | None: ...
    @property
    def factor(self) -> Tensor | None: ...
    def scale(self, loss: Tensor) -> Tensor: ...
    def end_step(self) -> None: ...
    def update(self, *, bad_gradient: Tensor, bad_loss: Tensor | None) -> None: ...
    def leave_out(self, step: Callable[[], Any], /) -> float | None: ...


class ScalerDriver:
    """What Guard needs from a GradScaler that may be None or disabled."""

    unscales = True  # the step divides the gradients by the scale
    has_taken = False

    def __init__(self, scaler: torch.amp.GradScaler | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizers = list(optimizers)
        self._carried: Tensor | None = None
        self._waiting = UsedMark()  # the user's own backward ran before another guard changed the scale
        self._waiting_scale: Tensor | None = None
        if self._scaler is not None:
            _drivers.setdefault(self._scaler, weakref.WeakSet()).add(self)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss to run backward from; all microbatches of a step use the scale of the first."""
        if self._scaler is None:
            return loss
        if self._carried is not None:
            return loss * self._carried.to(loss.device, non_blocking=True)
        scaled = self._scaler.scale(loss)
        scale = self._scaler._get_scale_async()
        # A clone: update() writes into the scaler's own tensor.
        self._carried = None if scale is None else scale.clone()
        return scaled

    @property
    def now(self) -> Tensor | None:
        """Return the scale of the current step; None without a scaler, or before it has scaled anything."""
        if self._scaler is None:
            return None
        if self._carried is not None:
            return self._carried
        return self._waiting_scale if self._waiting.is_there else self._scaler._get_scale_async()

    @property
    def factor(self) -> Tensor | None:
        """Return the scale that the gradients carry now; None without a scaler, or if the user has unscaled them."""
        if self._scaler is None:
            return None
        scaled = [optimizer for optimizer in self._optimizers if not self._is_unscaled(optimizer)]
        if len(scaled) == len(self._optimizers):
            return self.now
        for optimizer in scaled:  # the user has unscaled some of them: one factor must hold for all
            self._scaler.unscale_(optimizer)
        return None

    def _is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        assert self._scaler is not None
        # Private to GradScaler, keyed by id(optimizer); unscale_() sets the stage.
        states: dict[int, dict[str, Any]] = self._scaler._per_optimizer_states
        return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"

    def end_step(self) -> None:
        """Expect scaled gradients again. `GradScaler.update` does so too, but is not called after a bad loss."""
        self._carried = self._waiting_scale = None
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler._per_optimizer_states.pop(id(optimizer), None)

    @torch.no_grad()
    def update(self, *, bad_gradient: Tensor, bad_loss: Tensor | None) -> None:
        """Report to the scaler how the step went; no host read. `bad_loss` None means the loss is known to be good."""
        scaler = self._scaler
        if scaler is None or scaler._get_scale_async() is None:
            return
        scale, growth = scaler._check_scale_growth_tracker("update")
        for driver in _drivers[scaler]:
            if driver is not self:
                driver._note_waiting(scale)
        before = None if bad_loss is None else (scale.clone(), growth.clone())
        found = bad_gradient.float().to(scale.device).reshape(1)
        for optimizer in self._optimizers:
            # A clone for each: GradScaler.update() adds the others to the first in place.
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {scale.device: found.clone()}
        scaler.update()
        if before is not None and bad_loss is not None:
            ignore = bad_loss.to(scale.device)
            # Undone on the device: the host does not know yet whether the loss was bad.
            scale.copy_(torch.where(ignore, before[0], scale))
            growth.copy_(torch.where(ignore, before[1], growth))

    def leave_out(self, _: Callable[[], Any]) -> float | None:
        """Return that nothing but the guard leaves steps out."""
        return None

    def _note_waiting(self, scale: Tensor) -> None:
        """Note the current scale for gradients that await this guard's step: another guard is about to change it."""
        if self._carried is None:
            held = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
            self._waiting.note([("", parameter) for parameter in held])
            self._waiting_scale = scale.clone()
