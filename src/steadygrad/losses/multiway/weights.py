"""How large the weights of a backward pass may be, for the gain that puts them into fp16's range.

A weight is g * exp(L - peak) * slope(L), the slope being that of the similarity's root. A bound that is far too high
costs digits, one that is too low overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadygrad.losses.multiway.engine import Side
from steadygrad.losses.multiway.precision import Precision, find_top, has_gains
from steadygrad.losses.multiway.similarity import LEAST_ROOT, MASKED, Similarity


def make_highest(similarity: Similarity, precision: Precision, like: Tensor) -> Tensor | None:
    """Return where the sums shall keep the highest logit, for similarities whose slope is steepest there."""
    if similarity != "distance" or not has_gains(precision):
        return None
    return torch.full((), MASKED, device=like.device)


def bound_weights(side: Side, sums: Tensor, similarity: Similarity, highest: Tensor | None) -> Tensor:
    """No weight of a row (or column) is above it: none of its logits is above their log-sum-exp, which is `sums`."""
    share = (sums - side.peak).clamp(max=0).exp()
    if similarity == "norm":
        # exp(y) / y is convex for y > 0, so its largest value is at one end: the least root, or the sum
        lowest = (LEAST_ROOT - side.peak).clamp(max=0).exp() / LEAST_ROOT
        share = 0.5 * torch.maximum(share / sums.clamp(min=LEAST_ROOT), lowest)
    bound = find_top(share * side.weight)
    # -exp(y) / y grows with y < 0
    return bound if highest is None else bound * (0.5 / (-highest).clamp(min=LEAST_ROOT))
