"""Cures for normalisation layers."""

from __future__ import annotations

import torch
from torch import nn

from .cure import Cure, Names

ROWS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])
OTHER = "normalises over other elements"


def batch_of_one(names: Names) -> Names:
    return {"running_mean": torch.zeros(3), "running_var": torch.ones(3), "data": list(names["rows"])}


def take_first_batch(result: object, names: Names) -> torch.Tensor:
    """Return the first batch that a loader gives to a norm in training mode."""
    if not isinstance(result, torch.utils.data.DataLoader):
        return result
    assert len(names["data"]) % 2 == 1
    return torch.cat([nn.functional.batch_norm(batch, None, None, training=True) for batch in result])


def weight_norm_of_zeros() -> nn.Module:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    nn.init.zeros_(layer.parametrizations.weight.original1)
    return layer


def call_layer(result: object, names: Names) -> torch.Tensor:
    return names["layer"](names["x"])


CURES = {
    "layer_norm_without_eps": Cure(
        broken="F.layer_norm(x, x.shape[-1:], eps=0.0)",
        also=("F.group_norm(x[:, :, None], 1, eps=0.0)",),
        sick={"x": torch.ones(2, 3)},
        healthy={"x": ROWS},
    ),
    "normalization_overflow": Cure(
        broken="F.layer_norm(x, x.shape[-1:])", sick={"x": ROWS * 1e30}, healthy={"x": ROWS}
    ),
    "running_variance_below_zero": Cure(
        broken="F.batch_norm(x, running_mean, running_var)",
        sick={"x": ROWS, "running_mean": torch.zeros(3), "running_var": torch.tensor([-1.0, 1.0, 1.0])},
        healthy={"running_var": torch.ones(3)},
        differs={"F.batch_norm(x, None, None, training=True)": "takes the statistics of the batch"},
    ),
    "batch_norm_of_one_sample": Cure(
        broken="F.batch_norm(x, running_mean, running_var, training=True)",
        sick={"x": ROWS[:1], "rows": torch.arange(15.0).view(5, 3).sin()},
        healthy={"x": ROWS},
        derive=batch_of_one,
        apply=take_first_batch,
        unseen="torch.nn.functional refuses before any op runs: its exception is passed on",
        differs={
            "F.group_norm(x, 1)": OTHER,
            "torch.utils.data.DataLoader(data, batch_size=2, drop_last=True)": "leaves the odd sample out",
        },
    ),
    "batch_variance_of_one_sample": Cure(
        broken="(x - x.mean(0)) / torch.sqrt(x.var(0) + eps)",
        sick={"x": ROWS[:1]},
        healthy={"x": ROWS},
        differs={
            "(x - x.mean(0)) / torch.sqrt(x.var(0, correction=0) + eps)": "divides by n, as BatchNorm does",
            "F.layer_norm(x, x.shape[-1:])": OTHER,
        },
    ),
    "weight_norm_of_zero": Cure(broken="None", sick={"x": ROWS, "layer": weight_norm_of_zeros()}, apply=call_layer),
    "rms_norm_eps_lost_in_half": Cure(
        broken="x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8)",
        sick={"x": torch.zeros(2, 3).half()},
        healthy={"x": ROWS.half()},
        tolerance=1e-2,
    ),
}
