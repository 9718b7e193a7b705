"""The loop without a guard, as it was written before: look at loss and gradients, give up at the first bad one.

It clips as the guarded loop does. With float16 the look comes after the gradients are unscaled and before the scaler
could have skipped the step, which is how an overflow that a loss scaler is made for ended a training of 44 epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steadygrad_recipes.cod import words


class NonfiniteStop:
    """Ends the training with an error; `find_batch` says where it stands, `tell` is given the lines before."""

    def __init__(self, grad_clip: float, *, find_batch: Callable[[], int], tell: Callable[[str], None]) -> None:
        self._grad_clip, self._find_batch, self._tell = grad_clip, find_batch, tell
        self.norms: list[float] = []
        """Of this epoch."""

    def check_loss(self, loss: Tensor) -> None:
        """Raise unless it is finite. The host waits for it: a guard does not."""
        if not bool(torch.isfinite(loss)):
            self._stop(words.spell_bad_loss(self._find_batch(), float(loss.detach())), "loss")

    def check_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Clip, and raise unless the norm is finite."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._grad_clip))
        if not math.isfinite(norm):
            self._stop(words.spell_bad_gradients(self._find_batch(), norm), "gradients")
        self.norms.append(norm)

    def _stop(self, lines: list[str], what: str) -> None:
        for line in lines:
            self._tell(line)
        raise ValueError(f"Training stopped due to NaN/Inf {what}.")


class StoppingScaler(torch.amp.GradScaler):
    """A loss scaler whose step looks at the unscaled gradients first."""

    def __init__(self, stop: NonfiniteStop, device: str, **settings: Any) -> None:
        super().__init__(device, **settings)
        self._stop = stop

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale, look, step."""
        self.unscale_(optimizer)
        self._stop.check_gradients(optimizer)
        return super().step(optimizer, *args, **kwargs)
