"""Driving a `torch.amp.GradScaler`: we unscale in our own pass and tell it what was found.

`GradScaler.step` would overwrite the optimizer's `found_inf` with its own count, so its step is never called. After a
step with overflowed gradients the scale backs off; after a non-finite *loss* the scaler does not hear of the step at
all, since no scale would have helped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ScalerDriver:
    """What Guard needs of a GradScaler that may be None or disabled."""

    def __init__(self, scaler: torch.amp.GradScaler | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizers = list(optimizers)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward from."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    @property
    def now(self) -> Tensor | None:
        """The scale as it stands; None without a scaler, or before it has scaled anything."""
        return None if self._scaler is None else self._scaler._get_scale_async()

    @property
    def factor(self) -> Tensor | None:
        """The scale that the gradients carry now; None without a scaler, or when the user has unscaled them."""
        if self._scaler is None:
            return None
        scaled = [optimizer for optimizer in self._optimizers if not self._is_unscaled(optimizer)]
        if len(scaled) == len(self._optimizers):
            return self._scaler._get_scale_async()
        for optimizer in scaled:  # the user has unscaled some of them: one factor must hold for all
            self._scaler.unscale_(optimizer)
        return None

    def _is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        assert self._scaler is not None
        states: dict[int, dict[str, Any]] = self._scaler._per_optimizer_states
        return id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED"

    def end_step(self) -> None:
        """The next gradients are scaled again. `GradScaler.update` says so too, but is not called after a bad loss."""
        if self._scaler is not None:
            for optimizer in self._optimizers:
                self._scaler._per_optimizer_states.pop(id(optimizer), None)

    @torch.no_grad()
    def update(self, *, bad_gradient: Tensor, bad_loss: Tensor | None) -> None:
        """Tell the scaler how the step went; no host read. `bad_loss` None means that the loss is known to be good."""
        scaler = self._scaler
        if scaler is None or scaler._get_scale_async() is None:
            return
        scale, growth = scaler._check_scale_growth_tracker("update")
        before = None if bad_loss is None else (scale.clone(), growth.clone())
        found = bad_gradient.float().to(scale.device).reshape(1)
        for optimizer in self._optimizers:
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {scale.device: found.clone()}
        scaler.update()
        if before is not None and bad_loss is not None:
            ignore = bad_loss.to(scale.device)
            scale.copy_(torch.where(ignore, before[0], scale))
            growth.copy_(torch.where(ignore, before[1], growth))
