"""The loss scale of a DeepSpeed engine; in its own file, so that a Guard without an engine loads nothing else of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from steadygrad.act.zero import Partitions


class EngineScale:
    """The engine's loss scale, as a Guard asks for a GradScaler's. The engine itself scales, and updates the scale."""

    unscales = False  # the engine divides its gradients by the scale itself
    has_taken = False

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    def is_enabled(self) -> bool:
        """Return that the loss is scaled."""
        return True

    @property
    def now(self) -> Tensor | None:
        """The scale of the current step."""
        scale = self._partitions.loss_scale
        return None if scale is None else torch.tensor(scale, device="cpu")

    @property
    def factor(self) -> Tensor | None:
        """The scale that the gradients carry."""
        return self.now

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as it is: the engine scales it."""
        return loss

    def end_step(self) -> None:
        """End the step."""

    def update(self, *, bad_gradient: Tensor, bad_loss: Tensor | None) -> None:
        """Leave that to the engine."""

    def leave_out(self, _: Callable[[], Any]) -> float | None:
        """Return that the engine is not asked: it is never given such a step."""
        return None
