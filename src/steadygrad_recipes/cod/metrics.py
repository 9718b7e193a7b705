"""Predicted and true masks -> IoU, Dice, and the field's MAE, S-measure, weighted F and E-measure; means over images.

IoU and Dice threshold the prediction at 0.5, the E-measure at twice its mean, the others use the probabilities. An
image without an object that is predicted empty is perfect. All in float64 on the host: a metric is read once per epoch,
and must not depend on the precision used in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

NAMES = ("iou", "dice", "mae", "s_measure", "weighted_f", "e_measure")
ALPHA = 0.5
"""Weight of the object term in the S-measure, as its authors set it (Fan et al., ICCV 2017)."""
EPS = torch.finfo(torch.float64).eps


class MaskScores:
    """Accumulates images, then returns the means."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []

    def add(self, probabilities: Tensor, masks: Tensor) -> None:
        """Add a batch, [N, 1, H, W] each; probabilities in [0, 1], masks 0 or 1."""
        for p, y in zip(probabilities.detach().double().cpu(), masks.detach().double().cpu()):
            self._rows.append(score_mask(p[0], y[0] > 0.5))

    def mean(self) -> dict[str, float]:
        """Return name -> mean over the images; NaN when there were none."""
        columns: Iterable[tuple[float, ...]] = zip(*self._rows) if self._rows else ((float("nan"),),) * len(NAMES)
        return {name: sum(column) / len(column) for name, column in zip(NAMES, columns)}


def score_mask(p: Tensor, y: Tensor) -> tuple[float, ...]:
    """Return the measures of one image, as in `NAMES`: probabilities [H, W] and a boolean mask [H, W]."""
    found = p > 0.5
    overlap, union = float((found & y).sum()), float((found | y).sum())
    iou = overlap / union if union else 1.0
    total = float(found.sum() + y.sum())
    dice = 2 * overlap / total if total else 1.0
    mae = float((p - y.double()).abs().mean())
    return iou, dice, mae, measure_structure(p, y), measure_weighted_f(p, y), measure_alignment(p, y)


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
    spread = float(values.std()) if values.numel() > 1 else 0.0  # the std of one value is NaN
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
    # Otherwise perhaps 0 / 0, which is decided below
    if top != 0.0:
        return top / (bottom + EPS)
    return 1.0 if bottom == 0.0 else 0.0


# --- weighted F (Margolin et al., CVPR 2014) and E-measure (Fan et al., IJCAI 2018) -----------------------------------


def measure_weighted_f(p: Tensor, y: Tensor) -> float:
    """Return the weighted F-measure: errors near each other count less, errors far from the object more."""
    if not bool(y.any()):
        return float(1 - p.double().mean())  # undefined there; a prediction of nothing is right
    errors = (p.double() - y.double()).abs()
    distance, nearest = find_nearest(y)
    spread = torch.where(y, errors, errors.flatten()[nearest])
    smooth = _blur(spread)
    errors = torch.where(y & (smooth < errors), smooth, errors)
    importance = torch.where(y, 1.0, 2.0 - torch.exp(math.log(0.5) / 5.0 * distance))
    weighted = errors * importance
    hits = float(y.sum() - weighted[y].sum())
    recall, false = float(1 - weighted[y].mean()), float(weighted[~y].sum())
    precision = hits / (EPS + hits + false)
    return max(0.0, 2 * recall * precision / (EPS + recall + precision))


def find_nearest(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return each pixel's distance to the nearest pixel of the object, and that one's flat index; both [H, W]."""
    height, width = y.shape
    held = y.any(0).nonzero()[:, 0]  # [C], the columns that the object touches
    # A squared distance and the column that it leads to make one whole number, so that one minimum finds both
    dtype = torch.int32 if (height**2 + width**2 + 1) * width < 2**31 else torch.int64
    rows, columns = torch.arange(height, dtype=dtype)[:, None], torch.arange(width, dtype=dtype)
    far = 2 * height  # more than any distance within a column
    above = torch.where(y[:, held], rows, -far).cummax(0).values
    below = torch.where(y[:, held], rows, far).flip(0).cummin(0).values.flip(0)
    row = torch.where(rows - above <= below - rows, above, below)  # [H, C], the nearest within each column
    keys = (rows - row).square() * width + columns[held]
    steps = (columns[:, None] - columns[held]).square() * width  # [W, C]
    best = torch.stack([(line + steps).amin(1) for line in keys])  # line by line: [H, W, C] is large
    column = (best % width).long()
    nearest = torch.empty(height, width, dtype=torch.long)
    nearest[:, held] = row.long() * width
    return (best // width).double().sqrt(), nearest.gather(1, column) + column


def _blur(values: Tensor) -> Tensor:
    """Apply the paper's Gaussian: 7 x 7, sigma 5, zeros around the image."""
    line = torch.exp(-torch.arange(-3, 4, dtype=torch.float64).square() / 50)
    weights = (line / line.sum()).tolist()
    height, width = values.shape
    # A Gaussian is a product: along columns, then along rows. Sums, since a convolution in float64 is slow on a CPU
    padded = F.pad(values, (3, 3, 3, 3))
    zero = torch.zeros((), dtype=torch.float64)
    down = sum((weight * padded[i : i + height] for i, weight in enumerate(weights)), zero)
    return sum((weight * down[:, i : i + width] for i, weight in enumerate(weights)), zero)


def measure_alignment(p: Tensor, y: Tensor) -> float:
    """Return the E-measure of the prediction above twice its mean: how pixels and whole images agree."""
    found = (p >= min(1.0, 2 * float(p.double().mean()))).double() if bool(p.any()) else torch.zeros_like(p).double()
    truth = y.double()
    if not bool(y.any()):
        enhanced = 1 - found
    elif bool(y.all()):
        enhanced = found
    else:
        ours, theirs = found - found.mean(), truth - truth.mean()
        aligned = 2 * ours * theirs / (ours.square() + theirs.square() + EPS)
        enhanced = (aligned + 1).square() / 4
    return min(1.0, float(enhanced.sum()) / (y.numel() - 1 + EPS))
