"""The metrics of masks equal what their papers say, in plain loops of another hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from steadygrad_recipes.cod.metrics import MaskScores, measure_structure, score_mask


def spell_s_measure(p: Tensor, y: Tensor) -> float:
    """Fan et al. 2017, pixel by pixel; for masks that are neither empty nor full."""
    height, width = y.shape
    pixels = [(i, j, float(p[i, j]), bool(y[i, j])) for i in range(height) for j in range(width)]

    def likeness(values: list[float]) -> float:
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return 2 * mean / (mean**2 + 1 + spread)

    inside, outside = [v for *_, v, on in pixels if on], [1 - v for *_, v, on in pixels if not on]
    share = len(inside) / len(pixels)
    objects = share * likeness(inside) + (1 - share) * likeness(outside)
    row = round(sum(i for i, _, _, on in pixels if on) / len(inside)) + 1
    column = round(sum(j for _, j, _, on in pixels if on) / len(inside)) + 1
    regions = 0.0
    for is_low in (True, False):
        for is_left in (True, False):
            part = [(v, float(on)) for i, j, v, on in pixels if (i < row) == is_low and (j < column) == is_left]
            if not part:
                continue
            mv, mo = (sum(one[k] for one in part) / len(part) for k in (0, 1))
            n = len(part) - 1
            vv, vo = (sum((one[k] - m) ** 2 for one in part) / n for k, m in ((0, mv), (1, mo)))
            both = sum((v - mv) * (o - mo) for v, o in part) / n
            top, bottom = 4 * mv * mo * both, (mv**2 + mo**2) * (vv + vo)
            regions += len(part) / len(pixels) * (top / bottom if top else float(bottom == 0))
    return 0.5 * objects + 0.5 * regions


@pytest.mark.parametrize("seed", range(6))
def test_the_s_measure_is_that_of_its_paper(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.zeros(11, 14, dtype=torch.bool)
    top, left = (int(torch.randint(0, 6, (), generator=generator)) for _ in range(2))
    y[top : top + 4, left : left + 5] = True
    p = (0.7 * y.double() + 0.4 * torch.rand(y.shape, generator=generator, dtype=torch.float64)).clamp(0, 1)
    # The library adds an epsilon of float64 to two denominators of order 1e-2 and above.
    assert measure_structure(p, y) == pytest.approx(spell_s_measure(p, y), abs=1e-12)


def test_a_perfect_prediction_has_the_best_scores() -> None:
    y = torch.zeros(8, 8, dtype=torch.bool)
    y[2:5, 3:7] = True
    assert score_mask(y.double(), y) == pytest.approx((1.0, 1.0, 0.0, 1.0, 1.0, 1.0))


def test_the_opposite_of_the_mask_has_the_worst_scores() -> None:
    y = torch.zeros(8, 8, dtype=torch.bool)
    y[2:5, 3:7] = True
    iou, dice, mae, s, *_ = score_mask(1 - y.double(), y)
    assert (iou, dice, mae) == (0.0, 0.0, 1.0)
    assert s == pytest.approx(0.0, abs=1e-12)


def test_iou_and_dice_count_pixels_above_a_half() -> None:
    y = torch.tensor([[True, True, False, False]])
    p = torch.tensor([[0.9, 0.4, 0.6, 0.1]], dtype=torch.float64)
    iou, dice, mae, _, *_ = score_mask(p, y)
    assert iou == pytest.approx(1 / 3)
    assert dice == pytest.approx(2 / 4)
    assert mae == pytest.approx((0.1 + 0.6 + 0.6 + 0.1) / 4)


def test_an_image_without_an_object_that_is_predicted_empty_is_perfect() -> None:
    assert score_mask(torch.zeros(4, 4).double(), torch.zeros(4, 4, dtype=torch.bool)) == (1.0, 1.0, 0.0, 1.0, 1.0, 1.0)
    assert score_mask(torch.ones(4, 4).double(), torch.ones(4, 4, dtype=torch.bool)) == (1.0, 1.0, 0.0, 1.0, 1.0, 1.0)


def test_an_object_that_is_missed_scores_nothing() -> None:
    y = torch.zeros(4, 4, dtype=torch.bool)
    y[1, 1] = True
    assert score_mask(torch.zeros(4, 4).double(), y)[:2] == (0.0, 0.0)


def test_scores_are_means_over_images_whatever_the_batches() -> None:
    p, y = torch.rand(5, 1, 8, 8), (torch.rand(5, 1, 8, 8) > 0.6).float()
    together, apart = MaskScores(), MaskScores()
    together.add(p, y)
    for part in (slice(0, 2), slice(2, 5)):
        apart.add(p[part], y[part])
    assert together.mean() == apart.mean()
    assert all(math.isnan(value) for value in MaskScores().mean().values())
