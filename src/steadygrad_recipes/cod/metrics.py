"""Predicted and true masks -> IoU, Dice, MAE and S-measure, each the mean over images.

IoU and Dice threshold the prediction at 0.5, MAE and S-measure use the probabilities. An image without an object that
is predicted empty is perfect. All in float64 on the host: a metric is read once per epoch, and must not depend on the
precision used in training.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

NAMES = ("iou", "dice", "mae", "s_measure")
ALPHA = 0.5
"""Weight of the object term in the S-measure, as its authors set it (Fan et al., ICCV 2017)."""
EPS = torch.finfo(torch.float64).eps


class MaskScores:
    """Accumulates images, then returns the means."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float, float]] = []

    def add(self, probabilities: Tensor, masks: Tensor) -> None:
        """Add a batch, [N, 1, H, W] each; probabilities in [0, 1], masks 0 or 1."""
        for p, y in zip(probabilities.detach().double().cpu(), masks.detach().double().cpu()):
            self._rows.append(score_mask(p[0], y[0] > 0.5))

    def mean(self) -> dict[str, float]:
        """Return name -> mean over the images; NaN when there were none."""
        columns: Iterable[tuple[float, ...]] = zip(*self._rows) if self._rows else ((float("nan"),),) * len(NAMES)
        return {name: sum(column) / len(column) for name, column in zip(NAMES, columns)}


def score_mask(p: Tensor, y: Tensor) -> tuple[float, float, float, float]:
    """Return IoU, Dice, MAE and S-measure of one image: probabilities [H, W] and a boolean mask [H, W]."""
    found = p > 0.5
    overlap, union = float((found & y).sum()), float((found | y).sum())
    iou = overlap / union if union else 1.0
    total = float(found.sum() + y.sum())
    dice = 2 * overlap / total if total else 1.0
    mae = float((p - y.double()).abs().mean())
    return iou, dice, mae, measure_structure(p, y)


def measure_structure(p: Tensor, y: Tensor) -> float:
    """Return the S-measure: how similar two masks are as objects, and in four quarters around the object's centre."""
    p, share = p.double(), float(y.double().mean())
    if share == 0.0:
        return float(1 - p.mean())
    if share == 1.0:
        return float(p.mean())
    score = ALPHA * _compare_objects(p, y, share) + (1 - ALPHA) * _compare_regions(p, y)
    return max(0.0, score)


def _compare_objects(p: Tensor, y: Tensor, share: float) -> float:
    return share * _likeness(p[y]) + (1 - share) * _likeness(1 - p[~y])


def _likeness(values: Tensor) -> float:
    """Return a score that is high when the values are near 1 and near each other."""
    mean = float(values.mean())
    spread = float(values.std()) if values.numel() > 1 else 0.0
    return 2 * mean / (mean * mean + 1 + spread + EPS)


def _compare_regions(p: Tensor, y: Tensor) -> float:
    """Return the structural similarity of the quarters, each weighted by its area."""
    centre = y.nonzero().double().mean(0).round().long() + 1
    row, column = int(centre[0]), int(centre[1])
    score = 0.0
    for rows in (slice(None, row), slice(row, None)):
        for columns in (slice(None, column), slice(column, None)):
            part = p[rows, columns]
            if part.numel():
                score += part.numel() / p.numel() * _compare_quarter(part, y[rows, columns].double())
    return score


def _compare_quarter(p: Tensor, y: Tensor) -> float:
    mean_p, mean_y = float(p.mean()), float(y.mean())
    freedom = max(1, p.numel() - 1)
    var_p = float((p - mean_p).square().sum()) / freedom
    var_y = float((y - mean_y).square().sum()) / freedom
    together = float(((p - mean_p) * (y - mean_y)).sum()) / freedom
    top = 4 * mean_p * mean_y * together
    bottom = (mean_p**2 + mean_y**2) * (var_p + var_y)
    if top != 0.0:
        return top / (bottom + EPS)
    return 1.0 if bottom == 0.0 else 0.0
