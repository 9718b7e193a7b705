"""Gradients -> the same gradients with Gaussian noise that fades, in place (arXiv 1511.06807).

The variance at step t is noise_std² / (1 + t)^gamma. What is added depends on the seed, the step and the order of the
parameters only: every rank adds the same, a resumed run goes on exactly, and the generators that training draws from
are not touched. Call it after backward (and unscaling), before clipping. No host read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.errors import ConfigError

MANY_STEPS = 1_000_003  # seeds of neighbouring runs must not meet at neighbouring steps


class GradientNoise:
    """Adds the noise of one step after the other; `step` counts them and is saved."""

    def __init__(self, noise_std: float = 0.1, *, gamma: float = 0.55, seed: int = 0) -> None:
        _check(noise_std, gamma)
        self.noise_std, self.gamma, self.seed = noise_std, gamma, seed
        self.step = 0

    @property
    def current_std(self) -> float:
        """The standard deviation that the next `add` uses."""
        return anneal_std(self.noise_std, self.gamma, self.step)

    def add(self, model: nn.Module) -> float:
        """Add this step's noise to every gradient of `model`, go on to the next step, and tell the deviation."""
        std = self.current_std
        _add_noise(model.parameters(), std, self.seed * MANY_STEPS + self.step)
        self.step += 1
        return std

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seed = state["step"], state["seed"]


def add_gradient_noise(
    model: nn.Module, noise_std: float = 1e-5, gamma: float = 0.55, *, step: int = 0, seed: int = 0
) -> float:
    """Add the noise of `step` to every gradient of `model`; the deviation that was used is returned."""
    _check(noise_std, gamma)
    std = anneal_std(noise_std, gamma, step)
    _add_noise(model.parameters(), std, seed * MANY_STEPS + step)
    return std


def anneal_std(noise_std: float, gamma: float, step: int) -> float:
    """noise_std / (1 + step)^(gamma / 2)."""
    return float(noise_std / (1 + step) ** (gamma / 2))


@torch.no_grad()
def _add_noise(parameters: Iterable[Tensor], std: float, seed: int) -> None:
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        if parameter.grad is None or std == 0:
            continue
        gradient = parameter.grad
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        generator = generators.get(values.device)
        if generator is None:
            generator = generators[values.device] = torch.Generator(values.device).manual_seed(seed)
        wide = torch.promote_types(values.dtype, torch.float32)
        noise = torch.randn(values.shape, generator=generator, dtype=wide, device=values.device)
        values.copy_(values.to(wide).add_(noise, alpha=std))  # half precision rounds once, after the sum


def _check(noise_std: float, gamma: float) -> None:
    if not noise_std >= 0:
        raise ConfigError(f"noise_std must not be negative, got {noise_std}. 0.1 is usual at the start, 0 is no noise.")
    if not gamma >= 0:
        raise ConfigError(f"gamma must not be negative, got {gamma}: the noise would grow. 0.55 is usual.")
