"""Cures for means, deviations, sums and products."""

from __future__ import annotations

import torch
from torch import nn

from .cure import Cure, half, t

ROWS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])

CURES = {
    "mean_of_nothing": Cure(
        broken="x.mean()",
        also=(
            "x.median()",
            "x.mean(dim=0)",
        ),
        sick={"x": torch.zeros(0)},
        healthy={"x": t(1, 2)},
    ),
    "mean_of_empty_selection": Cure(
        broken="x[mask].mean()",
        sick={"x": t(1, 2, 3), "mask": t(0, 0, 0).bool()},
        healthy={"mask": t(1, 0, 1).bool()},
    ),
    "loss_of_nothing": Cure(
        broken="loss(x, y)",
        also=(
            "F.mse_loss(x, y)",
            "F.binary_cross_entropy_with_logits(x, y)",
            "F.huber_loss(x, y)",
        ),
        sick={"x": torch.zeros(0), "y": torch.zeros(0), "loss": nn.functional.smooth_l1_loss},
        healthy={"x": t(1, 2), "y": t(2, 4)},
    ),
    "deviation_of_one": Cure(
        broken="x.std(0)",
        also=(
            "x.var(0)",
            "torch.std_mean(x, 0)",
            "torch.var_mean(x, 0)",
        ),
        sick={"x": torch.tensor([[1.0, 2.0]])},
        healthy={"x": torch.tensor([[1.0, 2.0], [3.0, 1.0]])},
        differs={"x.std(0, correction=0)": "divides by n, not by n - 1"},
    ),
    "sum_overflow_in_half": Cure(
        broken="x.sum()", also=("x.cumsum(0)",), sick={"x": half(*[3e4] * 4)}, healthy={"x": half(1, 2, 3)}
    ),
    "deviation_overflow_in_half": Cure(
        broken="x.var()",
        also=("torch.var_mean(x)",),
        sick={"x": half(1e4, 2e4, -3e4)},
        healthy={"x": half(1, 2, 4)},
        tolerance=2e-2,
    ),
    "product_overflow": Cure(
        broken="torch.prod(x)",
        also=("torch.cumprod(x, 0)",),
        sick={"x": torch.full((30,), 1e3)},
        healthy={"x": t(0.5, 0.7, 0.9)},
        differs={
            "torch.log(x).sum()": "is the logarithm of the product",
            "torch.exp(torch.log(x).mean())": "is the geometric mean",
        },
    ),
    "maximum_over_masked_row": Cure(
        broken="x.masked_fill(~mask, -torch.inf).amax(-1)",
        sick={"x": ROWS, "mask": torch.tensor([[0, 0, 0], [1, 1, 0]]).bool()},
        healthy={"mask": torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()},
    ),
    "infinity_written_on_purpose": Cure(
        broken="x.masked_fill(~mask, -torch.inf).sum(-1)",
        sick={"x": ROWS, "mask": torch.tensor([[1, 0, 0], [1, 1, 1]]).bool()},
        healthy={"mask": torch.ones(2, 3).bool()},
    ),
    "maximum_of_nothing": Cure(
        broken="x.amax()",
        also=(
            "x.max()",
            "x.min()",
            "x.amin()",
        ),
        sick={"x": torch.zeros(0)},
        healthy={"x": t(1, 3, 2)},
    ),
}
