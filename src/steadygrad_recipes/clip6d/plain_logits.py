"""6DIMCOCO's logits before they were made stable, and torch's own mean: for comparison, if `use_stable_loss` is False.

The product of all M unit vectors for every one of B^M combinations, by einsum, and a cross entropy along each axis with
ones on the diagonal. It vanishes in two ways at once. Six unit vectors of length D have products of about D^-2.5, which
CLIP's scale leaves at zero. And `cross_entropy` averages over B^(M-1) rows, of which B have a label, so that loss and
gradients shrink by B^(M-2). A zero vector is 0 / 0.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_plain_logits(*features: Tensor) -> Tensor:
    """[B]^M: the sum over D of the product of one row of each, divided by their norms with nothing added to them."""
    units = [f / f.norm(dim=-1, keepdim=True) for f in features]
    letters = string.ascii_lowercase[: len(units)]
    half = (len(units) + 1) // 2
    first, second = letters[:half], letters[half:]
    left, right = _multiply(first, units[:half]), _multiply(second, units[half:])
    return torch.einsum(f"{first}z,{second}z->{letters}", left, right)


def _multiply(letters: str, units: Sequence[Tensor]) -> Tensor:
    """[B, ..., B, D]: every product of one row of each."""
    return torch.einsum(",".join(f"{letter}z" for letter in letters) + f"->{letters}z", *units)


def average_cross_entropy(logits: Tensor) -> Tensor:
    """The mean over all axes of the cross entropy with ones on the diagonal."""
    size, num = len(logits), logits.dim()
    labels = torch.zeros_like(logits)
    diagonal = torch.arange(size, device=logits.device)
    labels[(diagonal,) * num] = 1.0
    return torch.stack([F.cross_entropy(logits.transpose(1, m), labels) for m in range(num)]).mean()
