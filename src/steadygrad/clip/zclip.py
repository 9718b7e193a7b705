"""ZClip: clip a norm that is a spike by its z-score against a moving mean and variance (arXiv 2504.02507).

While warming up it only collects: mean and population variance by Welford's update, which needs no buffer of norms.
After that z = (norm - mean) / (std + eps), and a norm with z > z* is clipped to mean + z*^2 std / z: the larger the
spike, the closer to the mean. Mean and variance move with the clipped norm, so a spike cannot drag them; as in the
authors' code the variance is alpha var + (1 - alpha) (x - new mean)^2, and `max_norm` bounds what reaches the optimizer
but not what the statistics see. A norm of exactly 0 is not collected: a mean of 0 would clip everything to 0 forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.clip.base import limit, shrink
from steadygrad.clip.state import DeviceState
from steadygrad.config import ZClip
from steadygrad.measure import Measurement


class ZClipper:
    """Three scalars on the device: how many norms were collected, their mean and variance."""

    edits_gradients = False
    constant_norm: float | None = None

    def __init__(self, settings: ZClip) -> None:
        self._settings = settings
        self._state = DeviceState("ZClip", count=(), mean=(), variance=())

    @torch.no_grad()
    def clip(self, m: Measurement) -> Tensor:
        """Return the factor for all gradients."""
        state = self._state.on(m.packed.device)
        target = self._find_target(m.norm, **state)
        moved = self._move(target, **state)
        self._state.advance(m, **{name: torch.where(m.norm > 0, moved[name], state[name]) for name in state})
        factor = shrink(m.norm, target)
        if self._settings.max_norm is not None:
            factor = torch.minimum(factor, limit(m.norm, self._settings.max_norm))
        return factor

    def _find_target(self, norm: Tensor, count: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return what the norm is clipped to: itself, unless it is a spike."""
        deviation = variance.sqrt()
        score = (norm - mean) / (deviation + self._settings.eps)
        is_spike = (count >= self._settings.warmup) & (score > self._settings.z)
        # A score of 0 divides by zero only in the branch that is not selected.
        return torch.where(is_spike, mean + self._settings.z**2 * deviation / score, norm)

    def _move(self, value: Tensor, count: Tensor, mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
        """Return the statistics updated with `value`: by Welford while warming up, by moving averages after that."""
        warming = count < self._settings.warmup
        rate = torch.where(warming, 1.0 / (count + 1.0), 1.0 - self._settings.alpha)
        new_mean = mean + rate * (value - mean)
        square = (value - new_mean) * (value - torch.where(warming, mean, new_mean))
        return {"count": count + 1.0, "mean": new_mean, "variance": (1.0 - rate) * variance + rate * square}

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean and variance."""
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        self._state.load_state_dict(state)
