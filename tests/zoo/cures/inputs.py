"""Cures for values that were already bad."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .cure import Cure, Names, t

ROWS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])


def take_step(result: Tensor, names: Names) -> Tensor:
    return torch.tanh(result).mean()


def spoil(layer: nn.Module, name: str) -> Names:
    """Return a layer with a NaN, and its previous weights."""
    before = copy.deepcopy(layer.state_dict())
    layer.state_dict()[name].view(-1)[0] = math.nan
    return {"x": ROWS, "layer": layer.eval(), "last_good": before}


def spoil_other(model: nn.Module) -> Names:
    """Return a model and a copy of it that has a NaN."""
    broken_layer = spoil(copy.deepcopy(model), "weight")
    return {"x": ROWS, "network": broken_layer["layer"], "model": model, "last_good": broken_layer["last_good"]}


def call_layer(result: object, names: Names) -> Tensor:
    return names["layer"](names["x"])


def fill_with_nan(make: Callable[[], Tensor]) -> Tensor:
    """Return a possible content of uninitialised memory: deterministic mode fills it with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return make()
    finally:
        torch.use_deterministic_algorithms(False)


CURES = {
    "batch_with_nan": Cure(
        broken="x",
        sick={"x": torch.tensor([[1.0, math.nan], [3.0, 1.0], [2.0, 0.0]])},
        healthy={"x": torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 0.0]])},
        learned=(),
        apply=take_step,
    ),
    "batch_with_inf": Cure(
        broken="x - x.mean()",
        sick={"x": torch.tensor([[1.0, math.inf], [3.0, 1.0], [2.0, 0.0]])},
        learned=(),
        apply=take_step,
    ),
    "outside_tensor_with_nan": Cure(
        broken="x",
        sick={"x": torch.tensor([[1.0, math.nan], [3.0, 1.0], [2.0, 0.0]])},
        healthy={"x": torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 0.0]])},
        learned=(),
        apply=take_step,
        unseen="it is not an argument of the step",
    ),
    "outside_tensor_with_inf": Cure(
        broken="x - x.mean()",
        sick={"x": torch.tensor([[1.0, math.inf], [3.0, 1.0], [2.0, 0.0]])},
        learned=(),
        apply=take_step,
        unseen="it is not an argument of the step",
    ),
    "weight_not_finite": Cure(broken="None", sick=spoil(nn.Linear(3, 2), "weight"), apply=call_layer),
    "other_weight_not_finite": Cure(
        broken="None",
        sick=spoil_other(nn.Linear(3, 2)),
        apply=lambda result, names: names["network"](names["x"]),
        unseen="the only network that is given is taken for the model",
    ),
    "running_statistics_not_finite": Cure(
        broken="None", sick=spoil(nn.BatchNorm1d(3), "running_mean"), apply=call_layer
    ),
    "nan_written_on_purpose": Cure(
        broken="torch.full((2,), float('nan'))",
        also=("torch.full_like(x, float('nan'))",),
        sick={"x": t(1, 2)},
        derive=lambda names: {"constant": torch.tensor(math.nan)},
        apply=lambda result, names: names["x"] * result,
    ),
    "made_outside_of_torch": Cure(
        broken="constant",
        also=("torch.tensor([math.nan, 1.0])",),
        sick={"x": t(1, 2)},
        derive=lambda names: {"constant": torch.tensor(math.nan)},
        apply=lambda result, names: names["x"] * result,
    ),
    "uninitialised_memory": Cure(
        broken="fill_with_nan(lambda: torch.empty_like(x))",
        sick={"x": t(1, 2), "fill_with_nan": fill_with_nan},
        apply=lambda result, names: names["x"] + result,
    ),
}
