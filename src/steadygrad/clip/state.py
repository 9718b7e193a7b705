"""DeviceState: the tensors that a strategy remembers -> the same tensors one healthy step later.

Everything is float64 and starts at zero, created on the device of the first step, so that building a clipper needs no
device. A bad step never gets in: `advance` applies `keep_if_bad` to every tensor, in one place. "Empty" is never marked
with a non-finite value, so that a checkpoint can be checked for such values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.clip.base import keep_if_bad
from steadygrad.errors import UsageError
from steadygrad.measure import Measurement


class DeviceState:
    """Named tensors of `owner`; `shapes` are those before the first step. A size of 0 may grow, others are fixed."""

    def __init__(self, owner: str, **shapes: tuple[int, ...]) -> None:
        self._owner = owner
        self._shapes = shapes
        self._values: dict[str, Tensor] = {}

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors on `device`: created at the first step, moved if they were loaded from elsewhere."""
        if not self._values:
            self._values = {
                name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in self._shapes.items()
            }
        elif any(value.device != device for value in self._values.values()):
            self._values = {name: value.to(device) for name, value in self._values.items()}
        return self._values

    def extend(self, num_entries: int) -> None:
        """Add zeros to the end of every tensor."""
        self._values = {name: torch.cat([value, value.new_zeros(num_entries)]) for name, value in self._values.items()}

    def advance(self, m: Measurement, **new: Tensor) -> None:
        """Store the new tensors, or keep the old ones when the step is bad."""
        for name, value in new.items():
            self._values[name] = keep_if_bad(m, self._values[name], value)

    def state_dict(self) -> dict[str, Any]:
        """Return clones of the tensors; empty before the first step."""
        return {name: value.clone() for name, value in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load clones of what `state_dict()` returned; an empty state means before the first step."""
        if state and set(state) != set(self._shapes):
            raise UsageError(
                f"the state to load into {self._owner} has entries {sorted(state)}, expected {sorted(self._shapes)}. "
                "Load it into the clip strategy that it was saved from."
            )
        values = {name: torch.as_tensor(value).detach().to(torch.float64, copy=True) for name, value in state.items()}
        for name, value in values.items():
            self._check_shape(name, tuple(value.shape))
        self._values = values

    def _check_shape(self, name: str, found: tuple[int, ...]) -> None:
        expected = self._shapes[name]
        if len(found) != len(expected) or any(want not in (0, got) for want, got in zip(expected, found)):
            raise UsageError(
                f"the state to load into {self._owner} has {name!r} of shape {found}, expected {expected}. "
                "Use the settings that it was saved with, or load an empty state to start over."
            )
