"""A loss without the stable pieces, made to show how such losses fail: never used unless use_stable_loss is False.

Logits for every one of B^M combinations, and a cross entropy along each axis with ones on the diagonal, averaged over
the whole tensor. B of its B^(M-1) rows have a label, so loss and gradients shrink by B^(M-2): 65536 at B=16, M=6. The
product of six unit vectors is tiny. The norm of a sum of vectors that are not normalised is above its clamp, where the
slope is zero. A zero vector is 0 / 0.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CLAMP = 10.0
"""Where norm-based logits are held, as in `torch.clamp(similarity, -10, 10)`; six unit vectors stay below it."""


def compute_plain_logits(version: int, features: Sequence[Tensor]) -> Tensor:
    """[B]^M of version 0 (product), 1 (norm of the sum), 2 (cosine) or 3 (distance)."""
    return VERSIONS[version](features)


def _divide_by_norms(features: Sequence[Tensor]) -> list[Tensor]:
    return [f / f.norm(dim=-1, keepdim=True) for f in features]


def _multiply(features: Sequence[Tensor]) -> Tensor:
    units = _divide_by_norms(features)
    letters = string.ascii_lowercase[: len(units)]
    half = (len(units) + 1) // 2

    def build(part: str, of: Sequence[Tensor]) -> Tensor:
        return torch.einsum(",".join(f"{letter}z" for letter in part) + f"->{part}z", *of)

    first, second = letters[:half], letters[half:]
    left, right = build(first, units[:half]), build(second, units[half:])
    return torch.einsum(f"{first}z,{second}z->{letters}", left, right)


def _square_sums(features: Sequence[Tensor]) -> Tensor:
    """[B]^M: the square of the norm of the sum of one row of each."""
    num = len(features)
    total = torch.zeros((), dtype=features[0].dtype, device=features[0].device)
    for m, f in enumerate(features):
        own = [1] * num
        own[m] = len(f)
        total = total + f.square().sum(-1).view(own)
        for n in range(m + 1, num):
            pair = list(own)
            pair[n] = len(features[n])
            total = total + 2 * (f @ features[n].mT).view(pair)
    return total


def _norm_sum(features: Sequence[Tensor]) -> Tensor:
    return torch.clamp(_square_sums(features).sqrt(), -CLAMP, CLAMP)


def _average_cosine(features: Sequence[Tensor]) -> Tensor:
    num = len(features)
    return (_square_sums(_divide_by_norms(features)) - num) / (num * (num - 1))


def _distance(features: Sequence[Tensor]) -> Tensor:
    return -(1 - _square_sums(_divide_by_norms(features)) / len(features) ** 2).sqrt()


VERSIONS: tuple[Callable[[Sequence[Tensor]], Tensor], ...] = (_multiply, _norm_sum, _average_cosine, _distance)


def average_cross_entropy(logits: Tensor) -> Tensor:
    """The mean over all axes of the cross entropy with ones on the diagonal."""
    size, num = len(logits), logits.dim()
    labels = torch.zeros_like(logits)
    diagonal = torch.arange(size, device=logits.device)
    labels[(diagonal,) * num] = 1.0
    return torch.stack([F.cross_entropy(logits.transpose(1, m), labels) for m in range(num)]).mean()
