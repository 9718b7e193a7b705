"""How text and latents are hidden, and how they are recovered.

Text is hidden by masks: at time t each word is hidden with probability t. Latents and noise lie on one sphere, of
radius sqrt(dimension), and at time t a latent is the point (1 - t) latent + t noise of the chord between them. So the
direction of the flow (or of the noise) determines everything: the loss may compare directions only, and no sampling
step divides by a number that goes to 0. Everything is drawn from the given generator, or from torch's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygrad.losses import safe_normalize


@dataclass(frozen=True)
class Hidden:
    """A batch as the model sees it, and what it should predict."""

    tokens: Tensor
    """[B, L], hidden words replaced by the mask token."""
    real: Tensor
    """[B, L], False on padding."""
    is_hidden: Tensor
    """[B, L], True where a word is to be predicted."""
    words: Tensor
    """[B, L], the words."""
    noisy: Tensor
    """[B, T, D]"""
    target: Tensor
    """[B, T, D], flow or noise."""
    text_time: Tensor
    latent_time: Tensor


def hide(
    words: Tensor,
    real: Tensor,
    latents: Tensor,
    *,
    mask_token: int,
    prediction: str = "flow",
    independent_times: bool = True,
    generator: torch.Generator | None = None,
) -> Hidden:
    """Hide a batch; `latents` are on the sphere (`to_sphere`)."""
    text_time = draw_times(len(words), words.device, generator)
    latent_time = draw_times(len(words), words.device, generator) if independent_times else text_time
    # Drawn for padding too, so that the numbers drawn do not depend on the texts
    chance = torch.rand(words.shape, device=words.device, generator=generator)
    is_hidden = (chance < text_time.unsqueeze(1)) & real
    noise = draw_noise(latents, generator)
    share = latent_time.view(-1, 1, 1)
    return Hidden(
        tokens=torch.where(is_hidden, mask_token, words),
        real=real,
        is_hidden=is_hidden,
        words=words,
        noisy=(1 - share) * latents + share * noise,
        target=noise - latents if prediction == "flow" else noise,
        text_time=text_time,
        latent_time=latent_time,
    )


def draw_times(num: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw times in (0, 1], one from each of `num` equal parts, in random order: batches vary less than by chance."""
    jitter = torch.rand(num, device=device, generator=generator)
    order = torch.rand(num, device=device, generator=generator).argsort()
    return 1 - (order + jitter) / num


def draw_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return a random point of the sphere for each vector of `like`."""
    return onto_sphere(torch.randn(like.shape, device=like.device, generator=generator))


def onto_sphere(x: Tensor) -> Tensor:
    """Scale each vector to length sqrt(dimension)."""
    return safe_normalize(x.float()) * math.sqrt(x.shape[-1])


def find_clean(noisy: Tensor, answer: Tensor, time: Tensor, prediction: str) -> Tensor:
    """Return the latents on the sphere that the direction of the model's answer points to.

    With `flow`: where the ray from the noisy point against the flow meets the sphere. The noisy point is on a chord,
    so it is inside the sphere and there is one such place. With `epsilon`: where the chord from that noise ends.
    """
    direction = safe_normalize(answer.float())
    if prediction == "epsilon":
        noise = direction * math.sqrt(noisy.shape[-1])
        return onto_sphere(noisy - time.view(-1, 1, 1) * noise)
    along = (noisy * direction).sum(-1, keepdim=True)
    inside = (noisy.shape[-1] - noisy.square().sum(-1, keepdim=True)).clamp(min=0)  # rounding may leave the ball
    length = along + (along.square() + inside).sqrt()
    return onto_sphere(noisy - length * direction)


def go_back(noisy: Tensor, clean: Tensor, time: float, earlier: float) -> Tensor:
    """Return the point at the `earlier` time on the chord that ends at `clean` and passes through `noisy`."""
    # Projected, not divided by the time, which goes to 0
    noise = onto_sphere(noisy - (1 - time) * clean)
    return (1 - earlier) * clean + earlier * noise
