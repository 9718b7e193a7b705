"""In which dtype a loss is computed, and in which it comes back.

Half precision is computed in fp32: sums of a few hundred pixels overflow fp16, and 1e-8 is 0 there. The result comes
back in the dtype that the plain operation would give: its own, and under autocast fp32 for operations that autocast
itself runs in fp32 (logarithms, norms, softmaxes, losses). Nothing here reads a tensor's values.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """Return `x` in fp32 if it is half precision or whole numbers, else as it is."""
    return x.float() if x.dtype in HALF or not x.dtype.is_floating_point else x


def narrow(result: Tensor, like: Tensor, *, autocast_keeps: bool) -> Tensor:
    """Return `result` in the dtype of `like`, held inside its range; in fp32 where autocast would give that."""
    if like.dtype not in HALF or (autocast_keeps and torch.is_autocast_enabled(like.device.type)):
        return result
    return hold(result, largest(like)).to(like.dtype)


def hold(x: Tensor, top: float) -> Tensor:
    """Return `x` held within +-top, with a zero gradient beyond.

    NaN passes, and so does its gradient. `clamp` would give NaN no gradient: behind a sum, a loss of NaN would then
    leave every gradient at zero, and nothing for a guard to see.
    """
    return torch.where(x.abs() > top, torch.sign(x.detach()) * top, x)


def hold_above(x: Tensor, low: float) -> Tensor:
    """Return `x` held at `low` or above, with a zero gradient below; NaN passes."""
    return torch.where(x < low, low, x)


def result_dtype(*values: Tensor | float) -> torch.dtype:
    """The floating dtype that torch gives a quotient of `values`; `torch.result_type`, which no compiler follows.

    A number, or a tensor without dimensions, does not widen a floating tensor that has some.
    """
    tensors = [v for v in values if isinstance(v, Tensor)]
    shaped = [t for t in tensors if t.dim() and t.dtype.is_floating_point]
    dtypes = [t.dtype for t in shaped or tensors if t.dtype.is_floating_point]
    dtype = dtypes[0] if dtypes else torch.get_default_dtype()
    for other in dtypes[1:]:
        dtype = torch.promote_types(dtype, other)
    return dtype


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Matrix products inside stay in the dtype of their operands."""
    if not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def largest(x: Tensor) -> float:
    """Return the largest finite number of the dtype of `x`; of fp32 if `x` holds whole numbers."""
    return torch.finfo(x.dtype if x.dtype.is_floating_point else torch.float32).max


def smallest_normal(x: Tensor) -> float:
    """Return the smallest number of the dtype of `x` whose reciprocal is finite in it."""
    return torch.finfo(x.dtype if x.dtype.is_floating_point else torch.float32).tiny
