"""Losses of embeddings: the distance of unit-norm latents, and contrast against the rest of the batch.

Vectors are brought to unit length in fp32, so that their size cannot overflow anything and a zero vector has a zero
gradient. Similarities are fp32 products also under autocast: a scale of 100 leaves two digits in half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.losses.check import (
    LARGEST,
    require_fit,
    require_pair,
    require_positive,
    require_same_size,
    require_share,
    require_tensors,
)
from steadygrad.losses.classification import masked_cross_entropy
from steadygrad.losses.precision import hold_above, narrow, widen, without_autocast
from steadygrad.losses.reduction import reduce_loss, require_reduction, select
from steadygrad.losses.shapes import Dims, as_dims, broadcasts_to
from steadygrad.losses.vectors import least_norm, safe_normalize


def normalized_mse(
    prediction: Tensor,
    target: Tensor,
    *,
    mask: Tensor | None = None,
    dim: Dims = -1,
    reduction: str = "mean",
) -> Tensor:
    """Return the mean squared error after bringing both to unit norm along `dim`: at most 4 / (size of dim).

    `mask` has the shape without `dim`: False leaves that vector out, whatever it contains.
    """
    axes, mask = _check_latents(prediction, target, mask, dim, reduction)
    vectors = [widen(prediction), widen(target)]
    if mask is not None:
        vectors = [select(v, mask) for v in vectors]
    unit_prediction, unit_target = [safe_normalize(v, axes, eps=least_norm(prediction)) for v in vectors]
    losses = (unit_prediction - unit_target).square()  # at most 4 in sum over a vector: nothing overflows
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
    """Return the cross entropy of finding `key[i]` for `query[i]` [B, D] among all keys, or among it and `negatives`.

    `negatives` is [K, D], shared, or [B, K, D], each query's own. A learned temperature is held at 0.01 or above, as
    CLIP holds its scale at 100 or below; its gradient passes, so that it can come back.
    """
    _check_contrast(query, key, negatives, temperature, label_smoothing, reduction)
    q, k = (_prepare(v, normalize=normalize) for v in (query, key))  # [B, D], [K, D]
    scale = 1 / _hold_temperature(widen(temperature)) if isinstance(temperature, Tensor) else 1 / temperature
    with without_autocast(query.device):
        if negatives is None:
            logits = q @ k.mT  # [B, K]; keys beyond the first B are further negatives
            labels = torch.arange(len(q), device=q.device)
        else:
            others = _prepare(negatives, normalize=normalize)
            # Autocast would round these products to half precision, and the scale enlarges the error
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
    """Return CLIP's loss: the mean of `info_nce` in both directions. `logit_scale` is the factor itself, not its log.

    The scale is held at `max_scale`, where its gradient is zero: clamp a learned one in place after each step too.
    """
    _check_sides(image, text, logit_scale, max_scale, label_smoothing, reduction)
    a, b = (_prepare(v, normalize=normalize) for v in (image, text))  # each [B, D]
    scale = _hold_scale(logit_scale, max_scale)
    with without_autocast(image.device):
        logits = scale * (a @ b.mT)  # [B, B]
        labels = torch.arange(len(a), device=a.device)
        ways = [
            masked_cross_entropy(way, labels, label_smoothing=label_smoothing, reduction=reduction)
            for way in (logits, logits.mT)
        ]
    return narrow((ways[0] + ways[1]) / 2, image, autocast_keeps=True)


def _hold_temperature(temperature: Tensor) -> Tensor:
    # Straight-through: the value is held, the gradient is that of the free temperature
    return temperature + (hold_above(temperature, 0.01) - temperature).detach()


def _hold_scale(scale: Tensor | float, top: float) -> Tensor | float:
    return torch.where(scale > top, top, widen(scale)) if isinstance(scale, Tensor) else min(scale, top)


def _prepare(features: Tensor, *, normalize: bool) -> Tensor:
    wide = widen(features)
    return safe_normalize(wide, eps=least_norm(features)) if normalize else wide


def _check_latents(
    prediction: Tensor, target: Tensor, mask: Tensor | None, dim: Dims, reduction: str
) -> tuple[tuple[int, ...], Tensor | None]:
    """The dimensions of a vector, counted from the end, as both sides have them; and the mask with these put back."""
    name = "normalized_mse"
    require_reduction(name, reduction)
    require_tensors(name, prediction=prediction, target=target, mask=mask)
    shape = require_pair(name, prediction=prediction, target=target)
    axes = tuple([d - prediction.dim() for d in as_dims(prediction, dim, name)])
    for axis in axes:
        require_same_size(name, axis, prediction=prediction, target=target)
    if mask is None:
        return axes, None
    is_kept = [d - len(shape) not in axes for d in range(len(shape))]
    kept = [size for size, keep in zip(shape, is_kept) if keep]
    require_fit(name, "mask", mask, kept, "prediction without dim")
    full = mask.bool()[(None,) * (len(kept) - mask.dim())]
    return axes, full[(..., *[slice(None) if keep else None for keep in is_kept])]


def _check_contrast(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None,
    temperature: float | Tensor,
    label_smoothing: float,
    reduction: str,
) -> None:
    name = "info_nce"
    require_reduction(name, reduction)
    require_share(name, "label_smoothing", label_smoothing, "0.1 is usual.")
    require_positive(name, "temperature", temperature, "0.07 is usual.", most=LARGEST)
    require_tensors(name, query=query, key=key, negatives=negatives)
    if not _goes_together(query, key, negatives):
        others = "" if negatives is None else f" and negatives of shape {tuple(negatives.shape)}"
        raise UsageError(
            f"{name} got query of shape {tuple(query.shape)}, key of shape {tuple(key.shape)}{others}. Give query and "
            "key as [B, D], a key for each query, and negatives as [K, D] or [B, K, D]."
        )
    num_choices = len(key) if negatives is None else 1 + negatives.shape[-2]
    require_fit(name, "temperature", temperature, (len(query), num_choices), "logits")


def _goes_together(query: Tensor, key: Tensor, negatives: Tensor | None) -> bool:
    """More keys than queries are more negatives; where negatives are given, one key may stand for all queries."""
    if query.dim() != 2 or not key.dim() or key.shape[-1] != query.shape[-1]:
        return False
    if negatives is None:
        return key.dim() == 2 and len(key) >= len(query)
    if negatives.dim() not in (2, 3) or negatives.shape[-1] != query.shape[-1]:
        return False
    own = negatives.dim() == 2 or len(negatives) in (1, len(query))
    return own and key.dim() <= 2 and broadcasts_to(key.shape, query.shape)


def _check_sides(
    image: Tensor,
    text: Tensor,
    logit_scale: float | Tensor,
    max_scale: float,
    label_smoothing: float,
    reduction: str,
) -> None:
    name = "clip_loss"
    require_reduction(name, reduction)
    require_share(name, "label_smoothing", label_smoothing, "0.1 is usual.")
    require_positive(name, "logit_scale", logit_scale, "Give the factor, not its logarithm: 1 / 0.07 is usual.")
    require_positive(name, "max_scale", max_scale, "100.0 is usual.")
    require_tensors(name, image=image, text=text)
    if image.dim() != 2 or image.shape != text.shape:
        raise UsageError(
            f"{name} takes image and text of one shape, [B, D], got {tuple(image.shape)} and {tuple(text.shape)}. "
            "Give one vector for each pair; flatten other dimensions into B first."
        )
    require_fit(name, "logit_scale", logit_scale, (len(image), len(image)), "logits")
