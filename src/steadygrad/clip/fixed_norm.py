"""FixedNorm: scale all gradients when the global norm exceeds a constant, which a policy may have lowered."""

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
        self._max_norm, self._factor = settings.max_norm, 1.0
        self.constant_norm: float | None = settings.max_norm

    def clip(self, m: Measurement) -> Tensor:
        """Return the factor for all gradients."""
        return limit(m.norm, self.threshold)

    @property
    def threshold(self) -> float:
        """The norm that gradients are clipped to now."""
        return self._max_norm * self._factor

    def tighten(self, factor: float) -> None:
        """Lower the threshold."""
        self._factor *= factor
        self.constant_norm = self.threshold

    def state_dict(self) -> dict[str, Any]:
        """Return the factor by which the threshold was lowered; the threshold itself is the user's."""
        return {} if self._factor == 1.0 else {"factor": self._factor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        self._factor = float(state.get("factor", 1.0))
        self.constant_norm = self.threshold
