"""What multiway_contrastive refuses, before any arithmetic, each by name and with its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from steadygrad.errors import ConfigError, UnsupportedError
from steadygrad.losses.multiway.precision import PRECISIONS
from steadygrad.losses.multiway.similarity import SIMILARITIES, Similarity, is_multilinear

Negatives = Literal["all", "fibre", "permuted", "sampled"]
Impl = Literal["auto", "naive", "tiled", "triton"]
Reduction = Literal["mean", "sum", "none"]
ALLOWED: dict[str, Sequence[str]] = {
    "similarity": SIMILARITIES,
    "negatives": ("all", "fibre", "permuted", "sampled"),
    "reduction": ("mean", "sum", "none"),
    "impl": ("auto", "naive", "tiled", "triton"),
    "precision": PRECISIONS,
}
MOST_MODALITIES = 8


def choose_anchors(anchors: Literal["all"] | Sequence[int], num: int) -> list[int]:
    """Return the indices of the anchor modalities."""
    if isinstance(anchors, str):
        if anchors == "all":
            return list(range(num))
    elif hasattr(anchors, "__len__") and len(anchors) and all(isinstance(m, int) and 0 <= m < num for m in anchors):
        return list(anchors)
    raise ConfigError(
        f"anchors must be 'all' or indices of modalities from 0 to {num - 1}, got {anchors!r} in multiway_contrastive."
    )


def check_choices(
    similarity: Similarity,
    negatives: str,
    reduction: str,
    impl: str,
    precision: str,
    label_smoothing: float,
    num_samples: int,
) -> None:
    """Every setting has one of its values, and they go together."""
    for (name, allowed), value in zip(ALLOWED.items(), (similarity, negatives, reduction, impl, precision)):
        if value not in allowed:
            raise ConfigError(f"{name} of multiway_contrastive must be one of {tuple(allowed)}, got {value!r}.")
    if not 0 <= label_smoothing < 1:
        raise ConfigError(f"label_smoothing of multiway_contrastive must be in [0, 1), got {label_smoothing}.")
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ConfigError(
            f"num_samples of multiway_contrastive must be a whole number and at least 1, got {num_samples}."
        )
    if label_smoothing and negatives == "permuted":
        raise UnsupportedError(
            f"label_smoothing={label_smoothing} with negatives='permuted' in multiway_contrastive. "
            "Use 'all', 'fibre' or 'sampled', or label_smoothing=0."
        )
    if label_smoothing and not is_multilinear(similarity):
        raise UnsupportedError(
            f"label_smoothing={label_smoothing} with similarity={similarity!r} in multiway_contrastive: the mean over "
            "all combinations has no short form there. Use 'mip' or 'cosine', or label_smoothing=0."
        )


def check_scale(logit_scale: Tensor | float) -> None:
    """One number, and not below zero where that can be seen without waiting for a device."""
    if isinstance(logit_scale, Tensor):
        if logit_scale.numel() != 1:
            raise ConfigError(
                f"logit_scale of multiway_contrastive has shape {tuple(logit_scale.shape)}. "
                "Pass one number: a float or a tensor with one element."
            )
    elif not logit_scale >= 0:  # NaN fails too
        raise ConfigError(
            f"logit_scale of multiway_contrastive must not be negative, got {logit_scale}. "
            "It multiplies the similarity: pass exp of a learnt logarithm, as MultiwayScale does."
        )


def refuse_second_order() -> None:
    """Called in a backward pass: with create_graph its result would be a constant, and what follows silently wrong."""
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "multiway_contrastive was differentiated with create_graph=True, and its fast versions have no second "
            "derivative. Use impl='naive' for that, or leave the loss out of the part that is differentiated twice."
        )


def check_features(features: Sequence[Tensor], present: Tensor | None) -> None:
    """One [B, D] for each modality, one device, dtypes that go together."""
    if not 2 <= len(features) <= MOST_MODALITIES:
        raise ConfigError(
            f"multiway_contrastive takes 2 to {MOST_MODALITIES} feature matrices, got {len(features)}. "
            "Pass one [B, D] tensor for each modality."
        )
    first = features[0]
    for m, feature in enumerate(features):
        if feature.dim() != 2 or feature.shape != first.shape or 0 in feature.shape:
            raise ConfigError(
                f"features[{m}] of multiway_contrastive has shape {tuple(feature.shape)}, features[0] has "
                f"{tuple(first.shape)}. All must be [B, D] with the same B and D, neither of them 0."
            )
        if not feature.is_floating_point():
            raise UnsupportedError(
                f"features[{m}] of multiway_contrastive is {feature.dtype}. Features are real numbers: convert it to "
                "float32, float16 or bfloat16."
            )
        if (feature.dtype == torch.float64) != (first.dtype == torch.float64):
            raise UnsupportedError(
                f"features[{m}] of multiway_contrastive is {feature.dtype}, features[0] is {first.dtype}. "
                "Use one floating dtype; only float32, float16 and bfloat16 may be mixed."
            )
        if feature.device != first.device:
            raise ConfigError(
                f"features[{m}] of multiway_contrastive is on {feature.device}, features[0] on {first.device}. "
                "Put all modalities on one device."
            )
    if present is not None and (present.shape != (len(first), len(features)) or present.dtype != torch.bool):
        raise ConfigError(
            f"present of multiway_contrastive is {present.dtype} {tuple(present.shape)}. "
            f"It must be torch.bool of shape {(len(first), len(features))}: samples, modalities."
        )
