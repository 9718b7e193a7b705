"""Losses of embeddings: the distance of unit-norm latents, and contrast against the rest of the batch.

Vectors are brought to unit length in fp32, so that their size cannot overflow anything and a zero vector has a zero
gradient. Similarities are fp32 products also under autocast: a scale of 100 leaves two digits in half precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from steadygrad.errors import ConfigError
from steadygrad.losses.classification import masked_cross_entropy
from steadygrad.losses.precision import narrow, widen, without_autocast
from steadygrad.losses.reduction import reduce_loss, select
from steadygrad.losses.vectors import least_norm, safe_normalize


def normalized_mse(
    prediction: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    dim: int = -1,
    reduction: str = "mean",
) -> Tensor:
    """Mean squared error of the two after bringing both to unit norm along `dim`: at most 4 / (size of dim).

    `mask` has the shape without `dim`: False leaves that vector out, whatever stands there.
    """
    vectors = [widen(prediction), widen(target)]
    if mask is not None:
        mask = mask.bool().unsqueeze(dim)
        vectors = [select(v, mask) for v in vectors]
    unit_prediction, unit_target = [safe_normalize(v, dim, eps=least_norm(prediction)) for v in vectors]
    losses = (unit_prediction - unit_target).square()
    return narrow(reduce_loss(losses, reduction, mask), prediction, autocast_keeps=True)


def info_nce(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    normalize: bool = True,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy of finding `key[i]` for `query[i]` [B, D] among all keys, or among it and `negatives`.

    `negatives` is [K, D], shared, or [B, K, D], each query's own. A learned temperature is held at 0.01 or above, as
    CLIP holds its scale at 100 or below.
    """
    q, k = (_prepare(v, normalize=normalize) for v in (query, key))
    scale = 1 / widen(temperature).clamp(min=0.01) if isinstance(temperature, Tensor) else 1 / _positive(temperature)
    with without_autocast(query.device):
        if negatives is None:
            logits = q @ k.mT  # [B, B]
            labels = torch.arange(len(q), device=q.device)
        else:
            others = _prepare(negatives, normalize=normalize)
            distractors = (others @ q.unsqueeze(-1)).squeeze(-1) if others.dim() == 3 else q @ others.mT  # [B, K]
            logits = torch.cat([(q * k).sum(-1, keepdim=True), distractors], dim=-1)
            labels = torch.zeros(len(q), dtype=torch.long, device=q.device)
        loss = masked_cross_entropy(scale * logits, labels, label_smoothing=label_smoothing, reduction=reduction)
    return narrow(loss, query, autocast_keeps=True)


def clip_loss(
    image: Tensor,
    text: Tensor,
    logit_scale: float | Tensor = 1 / 0.07,
    *,
    max_scale: float = 100.0,
    normalize: bool = True,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """CLIP's loss: the mean of `info_nce` in both directions. `logit_scale` is the factor itself, not its logarithm.

    The scale is held at `max_scale`, where its gradient is zero: clamp a learned one in place after each step too.
    """
    a, b = (_prepare(v, normalize=normalize) for v in (image, text))
    scale = widen(logit_scale).clamp(max=max_scale) if isinstance(logit_scale, Tensor) else min(logit_scale, max_scale)
    with without_autocast(image.device):
        logits = scale * (a @ b.mT)  # [B, B]
        labels = torch.arange(len(a), device=a.device)
        ways = [
            masked_cross_entropy(way, labels, label_smoothing=label_smoothing, reduction=reduction)
            for way in (logits, logits.mT)
        ]
    return narrow((ways[0] + ways[1]) / 2, image, autocast_keeps=True)


def _prepare(features: Tensor, *, normalize: bool) -> Tensor:
    wide = widen(features)
    return safe_normalize(wide, eps=least_norm(features)) if normalize else wide


def _positive(temperature: float) -> float:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(f"info_nce's temperature must be a positive number, got {temperature}. 0.07 is usual.")
    return temperature
