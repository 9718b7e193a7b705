"""Cures for divisions and for infinities that meet."""

from __future__ import annotations

import math

import torch
from torch import nn

from .cure import CONSTANT, Cure, Names, half, t

ROWS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
NOTHING = torch.tensor([[False, False, False], [True, True, False]])
SOMETHING = torch.tensor([[True, False, True], [True, True, False]])
ZEROS = torch.tensor([[0.0, 0.0, 0.0], [3.0, 1.0, 2.0]])


def spectral_norm_of_zeros() -> nn.Module:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    nn.init.zeros_(layer.parametrizations.weight.original)
    return layer


def call_layer(result: object, names: Names) -> torch.Tensor:
    return names["layer"](names["x"])


def sum_segments(names: Names) -> Names:
    x, index = names["x"], names["index"]
    count = torch.zeros(len(x) + 1).index_add(0, index, torch.ones(len(index)))
    return {"total": torch.zeros(len(x) + 1, 3).index_add(0, index, x), "count": count[:, None]}


CURES = {
    "division_by_zero": Cure(
        broken="x / y",
        also=(
            "torch.div(x, y)",
            "torch.true_divide(x, y)",
        ),
        sick={"x": t(1, 0, 2), "y": t(0, 0, 4)},
        healthy={"y": t(2, 3, 4)},
        learned=("x", "y"),
    ),
    "division_by_empty_sum": Cure(
        broken="(x * mask).sum(-1) / mask.sum(-1)",
        also=(
            "(x * mask).sum(-1) / torch.count_nonzero(mask, -1)",
            "(x * mask / mask.sum(-1, keepdim=True)).sum(-1)",
        ),
        sick={"x": ROWS, "mask": NOTHING},
        healthy={"mask": SOMETHING},
    ),
    "division_by_empty_segment": Cure(
        broken="total / count",
        sick={"x": ROWS, "index": torch.tensor([0, 2])},
        derive=sum_segments,
    ),
    "division_by_norm_of_zero": Cure(
        broken="x / x.norm(dim=-1, keepdim=True)",
        also=(
            "x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)",
            "F.normalize(x, dim=-1, eps=0.0)",
            "F.cosine_similarity(x, x + 0, dim=-1, eps=0.0)",
        ),
        sick={"x": ZEROS},
        healthy={"x": ROWS},
    ),
    "normalize_in_half": Cure(
        broken="F.normalize(x, dim=-1)",
        also=("F.cosine_similarity(x, x + 0, dim=-1)",),
        sick={"x": ZEROS.half()},
        healthy={"x": ROWS.half()},
        tolerance=1e-2,
    ),
    "eps_lost_in_half": Cure(
        broken="x / (y + 1e-8)",
        sick={"x": half(1, 2), "y": half(0, 4)},
        healthy={"y": half(2, 4)},
        learned=("x", "y"),
        tolerance=1e-2,
    ),
    "division_by_activation_of_zero": Cure(
        broken="x / torch.sigmoid(raw).square()",
        sick={"x": t(1, 2), "raw": t(-200, 1)},
        healthy={"raw": t(-2, 1)},
        learned=("x", "raw"),
        derive=lambda names: {"y": torch.sigmoid(names["raw"]).square()},
    ),
    "division_by_zero_in_half": Cure(
        broken="x / y", sick={"x": half(1, 2), "y": half(0, 4)}, healthy={"y": half(2, 4)}, learned=("x", "y")
    ),
    "division_by_deviation_of_constant": Cure(
        broken="(x - x.mean()) / x.std()",
        also=(
            "(x - x.mean()) / x.var().sqrt()",
            "x / x.var()",
        ),
        sick={"x": torch.ones(4)},
        healthy={"x": t(1, 2, 3, 5)},
    ),
    "division_by_largest_of_zeros": Cure(
        broken="x / x.abs().amax(-1, keepdim=True)", sick={"x": ZEROS}, healthy={"x": ROWS}
    ),
    "division_by_range_of_constant": Cure(
        broken="(x - x.min()) / (x.max() - x.min())",
        also=("(x - x.amin()) / (x.amax() - x.amin())",),
        sick={"x": torch.ones(4)},
        healthy={"x": t(1, 2, 3, 5)},
    ),
    "spectral_norm_of_zero": Cure(broken="None", sick={"x": ROWS, "layer": spectral_norm_of_zeros()}, apply=call_layer),
    "division_by_zero_count": Cure(
        broken="x / n", also=("x.sum() / n",), sick={"x": t(1, 2), "n": 0}, healthy={"n": 3}
    ),
    "reciprocal_at_zero": Cure(broken="1 / x", also=("x.reciprocal()",), sick={"x": t(0, 2)}, healthy={"x": t(1, 2)}),
    "addcdiv_by_zero": Cure(
        broken="torch.addcdiv(x, y, z)",
        sick={"x": t(1, 2), "y": t(1, 3), "z": t(0, 2)},
        healthy={"z": t(1, 2)},
        learned=("x", "y", "z"),
    ),
    "remainder_by_zero": Cure(
        broken="torch.remainder(x, y)",
        also=(
            "torch.fmod(x, y)",
            "x % y",
        ),
        sick={"x": t(5, 7), "y": t(0, 2)},
        healthy={"y": t(3, 2)},
    ),
    "division_slope_overflow": Cure(
        broken="x / y",
        sick={"x": t(1, 2), "y": t(1e-30, 2)},
        healthy={"y": t(3, 2)},
        learned=("x", "y"),
        differs={"x / y.detach()": CONSTANT},
    ),
    "zero_times_infinity": Cure(
        broken="x * mask",
        sick={"raw": ROWS, "mask": NOTHING},
        healthy={"mask": torch.ones(2, 3, dtype=torch.bool)},
        learned=("raw",),
        derive=lambda names: {"x": names["raw"].masked_fill(~names["mask"], -math.inf)},
    ),
    "target_over_masked_class": Cure(
        broken="-(target * F.log_softmax(x.masked_fill(~mask, -torch.inf), -1)).sum(-1).mean()",
        sick={"x": ROWS, "mask": t(1, 1, 0).bool(), "target": torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0]])},
        healthy={"mask": t(1, 1, 1).bool()},
    ),
    "shift_by_masked_maximum": Cure(
        broken="x.masked_fill(~mask, -torch.inf) - x.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)",
        sick={"x": ROWS, "mask": NOTHING},
        healthy={"mask": torch.ones(2, 3, dtype=torch.bool)},
        differs={"steadygrad.losses.safe_log_softmax(x, dim=-1, mask=mask)": "continues to the end of the softmax"},
    ),
    "infinity_minus_infinity": Cure(
        broken="x - y",
        sick={"raw": t(9, 1)},
        healthy={"raw": t(3, 1)},
        learned=("raw",),
        derive=lambda names: {
            "x": names["raw"].masked_fill(names["raw"] > 5, math.inf),
            "y": (names["raw"] + 1).masked_fill(names["raw"] > 5, math.inf),
        },
    ),
}
