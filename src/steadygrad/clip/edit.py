"""Scale gradients in place, access their stored values, and compute the clip ratio from norms before and after.

Shared by the strategies that edit gradients. Half-precision gradients are multiplied in fp32 and rounded once: a factor
rounded to fp16 first would be zero below 6e-8, and 0.999 would be 1 in bf16. Nothing is read back; only an uncoalesced
sparse gradient waits for the device, as it does when it is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Bounds of a ratio: above 0, as `Clipper.clip` promises, and below 1, since a coefficient of 1 means "not clipped".
TINY = torch.finfo(torch.float64).tiny
BELOW_ONE = 1.0 - torch.finfo(torch.float64).eps
DOUBLE = (torch.float64, torch.complex128)
HALF = (torch.float16, torch.bfloat16)


def stored_values(gradient: Tensor) -> Tensor:
    """Return the dense tensor that stores the elements of `gradient`: itself, or the values of a sparse one."""
    if gradient.layout is torch.strided:
        return gradient
    if gradient.layout is torch.sparse_coo:
        return gradient._values()
    return gradient.values()


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply all gradients in place; dense ones take one launch per dtype and device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = stored_values(gradient)
        groups.setdefault((values.device, values.dtype), []).append(values)
    for (device, dtype), group in groups.items():
        if device.type == "cpu" and dtype in HALF:  # there _foreach_mul_ rounds the factor to the dtype, mul_ does not
            for values in group:
                values.mul_(factor)
        else:
            torch._foreach_mul_(group, factor)


def scale_gradients(gradients: Sequence[Tensor], factors: Tensor, sizes: Sequence[int]) -> None:
    """Multiply in place. `factors` is float64 [sum of `sizes`]: per gradient, one for all of it or one per row."""
    wide, narrow = torch.split(factors, list(sizes)), torch.split(factors.float(), list(sizes))  # one cast for all
    values = [stored_values(g) for g in gradients]
    shaped = [_shape_like(v, w if v.dtype in DOUBLE else n) for v, w, n in zip(values, wide, narrow)]
    torch._foreach_mul_(values, shaped)


def _shape_like(values: Tensor, factor: Tensor) -> Tensor:
    """[k] -> [k, 1, ...], on the device of `values`: with a dimension it is not rounded to a half-precision dtype."""
    shape = (len(factor), *[1] * (values.dim() - 1)) if values.dim() else ()
    return factor.to(values.device).view(shape)


def write_back(edited: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Copy values edited in a coalesced copy back into the sparse gradient that it was made from."""
    for source, gradient in zip(edited, gradients):
        if source is not gradient:
            gradient.copy_(source)


def find_ratio(before: Tensor, after: Tensor, engaged: Tensor) -> Tensor:
    """Return after / before, in (0, 1), where something was clipped; exactly 1 where nothing was.

    Two norms of the same tensor differ by rounding, so they alone cannot show whether it was clipped.
    """
    ratio = torch.nan_to_num(after / before, nan=1.0).clamp(TINY, BELOW_ONE)
    return torch.where(engaged, ratio, 1.0)
