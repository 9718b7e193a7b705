"""Replace non-finite elements by a value: the whole of `Action.SANITIZE`, and a piece for people's own loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def handle_nan_inf(tensor: Tensor, replacement_value: float = 0.0) -> Tensor:
    """`tensor` with every NaN and Inf replaced; a true select, so that 0 * NaN never happens. No host read.

    >>> handle_nan_inf(torch.tensor([1.0, float("nan")])).tolist()
    [1.0, 0.0]
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return torch.where(tensor.isfinite(), tensor, torch.full_like(tensor, replacement_value))


@torch.no_grad()
def sanitize_gradients(gradients: Sequence[Tensor], value: float) -> None:
    """Write `value` over every non-finite element, in place."""
    for gradient in gradients:
        if gradient.layout is torch.sparse_coo:
            values = gradient._values()  # shares memory; coalescing would copy
            values.copy_(handle_nan_inf(values, value))
        else:
            gradient.copy_(handle_nan_inf(gradient, value))
