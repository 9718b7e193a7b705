"""AdaptiveUnitClip: clip each unit's gradient to a share of its weights' norm (AGC, arXiv 2102.06171). Stateless.

A unit is a row of dimension 0 (all other dimensions of a convolution belong to it); a vector or scalar is one unit.
‖G‖ may reach ratio · max(‖W‖, eps): the floor lets a unit that starts at zero move. Gradient norms are summed in
float64, because the square of 1e25 overflows fp32 and an infinite norm would scale its unit to zero; a weight norm that
overflows clips nothing. A sparse gradient is clipped by its stored rows. Edits the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.clip.base import shrink
from steadygrad.clip.edit import find_ratio, scale_gradients, stored_values, write_back
from steadygrad.config import AdaptiveUnitClip
from steadygrad.errors import UnsupportedError
from steadygrad.measure import Measurement


class AdaptiveUnitClipper:
    """Computes one factor for each unit of each parameter that is not excluded."""

    edits_gradients = True
    constant_norm: float | None = None

    def __init__(self, settings: AdaptiveUnitClip) -> None:
        self._settings = settings

    @torch.no_grad()
    def clip(self, m: Measurement) -> Tensor:
        """Scale the gradients; return the norm after clipping divided by the norm before."""
        chosen = [i for i, name in enumerate(m.names) if not self._is_excluded(name)]
        if not chosen:
            return torch.ones_like(m.norm)
        gradients = [_coalesce(m.gradients[i], m.names[i]) for i in chosen]
        weights = [_matching_rows(m.parameters[i].detach(), g) for i, g in zip(chosen, gradients)]
        norms = [_measure_units(g, torch.float64).to(m.packed.device) for g in gradients]
        weight_norms = [_measure_units(w, torch.float32).to(m.packed.device) for w in weights]
        before = torch.cat(norms)  # [units of all chosen parameters]
        factors = shrink(before, self._settings.ratio * torch.cat(weight_norms).double().clamp(min=self._settings.eps))
        scale_gradients(gradients, factors, [len(n) for n in norms])
        write_back(gradients, [m.gradients[i] for i in chosen])
        return self._find_ratio(m, before, factors)

    def _is_excluded(self, name: str) -> bool:
        return any(part in name for part in self._settings.exclude)

    def _find_ratio(self, m: Measurement, before: Tensor, factors: Tensor) -> Tensor:
        # The measured norms of what is left alone, [1] each: the ratio is that of all gradients.
        others = [row[:1] for row, name in zip(m.table.unbind(), m.names) if self._is_excluded(name)]
        norm_before = torch.linalg.vector_norm(torch.cat([before, *others]))
        norm_after = torch.linalg.vector_norm(torch.cat([before * factors, *others]))
        return find_ratio(norm_before, norm_after, (factors < 1.0).any())

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


def _coalesce(gradient: Tensor, name: str) -> Tensor:
    if gradient.layout is torch.strided:
        return gradient
    if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1 and gradient.dim() > 1:
        return gradient.coalesce()
    raise UnsupportedError(
        f"the gradient of {name!r} is sparse ({gradient.layout}) in more than its rows: units cannot be told apart. "
        f"Use AdaptiveUnitClip(exclude=({name!r},)), or sparse=False."
    )


def _matching_rows(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return the rows of `weight` that `gradient` has."""
    if gradient.layout is torch.strided:
        return weight
    return weight.index_select(0, gradient.indices()[0])


def _measure_units(tensor: Tensor, at_least: torch.dtype) -> Tensor:
    """Return the L2 norm of each unit, summed in `at_least` or wider, [units]."""
    values = stored_values(tensor)
    dims = tuple(range(1 if values.dim() > 1 else 0, values.dim()))
    wide = torch.promote_types(values.dtype, at_least)
    norms: Tensor = torch.linalg.vector_norm(values, dim=dims, dtype=wide)
    return norms.reshape(-1)
