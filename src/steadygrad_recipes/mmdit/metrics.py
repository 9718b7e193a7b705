"""A model on unseen rows -> how well it recovers hidden words and latents; and the same without a model.

What is hidden is drawn from a separate generator, the same at every validation, so that two validations differ only
by the model and training is not disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from steadygrad_recipes.mmdit.config import MMDiTConfig
from steadygrad_recipes.mmdit.data import Rows
from steadygrad_recipes.mmdit.diffusion import Hidden, hide, onto_sphere
from steadygrad_recipes.mmdit.losses import JointLoss
from steadygrad_recipes.mmdit.model import MMDiT

Batch = dict[str, Tensor]
SEED = 7919
"""Seed of what is hidden in a validation."""


def place_on_sphere(model: MMDiT, latents: Tensor) -> Tensor:
    """Convert stored latents to what the model sees."""
    return onto_sphere((latents.float() - model.latent_mean) / model.latent_std)


def take_from_sphere(model: MMDiT, latents: Tensor) -> Tensor:
    """Undo it; each latent gets the mean length, since its own is not learned."""
    radius = math.sqrt(latents.shape[-1])
    return latents * (model.latent_norm / radius) * model.latent_std + model.latent_mean


def hide_batch(model: MMDiT, batch: Batch, config: MMDiTConfig, generator: torch.Generator | None = None) -> Hidden:
    """Prepare a batch of rows as input for the model."""
    return hide(
        batch["tokens"],
        batch["mask"],
        place_on_sphere(model, batch["latents"]),
        mask_token=model.mask_token,
        prediction=config.diffusion.prediction,
        independent_times=config.diffusion.independent_times,
        generator=generator,
    )


def ask(model: MMDiT, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """Return logits and latent prediction for what is hidden."""
    logits, prediction = model(hidden.tokens, hidden.real, hidden.noisy, hidden.text_time, hidden.latent_time)
    return logits, prediction


@torch.no_grad()
def evaluate(model: MMDiT, batches: Iterable[Batch], config: MMDiTConfig) -> dict[str, float]:
    """Return `loss`, `text_loss`, `latent_loss`, `text_accuracy` and `latent_cosine`, each the mean over the rows.

    A text loss is the mean over the hidden words of all batches.
    """
    criterion, sums, num_words, num_rows = JointLoss(config.loss), torch.zeros(4, dtype=torch.float64), 0, 0
    for hidden in _hide_all(model, batches, config):
        logits, prediction = ask(model, hidden)
        terms = criterion(logits, prediction, hidden)
        hit = (logits.argmax(-1) == hidden.words) & hidden.is_hidden
        cosine = F.cosine_similarity(prediction.float(), hidden.target, dim=-1).mean()
        words, rows = int(hidden.is_hidden.sum()), len(hidden.words)  # waits for the device once a batch
        sums += torch.stack([
            terms["text_loss"].double() * words, hit.sum().double(),
            terms["latent_loss"].double() * rows, cosine.double() * rows,
        ]).cpu()  # fmt: skip
        num_words, num_rows = num_words + words, num_rows + rows
    text, hits = (sums[:2] / max(1, num_words)).tolist()
    latent, cosine_mean = (sums[2:] / max(1, num_rows)).tolist()
    weights = config.loss
    return {
        "loss": weights.loss_scale * (weights.text_loss_weight * text + weights.latent_loss_weight * latent),
        "text_loss": text,
        "latent_loss": latent,
        "text_accuracy": hits,
        "latent_cosine": cosine_mean,
    }


def _hide_all(model: MMDiT, batches: Iterable[Batch], config: MMDiTConfig) -> Iterator[Hidden]:
    device = model.latent_mean.device
    # A CUDA generator draws other numbers than the CPU's: validations compare on one kind of device
    generator = torch.Generator(device=device).manual_seed(SEED)
    for batch in batches:
        yield hide_batch(model, {name: tensor.to(device) for name, tensor in batch.items()}, config, generator)


@torch.no_grad()
def measure_baseline(model: MMDiT, train: Rows, batches: Iterable[Batch], config: MMDiTConfig) -> dict[str, float]:
    """Return the same losses without a model: words by their frequency at a position, latents by what is visible.

    The answer for latents is the noisy point itself, towards it or away from it depending on the time: the best
    possible without knowing anything about the data.
    """
    text, num_words, latent, num_rows = 0.0, 0, 0.0, 0
    counts = torch.zeros(train.tokens.shape[1], model.shapes.vocab_size, dtype=torch.float64)
    ones = train.mask.double()
    # Padding holds token 0, and adds 0 to it
    counts.scatter_add_(1, train.tokens.long().T, ones.T)
    logs = ((counts + 1) / (counts + 1).sum(1, keepdim=True)).log()  # [L, V]
    for hidden in _hide_all(model, batches, config):
        words, is_hidden = hidden.words.cpu(), hidden.is_hidden.cpu()
        losses = -logs.expand(len(words), -1, -1).gather(2, words.unsqueeze(-1)).squeeze(-1)
        text, num_words = text + float(losses[is_hidden].sum()), num_words + int(is_hidden.sum())
        sign = (
            2 * hidden.latent_time - 1 if config.diffusion.prediction == "flow" else torch.ones_like(hidden.latent_time)
        )
        cosine = F.cosine_similarity(hidden.noisy * sign.view(-1, 1, 1), hidden.target, dim=-1)
        latent += float(((2 - 2 * cosine) / hidden.noisy.shape[-1]).mean()) * len(words)
        num_rows += len(words)
    return {"text_loss": text / max(1, num_words), "latent_loss": latent / max(1, num_rows)}
