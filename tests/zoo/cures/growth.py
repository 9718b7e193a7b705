"""Cures for signals that grow or vanish: measured as numbers that are infinite when the signal is lost."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .cure import Cure, Names

DEPTH = 60
SLOWLY = "nothing is NaN or Inf here: it shows in norms, not in values"


def make_layer(std: float) -> Names:
    torch.manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    nn.init.normal_(layer.weight, std=std)
    return {"layer": layer}


def run_deep(result: object, names: Names) -> Tensor:
    """Return the square of the signal's norm after many layers, and its inverse."""
    signal = names["x"]
    for _ in range(DEPTH):
        signal = torch.relu(names["layer"](signal))
        if isinstance(result, nn.Module):
            signal = result(signal)
    power = signal.detach().square().sum()
    return torch.stack([power, 1 / power])


def find_slope(result: Tensor, names: Names) -> Tensor:
    """Return the inverse of the gradient that reaches x."""
    (gradient,) = torch.autograd.grad(result.sum() * 1.0 + (result * torch.arange(result.numel())).sum(), names["x"])
    return 1 / gradient.norm()


SIGNAL = torch.linspace(-1.0, 1.0, 32)[None]

CURES = {
    "exploding_signal": Cure(
        broken="None",
        sick={"x": SIGNAL},
        learned=(),
        derive=lambda names: make_layer(5.0),
        apply=run_deep,
        unseen=SLOWLY,
    ),
    "vanishing_signal": Cure(
        broken="None",
        sick={"x": SIGNAL},
        learned=(),
        derive=lambda names: make_layer(0.01),
        apply=run_deep,
        unseen=SLOWLY,
    ),
    "dead_units": Cure(
        broken="F.relu(x)",
        sick={"x": torch.tensor([[-1.0, -2.0, -3.0, -0.5]])},
        apply=find_slope,
        unseen=SLOWLY,
    ),
}
