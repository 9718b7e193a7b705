"""Predicted and given scores -> losses and errors, metric by metric. A score that nobody gave counts for nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def score_losses(predicted: Tensor, wanted: Tensor, given: Tensor) -> Tensor:  # three [B, M] -> [M]
    """Mean squared error of each metric, in standardised units; 0 where no score was given."""
    # The missing ones are taken out before the difference: a mask after it could leave 0 * Inf in the gradient.
    errors = (predicted.float() - torch.where(given, wanted, predicted.detach().float())).square()
    return errors.sum(0) / given.sum(0).clamp_min(1)


def measure_errors(predicted: Tensor, wanted: Tensor, given: Tensor, metrics: Sequence[str]) -> dict[str, float]:
    """Mean absolute error of each metric in its own units, and R² over all: 1 is perfect, 0 the scores' mean."""
    num = given.sum(0).clamp_min(1)
    errors = torch.where(given, predicted - wanted, 0.0)
    mean = torch.where(given, wanted, 0.0).sum(0) / num
    spread = torch.where(given, wanted - mean, 0.0).square().sum(0)
    share = errors.square().sum(0) / spread.clamp_min(1e-12)
    told = {f"mae_{name}": float(value) for name, value in zip(metrics, errors.abs().sum(0) / num)}
    return {**told, "r2": float(1.0 - share.mean())}
