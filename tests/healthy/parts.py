"""Models and data that several families share: networks of a few hundred weights, learnt in a few hundred steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


def make_mlp(*widths: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), activation()]
    return nn.Sequential(*layers[:-1])


def seeded(seed: int) -> torch.Generator:
    """A generator for what belongs to the task: the same in every run, whatever its seed."""
    return torch.Generator().manual_seed(seed)


class Clusters:
    """Noisy points around fixed centres, one centre for each class."""

    def __init__(self, num_classes: int, width: int, *, spread: float = 1.0, noise: float = 1.0) -> None:
        self.num_classes, self.noise = num_classes, noise
        self.centres = torch.randn(num_classes, width, generator=seeded(1)) * spread  # (classes, width)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` points of any class, and their classes."""
        labels = torch.randint(0, self.num_classes, (count,))
        return self.near(labels), labels

    def near(self, labels: Tensor) -> Tensor:
        """A point of each of these classes."""
        return self.centres[labels] + self.noise * torch.randn(len(labels), self.centres.shape[1])


def miss_sum(model: nn.Module, x: Tensor) -> Tensor:
    """Mean squared error of a network that should add up its inputs."""
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def miss_sines(model: nn.Module, x: Tensor) -> Tensor:
    """Mean squared error of a network that should add up the sines of its inputs."""
    return (model(x) - x.sin().sum(1, keepdim=True)).square().mean()


def measure_accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Share of a labelled batch that is classified rightly."""
    with torch.no_grad():
        return float((model(batch[0]).argmax(1) == batch[1]).double().mean())
