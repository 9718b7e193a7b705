"""The specification of the gradient statistics, in plain torch and float64.

`measure_table` turns dense real tensors into a float64 table, one row per tensor, with the columns of
`facts.GradientStats`. The fast implementations must equal it. It is written for readability: every intermediate is a
full tensor, so it is slow, and only tests should use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.facts import NUM_COLUMNS


def measure_table(gradients: Sequence[Tensor], out: Tensor) -> None:
    """Write norm, max_abs, num_nonfinite, num_nan, num_zeros of each gradient into `out` [N, 5] float64."""
    assert out.shape == (len(gradients), NUM_COLUMNS) and out.dtype == torch.float64
    for row, gradient in zip(out, gradients):
        row.copy_(torch.stack(measure_one(gradient)))


def measure_one(gradient: Tensor) -> tuple[Tensor, ...]:
    """Return the five numbers of one gradient, each a float64 scalar."""
    values = gradient.detach().double().flatten()
    finite = values.isfinite()
    # A select, not a product: Inf * 0 is NaN.
    magnitude = torch.where(finite, values.abs(), 0.0)
    max_abs = magnitude.max() if magnitude.numel() else magnitude.sum()
    # Scaled by the largest element, so that no square over- or underflows even for float64 gradients.
    scale = torch.where(max_abs > 0, max_abs, 1.0)
    norm = scale * (magnitude / scale).square().sum().sqrt()
    return norm, max_abs, (~finite).sum().double(), values.isnan().sum().double(), (values == 0).sum().double()
