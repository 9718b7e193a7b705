"""The interface of the clip strategies: numbers on the device -> a clip coefficient on the device, with no host read.

A `Clipper` holds a strategy's state as tensors. A bad step (`m.found` is 1) must leave that state as it was: every
update is a `torch.where` on `m.found`, never a product with it (0 * NaN is NaN), and the host cannot branch on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from steadygrad.measure import Measurement


class Clipper(Protocol):
    """State of one clip strategy on the device."""

    edits_gradients: bool
    """False: `clip` returns a factor for all gradients, which the caller applies (a fused optimizer does it in its own
    pass). True: `clip` changes the gradients itself, which must be unscaled by then, and returns a ratio to report."""

    constant_norm: float | None
    """A constant threshold on the global norm. The Meter then computes the coefficient in its own launch, by the
    formula of `clip`, which is not called. None for every other strategy."""

    def clip(self, m: Measurement) -> Tensor:
        """Return the norm after clipping divided by the norm before: a float64 scalar in (0, 1], on `m`'s device."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain numbers; empty before the first step."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned."""
        ...


def keep_if_bad(m: Measurement, old: Tensor, new: Tensor) -> Tensor:
    """Return `new`, or `old` when the step is bad."""
    return torch.where(m.found.bool(), old, new)


def limit(norm: Tensor, threshold: Tensor | float) -> Tensor:
    """Return min(1, threshold / norm), with torch's 1e-6 in the denominator so that both clip alike."""
    return torch.clamp(threshold / (norm + 1e-6), max=1.0)


def shrink(norm: Tensor, threshold: Tensor | float) -> Tensor:
    """Return threshold / norm where norm > threshold, else exactly 1.

    For thresholds derived from the norms themselves. `limit` would clip a norm that equals its threshold, and would
    scale norms below its 1e-6 to nearly nothing. A threshold that is NaN or inf clips nothing.
    """
    return torch.where(norm > threshold, threshold / norm, 1.0)
