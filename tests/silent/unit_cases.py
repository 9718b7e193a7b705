"""Layers whose units are all the same, and healthy programs whose layers begin so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


def _build(model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam) -> Built:
    def train(guard: Any) -> None:
        for x, y in clusters(12):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, optimizer(model), train


def _fill(layer: nn.Module, value: float) -> None:
    nn.init.constant_(layer.weight, value)
    nn.init.zeros_(layer.bias)


@case("equal_units", "stackoverflow: nn.init.constant_ for every weight")
def constant_weights(bug: bool) -> Built:
    model = mlp(8, 16, 16, 4)
    for layer in model:
        if isinstance(layer, nn.Linear):
            _fill(layer, 0.1) if bug else nn.init.zeros_(layer.bias)
    return _build(model)


@case("equal_units", "a convolution filled with ones, trained by SGD")
def constant_kernels(bug: bool) -> Built:
    model = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4))
    if bug:
        _fill(model[1], 1.0)
        model[4].weight.data = model[4].weight.data[:, :6].repeat(1, 8)  # each channel is read alike
    return _build(model, lambda one: torch.optim.SGD(one.parameters(), 0.05))


@case(None, "adapters that begin at zero, and an output layer that does")
def zeros_at_first(bug: bool) -> Built:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(4, 16)
            self.out = nn.Linear(16, 4)
            _fill(self.up, 0.0)
            _fill(self.out, 0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.relu(self.base(x) + self.up(self.down(x))))

    return _build(Adapted())


@case(None, "layers that begin as averages of what they mix, under an optimizer of signs")
def averages_at_first(bug: bool) -> Built:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.mix, self.out = nn.Linear(2, 8), nn.Linear(4, 4), nn.Linear(32, 4)
            self.blur, self.scale = nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.Parameter(torch.ones(4, 1))
            _fill(self.mix, 1 / 4)
            _fill(self.blur, 1 / 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.inner(x.view(-1, 4, 2)))  # [samples, places, features]
            h = self.mix(h.transpose(1, 2)).transpose(1, 2)
            return self.out((self.scale * self.blur(h)).flatten(1))

    class Signs(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.sign_()
            return super().step(closure)

    return _build(Mixed(), lambda one: Signs(one.parameters(), 1e-3))


@case(None, "an output layer of equal rows behind layers that were drawn, and a bias that was")
def equal_rows_that_part(bug: bool) -> Built:
    model = mlp(8, 16, 16, 4)
    nn.init.constant_(model[2].weight, 0.1)  # its bias is drawn
    _fill(model[4], 0.1)
    return _build(model)


@case(None, "an embedding and a layer that are filled with one number, and frozen")
def frozen_constants(bug: bool) -> Built:
    summed = nn.Linear(8, 8)
    _fill(summed, 1.0)
    summed.requires_grad_(False)
    model = nn.Sequential(nn.Linear(8, 8), summed, nn.Linear(8, 4))
    return _build(model, lambda one: torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], 1e-3))
