"""Elements of a loss -> mean, sum, or as they are; with a mask, over what it leaves.

What is masked is selected out, never multiplied by 0. The mean of nothing is a zero connected to the graph, so that
every rank has a gradient. Where the plain sum overflows it is formed of elements scaled by a power of two, so that the
mean of finite elements is finite; elsewhere it is the plain one. NaN stays, in the value and in the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.errors import ConfigError
from steadygrad.losses.check import require_masked
from steadygrad.losses.precision import hold, narrow, widen
from steadygrad.losses.shapes import Dims, as_dims, count_along, sum_along

REDUCTIONS = ("mean", "sum", "none")

HEADROOM = 2.0**-24
"""Sixteen million elements may each be the largest number of the dtype; a power of two changes no digit."""


def masked_mean(x: Tensor, mask: Tensor | None = None, dim: Dims = None, *, keepdim: bool = False) -> Tensor:
    """Return the mean of `x` where `mask` is True; 0 with a zero gradient where nothing is left."""
    require_masked("masked_mean", x, mask)
    wide = widen(x)
    kept = wide if mask is None else select(wide, mask)
    dims = as_dims(kept, dim, "masked_mean")
    count = count_kept(kept, mask, dims, keepdim=keepdim)
    return narrow(divide_sum(kept, count, dims, keepdim=keepdim), x, autocast_keeps=True)


def reduce_loss(losses: Tensor, reduction: str, mask: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Reduce `losses`, which must be 0 where masked. The mean is over what the mask leaves, or over `weight`."""
    top = torch.finfo(losses.dtype).max
    losses = hold(losses, top)
    if reduction == "none":
        return losses
    dims = tuple(range(losses.dim()))
    if reduction == "sum":
        return _add_up(losses, top)
    if weight is None:
        return divide_sum(losses, count_kept(losses, mask, dims), dims)
    total = weight.sum()
    return divide_sum(losses, torch.where(total == 0, 1.0, total), dims)  # everything ignored: 0 / 1


def require_reduction(function: str, reduction: str, allowed: Sequence[str] = REDUCTIONS) -> None:
    if reduction not in allowed:
        raise ConfigError(f"{function}'s reduction must be one of {', '.join(allowed)}, got {reduction!r}.")


def select(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` where `mask` is True, and 0 with a zero gradient elsewhere, whatever stands there."""
    return torch.where(mask.bool(), x, 0.0)


def count_kept(x: Tensor, mask: Tensor | None, dims: Sequence[int], *, keepdim: bool = False) -> Tensor | int:
    """Return how many elements of `x` the mask leaves, along `dims`; at least 1."""
    if mask is None:
        return max(count_along(x, dims), 1)
    return sum_along(mask.bool().expand_as(x).to(x.dtype), dims, keepdim=keepdim).clamp(min=1)


def divide_sum(x: Tensor, count: Tensor | int, dims: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """The sum over `dims` by `count`; finite if all elements are, though their mean may round beyond the dtype."""
    # Always both: asking first whether the plain sum overflows would make the host wait
    total, small = sum_along(x, dims, keepdim=keepdim), sum_along(x * HEADROOM, dims, keepdim=keepdim)
    mean = torch.where(_overflowed(total, small), small / (count * HEADROOM), total / count)
    # Only what rounding put beyond the dtype is held: with an infinite element the mean stays infinite
    return torch.where(small.isinf(), mean, hold(mean, torch.finfo(x.dtype).max))


def _add_up(losses: Tensor, top: float) -> Tensor:
    """Return the sum, held at `top`; a row that is beyond all numbers does not take the gradient of the others."""
    total, small = losses.sum(), (losses * HEADROOM).sum()
    # The value is `top`; the second term is 0 and carries the gradient of the plain sum, 1 for each element
    held = torch.sign(small.detach()) * top + (small - small.detach()) / HEADROOM
    return torch.where(_overflowed(total, small), held, total)


def _overflowed(total: Tensor, small: Tensor) -> Tensor:
    """Return where the sum left the dtype, though its elements did not."""
    return small.isfinite() & ~total.isfinite()
