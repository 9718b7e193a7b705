"""A trained model -> new pairs of text and latents, generated together from nothing.

Starts with every word hidden and latents of pure noise. At each step the model answers for both; some hidden words
are drawn from its answer, and the latents move along the chord to the ones it predicts. Nothing here divides by a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steadygrad_recipes.mmdit.config import DiffusionConfig, SamplingConfig
from steadygrad_recipes.mmdit.data import Rows
from steadygrad_recipes.mmdit.diffusion import draw_noise, find_clean, go_back
from steadygrad_recipes.mmdit.metrics import place_on_sphere, take_from_sphere
from steadygrad_recipes.mmdit.model import MMDiT


@torch.no_grad()
def draw_samples(
    model: MMDiT,
    sampling: SamplingConfig,
    diffusion: DiffusionConfig,
    *,
    texts: Rows | None = None,
    latents: Tensor | None = None,
) -> Rows:
    """Generate rows. With `texts`, find latents for these words; with `latents` [N, T, D], find the words."""
    generator = torch.Generator(device=model.latent_mean.device).manual_seed(sampling.seed)
    num = len(texts) if texts is not None else len(latents) if latents is not None else sampling.num_samples
    tokens, real = _begin_text(model, num, texts, generator)
    state = _begin_latents(model, num, latents, generator)
    for left in range(sampling.num_steps, 0, -1):
        time, earlier = left / sampling.num_steps, (left - 1) / sampling.num_steps
        text_time = state.new_full((num,), time if texts is None else 0.0)
        latent_time = state.new_full((num,), time if latents is None else 0.0)
        logits, answer = model(tokens, real, state, text_time, latent_time)
        tokens = _reveal(model, tokens, logits, earlier / time, sampling.temperature, generator)
        if latents is None:
            clean = find_clean(state, answer, latent_time, diffusion.prediction)
            state = go_back(state, clean, time, earlier)  # [N, T, D]
    return Rows(torch.where(real, tokens, 0).cpu(), real.cpu(), take_from_sphere(model, state).cpu())


def _begin_text(model: MMDiT, num: int, given: Rows | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens and where there is text: the given ones, or all hidden."""
    device = model.latent_mean.device
    if given is not None:
        return given.tokens.to(device).long(), given.mask.to(device)
    real = _draw_lengths(model, num, generator)
    return torch.full_like(real, model.mask_token, dtype=torch.long), real


def _begin_latents(model: MMDiT, num: int, given: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return latents on the sphere: the given ones, or noise."""
    device, shape = model.latent_mean.device, model.shapes
    if given is not None:
        return place_on_sphere(model, given.to(device))
    return draw_noise(torch.empty(num, shape.num_latents, shape.latent_dim, device=device), generator)


def _draw_lengths(model: MMDiT, num: int, generator: torch.Generator) -> Tensor:
    """Return masks [num, L] for texts of the lengths seen in training."""
    counts = model.length_counts
    counts = counts if counts.sum() > 0 else torch.eye(len(counts), device=counts.device)[-1]
    lengths = torch.multinomial(counts, num, replacement=True, generator=generator)
    return torch.arange(len(counts) - 1, device=counts.device) < lengths.unsqueeze(1)


def _reveal(
    model: MMDiT, tokens: Tensor, logits: Tensor, keep: float, temperature: float, generator: torch.Generator
) -> Tensor:
    """Draw a word for each hidden position, and reveal each with probability 1 - keep."""
    chances = (logits.float() / temperature).softmax(-1)
    words = torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view_as(tokens)
    # At the last step keep is 0, and rand is never below it: no word stays hidden
    shown = torch.rand(tokens.shape, device=tokens.device, generator=generator) >= keep
    return torch.where((tokens == model.mask_token) & shown, words, tokens)


def spell(rows: Rows, vocab: tuple[str, ...] | None, tokenizer: Any = None) -> list[str]:
    """Format each text as a line: by its tokenizer, else as words where they are known, ids otherwise."""
    lines = []
    for tokens, mask in zip(rows.tokens, rows.mask):
        ids = tokens[mask].tolist()
        if tokenizer is not None:  # its tokens may be parts of words, with marks for spaces
            lines.append(" ".join(tokenizer.decode(ids).split()))
            continue
        lines.append(" ".join(str(i) if vocab is None or i >= len(vocab) else vocab[i] for i in ids))
    return lines
