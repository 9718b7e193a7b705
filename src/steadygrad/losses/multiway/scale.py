"""A logit scale for M modalities in D dimensions: what CLIP's numbers mean there, and a learnable one with its clamp.

For unit vectors in dense alignment (every entry of equal size) the product of M has the sum D^(1 - M/2), and that of
random ones a spread of D^(-(M-1)/2). At M=2 these are 1 and 1/sqrt(D); at M=6, D=512 they are 3.8e-6 and 1.7e-7, so
that CLIP's scale of 14.3 leaves every logit at zero. `align_gain` = D^(M/2 - 1) undoes it: a logit at dense alignment
is the scale itself, the spread of random ones scale / sqrt(D), as in CLIP, for every M.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from steadygrad.errors import ConfigError
from steadygrad.losses.multiway.similarity import SIMILARITIES, Similarity

CLIP_INIT = 1 / 0.07
CLIP_MAX = 100.0


def align_gain(num_modalities: int, dim: int) -> float:
    """Return D^(M/2 - 1): makes the product of M densely aligned unit vectors 1. It is 1 for M=2."""
    return math.pow(dim, num_modalities / 2 - 1)


def spread_gain(num_modalities: int, dim: int) -> float:
    """Return D^((M-1)/2): makes the product of M random unit vectors spread by 1. It is sqrt(D) times `align_gain`."""
    return math.pow(dim, (num_modalities - 1) / 2)


class MultiwayScale(nn.Module):
    """A learnable positive scale, `exp` of its parameter; `scale()` is what `multiway_contrastive` takes.

    `initial` and `maximum` are logits at alignment, as in CLIP; the gain of M and D is on top. The clamp is in the
    forward pass, and lets the gradient through that leads back inside.
    """

    def __init__(
        self,
        num_modalities: int,
        dim: int,
        *,
        similarity: Similarity = "mip",
        initial: float = CLIP_INIT,
        maximum: float = CLIP_MAX,
    ) -> None:
        super().__init__()
        if similarity not in SIMILARITIES:
            raise ConfigError(f"similarity must be one of {SIMILARITIES}, got {similarity!r} in MultiwayScale.")
        if num_modalities < 2 or dim < 1:
            raise ConfigError(
                f"MultiwayScale needs at least 2 modalities and 1 dimension, got {num_modalities} and {dim}."
            )
        if not 0 < initial <= maximum < math.inf:
            raise ConfigError(
                f"MultiwayScale needs 0 < initial <= maximum, got initial={initial}, maximum={maximum}. "
                f"CLIP has {CLIP_INIT:.2f} and {CLIP_MAX:g}."
            )
        # Sums of vectors do not shrink with M: only the product needs the gain.
        self.gain = align_gain(num_modalities, dim) if similarity == "mip" else 1.0
        self.log_maximum = math.log(maximum)
        self.log_scale = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        """Return min(exp(log_scale), maximum) * gain, in fp32."""
        with torch.no_grad():
            excess = (self.log_scale - self.log_maximum).clamp(min=0)
        return (self.log_scale - excess).float().exp() * self.gain

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        return f"gain={self.gain:g}, maximum={math.exp(self.log_maximum):g}"
