"""FixedNorm: scale all gradients when the global norm exceeds a constant. Stateless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steadygrad.clip.base import limit
from steadygrad.config import FixedNorm
from steadygrad.measure import Measurement


class FixedNormClipper:
    """min(1, max_norm / (norm + 1e-6)), the formula of `clip_grad_norm_`."""

    edits_gradients = False

    def __init__(self, settings: FixedNorm) -> None:
        self.constant_norm: float | None = settings.max_norm

    def clip(self, m: Measurement) -> Tensor:
        """The factor for all gradients."""
        assert self.constant_norm is not None
        return limit(m.norm, self.constant_norm)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to remember."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take."""
