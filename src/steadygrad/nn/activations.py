"""Activations whose gradient does not die, and a problem with gradients -> which activation to try.

Each is torch's own function where torch has it: fused, and right in half precision. The advice is words for people,
most promising first; it decides nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from steadygrad.errors import ConfigError


class ImprovedActivations:
    """Smooth or leaky alternatives to ReLU and tanh, as functions of a tensor."""

    @staticmethod
    def gelu(x: Tensor) -> Tensor:
        """Return x · Φ(x): the usual choice in transformers."""
        return F.gelu(x)

    @staticmethod
    def swish(x: Tensor, beta: float | Tensor = 1.0) -> Tensor:
        """Return x · sigmoid(beta · x); SiLU for beta 1. A beta that is a tensor is learnt with the rest."""
        if not isinstance(beta, Tensor) and beta == 1.0:
            return F.silu(x)
        # In float16 x times a gradient that a loss scaler has made large is Inf, and Inf · 0 behind it NaN.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (wide * torch.sigmoid(beta * wide)).to(x.dtype)

    @staticmethod
    def mish(x: Tensor) -> Tensor:
        """Return x · tanh(softplus(x))."""
        return F.mish(x)

    @staticmethod
    def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
        """Return x above 0, negative_slope · x below: no unit is ever dead."""
        return F.leaky_relu(x, negative_slope)

    @staticmethod
    def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
        """Return x above 0, alpha · (exp(x) - 1) below."""
        return F.elu(x, alpha)

    @staticmethod
    def scaled_tanh(x: Tensor, scale: float = 1.7159, slope: float = 1.0) -> Tensor:
        """Return scale · tanh(slope · x). LeCun's, with unit variance in and out, has slope 2 / 3."""
        return scale * torch.tanh(slope * x)


ADVICE: dict[str, tuple[str, ...]] = {
    "vanishing": (
        "GELU: smooth, with a gradient on both sides of 0",
        "SiLU (swish): self-gated, for deep networks",
        "Mish: smooth, a little slower than SiLU",
        "LeakyReLU: cheap, and its gradient is never 0",
        "not tanh or sigmoid inside the network: they saturate; and add residual connections or a norm",
    ),
    "exploding": (
        "tanh or scaled tanh: bounded output, at the cost of smaller gradients",
        "GELU behind a LayerNorm: the norm bounds what comes in",
        "ELU: bounded below, mean near 0",
        "clip gradients and lower the learning rate as well: an activation alone rarely stops an explosion",
    ),
    "dead_neurons": (
        "LeakyReLU with a slope of 0.01 to 0.1: no unit can die",
        "ELU: negative inputs keep a gradient",
        "GELU or SiLU: smooth, and dead only far below 0",
        "a lower learning rate and a smaller bias at the start: units die in the first large steps",
    ),
}

ADVICE_FOR_LAYER: dict[str, str] = {
    "transformer": "transformer blocks: GELU, or SwiGLU for the feed-forward part, behind a norm",
    "projection": "projections into a shared space: no activation at the end, normalise the vector instead",
}


def get_activation_function_recommendations(layer_type: str, problem: str = "vanishing") -> list[str]:
    """Return what to try for `problem` ("vanishing", "exploding" or "dead_neurons"), most promising first.

    `layer_type` is free text; a transformer or projection layer gets its own line.
    """
    if not isinstance(problem, str) or problem not in ADVICE:
        raise ConfigError(f"problem must be one of {', '.join(ADVICE)}, got {problem!r}.")
    if not isinstance(layer_type, str):
        raise ConfigError(
            f"layer_type must be text, got {type(layer_type).__name__}. Name the kind of layer, such as 'transformer'."
        )
    special = [line for kind, line in ADVICE_FOR_LAYER.items() if kind in layer_type.lower()]
    return [*special, *ADVICE[problem]]
