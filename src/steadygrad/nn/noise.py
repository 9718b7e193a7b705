"""Gradients -> the same gradients with Gaussian noise that fades, in place (arXiv 1511.06807).

The variance at step t is noise_std² / (1 + t)^gamma. What is added depends on the seed, the step and the order of the
parameters only: every rank adds the same, a resumed run goes on exactly, and the generators that training draws from
are not touched. Call it after backward (and unscaling), before clipping. A sparse gradient is coalesced, which on a GPU
waits once, so that an element gets noise once; apart from that no host read.
"""

from __future__ import annotations

import hashlib
import math
import operator
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.config.checks import is_number
from steadygrad.errors import ConfigError, UnsupportedError

MANY_STEPS = 1_000_003  # seeds of neighbouring runs must not meet at neighbouring steps
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class GradientNoise:
    """Adds the noise of each step; `step` counts them and is saved."""

    def __init__(self, noise_std: float = 0.1, *, gamma: float = 0.55, seed: int = 0) -> None:
        _check(noise_std, gamma)
        self.noise_std, self.gamma, self.seed = noise_std, gamma, _as_whole("seed", seed)
        self.step = 0

    @property
    def current_std(self) -> float:
        """The standard deviation that the next `add` uses."""
        return anneal_std(self.noise_std, self.gamma, self.step)

    def add(self, model: nn.Module) -> float:
        """Add this step's noise to every gradient of `model`, advance the step, and return the standard deviation."""
        std = self.current_std
        _add_noise(model, std, self.seed, self.step)
        self.step += 1
        return std

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = [name for name in ("step", "seed") if name not in state]
        if missing:
            raise ConfigError(
                f"the state of GradientNoise lacks {' and '.join(missing)}: it is {str(dict(state))[:80]}. "
                "Give what state_dict() returned."
            )
        self.step, self.seed = _as_step(state["step"]), _as_whole("seed", state["seed"])


def add_gradient_noise(
    model: nn.Module, noise_std: float = 1e-5, gamma: float = 0.55, *, step: int = 0, seed: int = 0
) -> float:
    """Add the noise of `step` to every gradient of `model`; return the standard deviation used."""
    _check(noise_std, gamma)
    step, seed = _as_step(step), _as_whole("seed", seed)
    std = anneal_std(noise_std, gamma, step)
    _add_noise(model, std, seed, step)
    return std


def anneal_std(noise_std: float, gamma: float, step: int) -> float:
    """Return noise_std / (1 + step)^(gamma / 2)."""
    return float(noise_std * (1 + step) ** (-gamma / 2))  # a power that is too small is 0, one too large an error


@torch.no_grad()
def _add_noise(model: nn.Module, std: float, seed: int, step: int) -> None:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]
    parts = [_find_values(name, parameter) for name, parameter in named if std != 0]  # all, before one is changed
    generators: dict[torch.device, torch.Generator] = {}
    for values in parts:
        generator = generators.get(values.device)
        if generator is None:
            generator = generators[values.device] = torch.Generator(values.device).manual_seed(_mix(seed, step))
        wide = torch.promote_types(values.dtype, torch.float32)
        noise = torch.randn(values.shape, generator=generator, dtype=wide, device=values.device)
        values.copy_(values.to(wide).add_(noise, alpha=std))  # half precision rounds once, after the sum


def _find_values(name: str, parameter: Tensor) -> Tensor:
    """The elements of a gradient that are stored here, each once; what is written into them is written into it."""
    gradient: Any = parameter.grad
    if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
        raise UnsupportedError(
            f"the gradient of {name!r} is a sum over ranks still to be made, which would get the noise of each. "
            "Redistribute it first."
        )
    gradient = getattr(gradient, "_local_tensor", gradient)  # of a DTensor, the shard of this rank
    if gradient.layout is torch.strided:
        return gradient  # type: ignore[no-any-return]
    if gradient.layout is torch.sparse_coo:
        if not gradient.is_coalesced():
            # coalesce() returns a new tensor: noise in it would be lost unless it becomes the gradient.
            parameter.grad = gradient = gradient.coalesce()
        return gradient._values()  # type: ignore[no-any-return]
    if gradient.layout in COMPRESSED:
        return gradient.values()  # type: ignore[no-any-return]
    raise UnsupportedError(
        f"the gradient of {name!r} has layout {gradient.layout}, to which no noise can be added. "
        "Use a strided or sparse gradient."
    )


def _mix(seed: int, step: int) -> int:
    """Return what to seed a generator of 64 bits with; that of the CPU looks at the lower 32 only."""
    if not 0 <= seed < 2**32:
        # Larger seeds with equal lower 32 bits would give the same noise on the CPU.
        seed = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    return (seed * MANY_STEPS + step) % 2**64


def _check(noise_std: float, gamma: float) -> None:
    if not _is_size(noise_std):
        raise ConfigError(
            f"noise_std must be a finite number, at least 0, got {noise_std!r}. 0.1 is a usual start; 0 adds no noise."
        )
    if not _is_size(gamma):
        raise ConfigError(
            f"gamma must be a finite number, at least 0, got {gamma!r}: below 0 the noise would grow. 0.55 is usual."
        )


def _is_size(value: Any) -> bool:
    return is_number(value) and math.isfinite(value) and value >= 0


def _as_whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}. The default is 0.") from None


def _as_step(value: Any) -> int:
    step = _as_whole("step", value)
    if step < 0:
        raise ConfigError(f"step must be at least 0, got {step}. Steps are counted from 0.")
    return step
