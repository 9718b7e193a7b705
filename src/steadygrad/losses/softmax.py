"""Softmax and its logarithm, with masks: a row of which nothing is left gives zeros, where plain torch gives NaN.

A mask says True where an element takes part; an element of -inf is masked as well. What is masked is selected out
before anything is computed, so that a NaN there neither shows nor has a gradient. Elsewhere they equal torch's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from steadygrad.losses.check import require_masked
from steadygrad.losses.precision import hold_above, largest, narrow, widen
from steadygrad.losses.shapes import as_dim


def safe_softmax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """Return softmax(x); zeros, with zero gradients, where masked and in rows that are masked entirely."""
    _check("safe_softmax", x, dim, mask)
    rows, is_dead = _mask_rows(widen(x), dim, mask)
    return narrow(torch.where(is_dead, 0.0, rows.softmax(dim)), x, autocast_keeps=True)


def safe_log_softmax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None) -> Tensor:
    """Return log_softmax(x); zeros in rows that are masked entirely.

    What is masked in other rows has the lowest finite number of the dtype instead of -inf: its exponential is still 0,
    and p * log p is 0 instead of NaN.
    """
    _check("safe_log_softmax", x, dim, mask)
    rows, is_dead = _mask_rows(widen(x), dim, mask)
    logs = torch.where(is_dead, 0.0, rows.log_softmax(dim))
    return narrow(hold_above(logs, -largest(rows)), x, autocast_keeps=True)


def _mask_rows(wide: Tensor, dim: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """-inf where masked, and a flag for each row of which nothing is left; such a row is all zeros."""
    if mask is not None:
        wide = torch.where(mask.bool(), wide, -math.inf)  # the mask may enlarge it, as broadcasting does
    is_dead = (wide.detach() == -math.inf).all(dim, keepdim=True)  # a row with a NaN is not dead
    return torch.where(is_dead, 0.0, wide), is_dead


def _check(function: str, x: Tensor, dim: int, mask: Tensor | None) -> None:
    require_masked(function, x, mask)
    as_dim(x if mask is None or mask.dim() < x.dim() else mask, dim, function)
