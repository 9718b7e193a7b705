"""Gradients -> the same gradients, scaled or looked into, in place; and norms before and after -> what to tell.

Shared by the strategies that edit gradients. Half-precision gradients are multiplied in fp32 and rounded once: a factor
rounded to fp16 first is zero below 6e-8, and in bf16 0.999 is 1. Nothing is read back; only an uncoalesced sparse
gradient waits for the device, as it does when it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny
BELOW_ONE = 1.0 - torch.finfo(torch.float64).eps
DOUBLE = (torch.float64, torch.complex128)


def stored_values(gradient: Tensor) -> Tensor:
    """The dense tensor that holds the elements of `gradient`: itself, or the values of a sparse one, as they lie."""
    if gradient.layout is torch.strided:
        return gradient
    if gradient.layout is torch.sparse_coo:
        return gradient._values()
    return gradient.values()


def scale_gradients(gradients: Sequence[Tensor], factors: Tensor, sizes: Sequence[int]) -> None:
    """Multiply in place. `factors` is float64 [sum of `sizes`]: for each gradient one for all of it, or one a row."""
    wide, narrow = torch.split(factors, list(sizes)), torch.split(factors.float(), list(sizes))  # one cast for all
    values = [stored_values(g) for g in gradients]
    shaped = [_shape_like(v, w if v.dtype in DOUBLE else n) for v, w, n in zip(values, wide, narrow)]
    torch._foreach_mul_(values, shaped)


def _shape_like(values: Tensor, factor: Tensor) -> Tensor:
    """[k] -> [k, 1, ...], on the device of `values`: with a dimension it is not rounded to a half-precision dtype."""
    shape = (len(factor), *[1] * (values.dim() - 1)) if values.dim() else ()
    return factor.to(values.device).view(shape)


def write_back(edited: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Put what was edited in a coalesced copy into the sparse gradient that the copy was made from."""
    for source, gradient in zip(edited, gradients):
        if source is not gradient:
            gradient.copy_(source)


def tell_ratio(before: Tensor, after: Tensor, engaged: Tensor) -> Tensor:
    """after / before, in (0, 1), where something was clipped; exactly 1 where nothing was.

    Two norms of one tensor differ by rounding, so that neither "clipped" nor "not clipped" can be told from them alone.
    """
    ratio = torch.nan_to_num(after / before, nan=1.0).clamp(TINY, BELOW_ONE)
    return torch.where(engaged, ratio, 1.0)
