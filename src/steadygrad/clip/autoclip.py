"""AutoClip: clip at a percentile of the norms seen so far, the current one included (Seetharaman et al. 2020).

The last `window` norms are kept in a ring on the device; the original keeps all of them. The percentile interpolates
between neighbours as numpy's does. A norm of exactly 0 is not stored: enough of them would make the threshold 0 and
stop the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.clip.base import shrink
from steadygrad.clip.state import DeviceState
from steadygrad.config import AutoClip
from steadygrad.measure import Measurement


class AutoClipper:
    """A ring of norms on the device, and how many have been written to it."""

    edits_gradients = False
    constant_norm: float | None = None

    def __init__(self, settings: AutoClip) -> None:
        self._window = settings.window
        self._quantile = settings.percentile / 100.0
        self._state = DeviceState("AutoClip", norms=(settings.window,), count=())

    @torch.no_grad()
    def clip(self, m: Measurement) -> Tensor:
        """Return the factor for all gradients; on a bad step, which is not stored, it depends on past norms only."""
        state = self._state.on(m.packed.device)
        norms, count = state["norms"], state["count"]
        # Stays on the device: the host does not know how many norms were stored.
        position = (count % self._window).long()
        written = norms.index_copy(0, position.reshape(1), m.norm.reshape(1))
        seen = m.norm > 0
        self._state.advance(m, norms=torch.where(seen, written, norms), count=count + seen)
        return shrink(m.norm, self._find_percentile(**self._state.on(m.packed.device)))

    def _find_percentile(self, norms: Tensor, count: Tensor) -> Tensor:
        """Return the threshold; inf or NaN, which clips nothing, while the ring is empty."""
        num_norms = count.clamp(max=self._window)
        is_filled = torch.arange(self._window, device=norms.device) < num_norms
        ordered = torch.where(is_filled, norms, math.inf).sort().values  # [window]; empty places last
        last = (num_norms - 1.0).clamp(min=0.0)
        rank = last * self._quantile
        below = rank.floor()
        low, high = ordered[torch.stack([below, torch.minimum(below + 1.0, last)]).long()].unbind()
        return low + (high - low) * (rank - below)

    def state_dict(self) -> dict[str, Any]:
        """Return the ring and the count."""
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned; the window must be the same as when it was saved."""
        self._state.load_state_dict(state)
