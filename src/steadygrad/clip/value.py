"""ClipValue: clamp each gradient element to [-value, value]. Stateless; edits the gradients.

Reports the norm after clamping divided by the norm before, which costs one more pass. A tensor whose largest element is
within the bound was not changed, so its measured norm is reused and a step without clamping reports exactly 1.
NaN stays NaN: that step is skipped anyway. Complex gradients have no order to clamp by and are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.clip.edit import find_ratio, stored_values, write_back
from steadygrad.config import ClipValue
from steadygrad.errors import UnsupportedError
from steadygrad.measure import Measurement

PIECE = 1 << 12
"""Elements summed at once on the CPU, where float64 sums cost 25 times as much and long fp32 sums are off by 4e-4."""


class ValueClipper:
    """Clamps in place, all tensors of a device and dtype at once."""

    edits_gradients = True
    constant_norm: float | None = None

    def __init__(self, settings: ClipValue) -> None:
        self._value = settings.value

    @torch.no_grad()
    def clip(self, m: Measurement) -> Tensor:
        """Clamp the gradients; return the norm after clamping divided by the norm before."""
        _refuse_complex(m)
        coalesced = [g.coalesce() if g.layout is torch.sparse_coo else g for g in m.gradients]
        values = [stored_values(g) for g in coalesced]
        clamped_norms = [m.norm] * len(values)
        for rows in _group_alike(values):
            group = [values[i] for i in rows]
            self._clamp(group)
            for i, norm in zip(rows, _measure_norms(group)):
                clamped_norms[i] = norm.to(m.packed.device)
        write_back(coalesced, m.gradients)
        return self._find_ratio(m, torch.stack(clamped_norms))

    def _find_ratio(self, m: Measurement, clamped_norms: Tensor) -> Tensor:
        norms, changed = m.table[:, 0], m.table[:, 1] > self._value
        after = torch.linalg.vector_norm(torch.where(changed, clamped_norms, norms))
        return find_ratio(m.norm, after, changed.any())

    def _clamp(self, group: list[Tensor]) -> None:
        # torch refuses a bound beyond the dtype's largest number, where there is nothing to clamp anyway.
        bound = min(self._value, torch.finfo(group[0].dtype).max)
        torch._foreach_clamp_min_(group, -bound)
        torch._foreach_clamp_max_(group, bound)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


def _refuse_complex(m: Measurement) -> None:
    for name, gradient in zip(m.names, m.gradients):
        if gradient.is_complex():
            raise UnsupportedError(
                f"the gradient of {name!r} is {gradient.dtype}: complex numbers have no order to clamp by. "
                "Use FixedNorm or another strategy that scales."
            )


def _group_alike(values: Sequence[Tensor]) -> Iterable[list[int]]:
    """Group the positions of tensors by device and dtype: foreach is a single launch only within such a group."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault((value.device, value.dtype), []).append(i)
    return groups.values()


def _measure_norms(group: list[Tensor]) -> Sequence[Tensor]:
    if not group[0].is_cpu:
        return torch._foreach_norm(group, 2, dtype=torch.float64)
    wide = torch.promote_types(group[0].dtype, torch.float32)
    pieces = [torch._foreach_norm(torch.split(value.flatten(), PIECE), 2, dtype=wide) for value in group]
    return [torch.linalg.vector_norm(torch.stack(norms).double()) for norms in pieces]
