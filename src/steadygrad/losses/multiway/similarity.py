"""How alike M vectors are, written as one dot product of two halves, so that a matmul scores every combination.

    mip       s * sum_z prod_m f_m[z]
    cosine    s * mean over pairs of <f_m, f_m'>                      (the pairwise cosine, for unit vectors)
    norm      s * sqrt(||sum_m f_m||^2 + EPS)
    distance  -s * sqrt(mean_m ||f_m - centroid||^2 + EPS)

The logit of a combination is curve(P . Q): P is built from one group of modalities, Q from the other. The scale is
inside P; sums need a few columns beside the D features. A row that must not take part carries a huge column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

Similarity = Literal["mip", "norm", "cosine", "distance"]
SIMILARITIES: tuple[Similarity, ...] = ("mip", "norm", "cosine", "distance")
EPS = 1e-8  # under the root: its slope is then at most 5000
MASKED = -1e30  # stands for -inf: finite, so that no difference of two of them is NaN
LEAST_ROOT = 5e-7  # roots below it are taken for it, so that no slope is beyond 1e6: a scale near 0, or rounding


@dataclass(frozen=True)
class Curve:
    """What is done to the dot product: its value, and its slope as a function of that value."""

    name: str
    """What the kernels call it."""
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor] | None


CURVES: dict[Similarity, Curve] = {
    "mip": Curve("line", lambda x: x, None),
    "cosine": Curve("line", lambda x: x, None),
    # Below zero there are only masks.
    "norm": Curve("root", lambda x: _take_root(x) + x.clamp(max=0), lambda y: 0.5 / y.clamp(min=LEAST_ROOT)),
    "distance": Curve("minus root", lambda x: -_take_root(x), lambda y: -0.5 / (-y).clamp(min=LEAST_ROOT)),
}


def _take_root(x: Tensor) -> Tensor:
    return x.clamp(min=LEAST_ROOT**2).sqrt()


def is_multilinear(similarity: Similarity) -> bool:
    """Whether the mean of the logits is the logit of the means."""
    return similarity in ("mip", "cosine")


def build_rows(
    views: Sequence[Tensor],
    scale: Tensor,
    similarity: Similarity,
    *,
    num: int | Tensor,
    whole: int,
    absent: Tensor | None = None,
) -> Tensor:
    """Return P [..., K] of views [..., D] that broadcast; `num` [..., 1] vectors of `whole` modalities are present."""
    if similarity == "mip":
        half = reduce(torch.mul, views[1:], views[0] * scale)
        return half if absent is None else _append_mask(half, absent, similarity, first=True)
    total = reduce(torch.add, views)
    squares, own = _sum_squares(views), total.square().sum(-1, keepdim=True)
    one = torch.ones_like(own)
    factor = find_factor(scale, similarity, num=num, whole=whole)
    if similarity == "cosine":
        columns = [total, (own - squares) / 2, one]
    elif similarity == "norm":
        columns = [2 * total, own + EPS, one]
    else:
        columns = [total * (-2.0 / num), squares - own / num + EPS * num, one, -one / num]
    half = factor * torch.cat(columns, -1)
    return half if absent is None else _append_mask(half, absent, similarity, first=True)


def find_factor(scale: Tensor, similarity: Similarity, *, num: int | Tensor, whole: int) -> Tensor:
    """Return what all columns of P are multiplied by."""
    if similarity == "mip":
        return scale
    if similarity == "cosine":
        return 2 * scale / (num * (num - 1.0))
    return (scale * whole / num).square() if similarity == "norm" else scale.square() / num


def build_columns(views: Sequence[Tensor], similarity: Similarity, *, absent: Tensor | None = None) -> Tensor:
    """Return Q [..., K], the other half."""
    if similarity == "mip":
        half = reduce(torch.mul, views)
    else:
        total = reduce(torch.add, views)
        squares, own = _sum_squares(views), total.square().sum(-1, keepdim=True)
        one = torch.ones_like(own)
        if similarity == "cosine":
            half = torch.cat([total, one, (own - squares) / 2], -1)
        elif similarity == "norm":
            half = torch.cat([total, one, own], -1)
        else:
            half = torch.cat([total, one, squares, own], -1)
    return half if absent is None else _append_mask(half, absent, similarity, first=False)


def _sum_squares(views: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, [view.square().sum(-1, keepdim=True) for view in views])


def _append_mask(half: Tensor, absent: Tensor, similarity: Similarity, *, first: bool) -> Tensor:
    """Two columns more, (huge or 0, 1) in the first half and (1, huge or 0) in the other, so that the huge ones add up.

    On CUDA zeros before them fill the depth up to what the kernels take at a time.
    """
    huge = -MASKED if similarity == "distance" else MASKED
    out = torch.zeros_like(half[..., :1]).masked_fill(absent.unsqueeze(-1), huge)
    # A multiple of each depth in `triton.DEFAULT_TILES`, so that the kernel loads without a mask
    fill = -(half.shape[-1] + 2) % 64 if half.is_cuda and similarity == "mip" else 0  # `layout` does it for others
    one = torch.ones_like(out)
    return torch.cat([half, half.new_zeros(*half.shape[:-1], fill), *((out, one) if first else (one, out))], -1)
