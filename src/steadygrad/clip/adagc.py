"""AdaGC: clip each tensor's gradient against the moving average of its own clipped norms (arXiv 2502.11034).

While a tensor warms up it gets the global clip, and gamma is its smallest norm after that clip. Then its factor
is min(1, relative gamma / norm), and gamma = beta gamma + (1 - beta) clipped norm. gamma and the warm-up belong to the
parameter's name: parameters may come and go between steps, and one that is unfrozen late warms up on its own. A norm of
exactly 0 (an unused expert, a LoRA factor at step 0) changes neither: gamma = 0 would freeze that tensor forever.
Edits the gradients, one launch per tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.clip.base import limit, shrink
from steadygrad.clip.edit import find_ratio, scale_gradients
from steadygrad.clip.state import DeviceState
from steadygrad.config import AdaGC
from steadygrad.errors import UsageError
from steadygrad.measure import Measurement


class AdaGCClipper:
    """One gamma and one count per parameter name, in two vectors on the device."""

    edits_gradients = True
    constant_norm: float | None = None

    def __init__(self, settings: AdaGC) -> None:
        self._settings = settings
        self._state = DeviceState("AdaGC", gamma=(0,), count=(0,))
        self._row_of: dict[str, int] = {}
        self._rows: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def clip(self, m: Measurement) -> Tensor:
        """Scale the gradients; return the norm after clipping divided by the norm before."""
        rows = self._find_rows(m)
        state = self._state.on(m.packed.device)
        gamma, count = state["gamma"][rows], state["count"][rows]  # [N], [N]
        norms, seen = m.table[:, 0], m.table[:, 0] > 0
        factors = self._find_factors(m.norm, norms, gamma, count)
        new_gamma = torch.where(seen, self._move(norms * factors, gamma, count), gamma)
        self._state.advance(
            m,
            # Out of place: after a bad step the old tensors are kept.
            gamma=state["gamma"].index_copy(0, rows, new_gamma),
            count=state["count"].index_copy(0, rows, count + seen),
        )
        scale_gradients(m.gradients, factors, [1] * len(m.gradients))
        after = torch.linalg.vector_norm(norms * factors)
        return find_ratio(m.norm, after, (seen & (factors < 1.0)).any())

    def _find_factors(self, norm: Tensor, norms: Tensor, gamma: Tensor, count: Tensor) -> Tensor:
        alone = shrink(norms, self._settings.relative * gamma)
        return torch.where(count < self._settings.warmup, limit(norm, self._settings.max_norm), alone)

    def _move(self, clipped: Tensor, gamma: Tensor, count: Tensor) -> Tensor:
        smallest = torch.where(count > 0, torch.minimum(gamma, clipped), clipped)
        average = self._settings.beta * gamma + (1.0 - self._settings.beta) * clipped
        return torch.where(count < self._settings.warmup, smallest, average)

    def _find_rows(self, m: Measurement) -> Tensor:
        """Return the rows of this step's parameters in the state, [N]; new names are appended."""
        device = m.packed.device
        rows = self._rows.get(m.names)
        if rows is None or rows.device != device:
            self._state.on(device)  # created before it is extended
            new = [name for name in m.names if name not in self._row_of]
            self._row_of.update({name: len(self._row_of) + i for i, name in enumerate(new)})
            self._state.extend(len(new))
            rows = torch.tensor([self._row_of[name] for name in m.names], device="cpu").to(device, non_blocking=True)
            self._rows[m.names] = rows
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the names, and gamma and count in their order."""
        tensors = self._state.state_dict()
        return {"names": list(self._row_of), **tensors} if tensors else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` returned, matching parameters by name."""
        names = [str(name) for name in state.get("names", ())]
        tensors = {key: value for key, value in state.items() if key != "names"}
        shapes = {tuple(torch.as_tensor(value).shape) for value in tensors.values()}
        if state and shapes != {(len(names),)}:
            raise UsageError(
                f"the state to load into AdaGC has {len(names)} names but tensors of shape {sorted(shapes)}. "
                "Load it into the clip strategy that it was saved from, whole."
            )
        self._state.load_state_dict(tensors)
        self._row_of = {name: row for row, name in enumerate(names)}
        self._rows = {}
