"""UpdateMeter: how far one optimizer step moved each parameter, relative to its size.

Reads the weights twice and keeps a copy of them while the optimizer runs, so it runs only every N steps
(`MeasureConfig.parameters_every`). A healthy ratio is around 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.measure.ranks import Ranks
from steadygrad.state.shards import take_local


class UpdateMeter:
    """Call `before` and `after` around the optimizer step."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], *, ranks: Ranks | None = None) -> None:
        self.names = tuple(name for name, _ in named)
        self._ranks = ranks if ranks is not None else Ranks()
        self._parameters = [parameter for _, parameter in named]
        self._before: list[Tensor] = []

    @torch.no_grad()
    def before(self) -> None:
        """Remember the weights."""
        now = [take_local(parameter).detach() for parameter in self._parameters]
        self._before = [torch.empty_like(tensor) for tensor in now]
        torch._foreach_copy_(self._before, now)

    @torch.no_grad()
    def after(self) -> Tensor:
        """Return norms before the step, then norms of the difference: float64 [2 P] on the first parameter's device."""
        norms = _measure_norms(self._before)
        moved = self._before
        torch._foreach_sub_(moved, [take_local(parameter).detach() for parameter in self._parameters])
        self._before = []
        numbers = torch.cat([norms, _measure_norms(moved)])
        # Twice the list: one weight for each norm, and one for each difference.
        return self._ranks.combine_norms(numbers, self._parameters * 2)

    def read(self, numbers: Sequence[float]) -> tuple[dict[str, float], dict[str, float]]:
        """Return parameter norms, and update-to-weight ratios (0 for a parameter that is all zero and did not move)."""
        count = len(self.names)
        norms = dict(zip(self.names, numbers[:count]))
        # About the smallest normal float32: 0 / tiny is 0, and nothing is divided by 0.
        tiny = 1e-38
        ratios = {name: moved / max(norms[name], tiny) for name, moved in zip(self.names, numbers[count:])}
        return norms, ratios

    def read_norm(self, numbers: Sequence[float]) -> float:
        """Return the global L2 norm of what the optimizer added, from the same numbers."""
        return math.hypot(*numbers[len(self.names) :])


def _measure_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each: float64 [N] on the first one's device, by a call for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    norms: dict[int, Tensor] = {}
    for rows in groups.values():
        values = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (tensors[i] for i in rows)]
        norms |= zip(rows, torch._foreach_norm(values, 2, torch.float64))
    return torch.stack([norms[i].to(tensors[0].device) for i in range(len(tensors))])
