"""Norm, unit vector and standard deviation along dimensions: finite, with finite gradients, for every finite input.

Everything is divided by a power of two near the largest element first, which changes no digit and keeps the squares
inside the range: vectors of 1e-30 have a norm, vectors of 1e38 have a direction. The zero vector has norm 0, unit
vector 0 and gradient 0, also to second order: gradient penalties may differentiate through all three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.losses.check import require_eps, require_number, require_tensors
from steadygrad.losses.elementwise import power_of_two_near
from steadygrad.losses.precision import hold, narrow, smallest_normal, widen
from steadygrad.losses.shapes import Dims, as_dims, count_along, sum_along


def safe_norm(x: Tensor, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the L2 norm, as `torch.linalg.vector_norm`; of all of `x` unless `dim` is given.

    A norm beyond the dtype is held at its largest number, with a zero gradient.
    """
    require_tensors("safe_norm", x=x)
    dims = as_dims(x, dim, "safe_norm")
    wide = widen(x)
    if count_along(wide, dims) == 0:
        return narrow(sum_along(wide, dims, keepdim=keepdim), x, autocast_keeps=True)
    norm = _norm_of(wide, dims)
    return narrow(_drop_dims(norm, dims, keepdim=keepdim), x, autocast_keeps=True)


def safe_normalize(x: Tensor, dim: Dims = -1, *, eps: float | None = None) -> Tensor:
    """Return x / max(norm, eps), as `F.normalize`; the zero vector has a zero gradient instead of one of 1 / eps.

    eps is 1e-12 by default, and in fp16 at least its smallest normal number, 6e-5.
    """
    require_tensors("safe_normalize", x=x)
    require_eps("safe_normalize", eps)
    dims = as_dims(x, dim, "safe_normalize")
    wide = widen(x)
    if count_along(wide, dims) == 0:
        return x
    scaled, scale, is_zero = _scale_down(wide, dims)
    floor = max(1e-12 if eps is None else eps, smallest_normal(x))
    norm = torch.linalg.vector_norm(scaled, dim=dims, keepdim=True)
    # `scaled` and the floor are both divided by the scale, so the quotient is that of the original vector
    unit = scaled / torch.maximum(norm, floor / scale)
    return narrow(torch.where(is_zero, 0.0, unit), x, autocast_keeps=True)


def least_norm(features: Tensor) -> float:
    """For losses that scale unit vectors by up to 100: shorter vectors count as this long.

    It is F.normalize's 1e-12, and in fp16 what lets a gradient of 2 · 100 / norm fit.
    """
    return 2.0**-8 if features.dtype is torch.float16 else 1e-12


def safe_std(x: Tensor, dim: Dims = None, *, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Return the standard deviation, as `torch.std`: of all of `x` unless `dim` is given.

    0 with a zero gradient where samples are too few; torch gives NaN there.
    """
    require_tensors("safe_std", x=x)
    require_number("safe_std", "correction", correction, "1 is Bessel's, 0 is none.")
    dims = as_dims(x, dim, "safe_std")
    wide = widen(x)
    count = count_along(wide, dims)
    if count <= max(correction, 0):
        return narrow(_zero_sum(wide, dims, keepdim=keepdim), x, autocast_keeps=False)
    scaled, scale, is_zero = _scale_down(wide, dims)
    spread = _norm_of(scaled - scaled.mean(dims, keepdim=True), dims) / math.sqrt(count - correction)
    std = hold(torch.where(is_zero, 0.0, spread * scale), torch.finfo(wide.dtype).max)
    return narrow(_drop_dims(std, dims, keepdim=keepdim), x, autocast_keeps=False)


def _zero_sum(x: Tensor, dims: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """Return zeros of the shape of a sum, connected to the graph: the gradient is zero, not missing."""
    total = sum_along(x, dims, keepdim=keepdim)
    return torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0.0)  # times 0 would keep a NaN


def _norm_of(wide: Tensor, dims: tuple[int, ...]) -> Tensor:
    scaled, scale, is_zero = _scale_down(wide, dims)
    norm = torch.linalg.vector_norm(scaled, dim=dims, keepdim=True)
    held = hold(torch.where(is_zero, 0.0, norm * scale), torch.finfo(wide.dtype).max)
    return torch.where(norm.isinf(), norm, held)  # an element is infinite: so is the norm


def _scale_down(wide: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled, the scale, and where all is zero; there the scaled vector is ones, whose norm has all derivatives.

    Subnormal numbers count as zero: the second derivative, one over the norm, has no number there.
    """
    # Detached: the scale cancels out of the result, and its gradient would only be rounding
    size = wide.detach().abs().amax(dims, keepdim=True)
    scale = torch.where(size.isinf(), 1.0, power_of_two_near(size))  # inf / inf is NaN
    is_zero = size < torch.finfo(wide.dtype).tiny
    return torch.where(is_zero, 1.0, wide / scale), scale, is_zero


def _drop_dims(reduced: Tensor, dims: tuple[int, ...], *, keepdim: bool) -> Tensor:
    return reduced if keepdim or not dims else reduced.squeeze(dims)
