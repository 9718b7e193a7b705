"""What the losses and safe functions refuse, by name and with the value; and what they still accept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from steadygrad.errors import ConfigError, SteadygradError, UnsupportedError, UsageError
from steadygrad.losses import (
    StableLossFunctions,
    clip_loss,
    dice,
    find_bad_terms,
    focal,
    get_stable_loss_function,
    info_nce,
    iou,
    masked_cross_entropy,
    masked_mean,
    normalized_mse,
    safe_acos,
    safe_asin,
    safe_atan2,
    safe_div,
    safe_log,
    safe_log_softmax,
    safe_norm,
    safe_normalize,
    safe_softmax,
    safe_sqrt,
    safe_std,
    stable_bce_with_logits,
    stable_kl,
    structure_loss,
)

Call = Callable[[], Any]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def labels(*shape: int, fill: int = 0) -> Tensor:
    return torch.full(shape, fill)


def check_refusals(call: Call, error: type[SteadygradError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# --- mismatched shapes ----------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[Call, str]] = {
    "ce_batch": (
        lambda: masked_cross_entropy(zeros(4, 10), labels(5)),
        "masked_cross_entropy got target of shape (5,) for logits of shape (4, 10) with classes along dimension 1. "
        "Give target the shape (4,)",
    ),
    "ce_column": (
        lambda: masked_cross_entropy(zeros(4, 10), labels(4, 1)),
        "target of shape (4, 1) for logits of shape (4, 10)",
    ),
    "ce_one_label": (
        lambda: masked_cross_entropy(zeros(4, 10), labels(1)),
        "target of shape (1,) for logits of shape (4, 10)",
    ),
    "ce_one_hot": (
        lambda: masked_cross_entropy(zeros(4, 4), labels(4, 4)),
        "target of shape (4, 4) for logits of shape (4, 4)",
    ),
    "ce_classes_last": (
        lambda: masked_cross_entropy(zeros(2, 5, 5), labels(2, 1)),
        "target of shape (2, 1) for logits of shape (2, 5, 5) with classes along dimension 1. "
        "Give target the shape (2, 5), or pass dim=-1 if classes stand last",
    ),
    "ce_scalar": (
        lambda: masked_cross_entropy(zeros(), labels()),
        "masked_cross_entropy got logits without dimensions",
    ),
    "ce_mask": (
        lambda: masked_cross_entropy(zeros(4, 10), labels(4), mask=zeros(4, 1)),
        "masked_cross_entropy got mask of shape (4, 1) for target of shape (4,), which would be broadcast to (4, 4)",
    ),
    "ce_mask_batch": (
        lambda: masked_cross_entropy(zeros(4, 10), labels(4), mask=zeros(3)),
        "mask of shape (3,) for target of shape (4,), which do not go together",
    ),
    "ce_weight": (
        lambda: masked_cross_entropy(zeros(4, 10), labels(4), weight=zeros(12)),
        "weight of shape (12,) for logits of shape (4, 10), with 10 classes along dimension 1. "
        "Give weight the shape (10,)",
    ),
    "bce_column": (
        lambda: stable_bce_with_logits(zeros(4, 1), zeros(4)),
        "stable_bce_with_logits takes logits and target of one shape, got (4, 1) and (4,)",
    ),
    "bce_mask": (
        lambda: stable_bce_with_logits(zeros(4, 1), zeros(4, 1), mask=zeros(4)),
        "stable_bce_with_logits got mask of shape (4,) for logits of shape (4, 1), which would be broadcast to (4, 4)",
    ),
    "bce_weight": (
        lambda: stable_bce_with_logits(zeros(4, 1), zeros(4, 1), weight=zeros(4)),
        "weight of shape (4,) for logits of shape (4, 1), which would be broadcast to (4, 4)",
    ),
    "bce_pos_weight": (
        lambda: stable_bce_with_logits(zeros(4, 3), zeros(4, 3), pos_weight=zeros(5)),
        "pos_weight of shape (5,) for logits of shape (4, 3), which do not go together",
    ),
    "focal_column": (
        lambda: focal(zeros(4), zeros(4, 1)),
        "focal takes logits and target of one shape, got (4,) and (4, 1)",
    ),
    "focal_mask": (
        lambda: focal(zeros(4), zeros(4), mask=zeros(4, 1)),
        "focal got mask of shape (4, 1) for logits of shape (4,)",
    ),
    "focal_alpha": (
        lambda: focal(zeros(4), zeros(4), alpha=zeros(4, 1)),  # type: ignore[arg-type]
        "focal got alpha of shape (4, 1) for logits of shape (4,), which would be broadcast to (4, 4)",
    ),
    "kl_column": (
        lambda: stable_kl(zeros(4, 1), zeros(4)),
        "stable_kl got input of shape (4, 1) and target of shape (4,), which would be broadcast to (4, 4)",
    ),
    "kl_classes": (
        lambda: stable_kl(zeros(4, 5), zeros(4, 6)),
        "input of shape (4, 5) and target of shape (4, 6), which do not",
    ),
    "kl_logits": (
        lambda: stable_kl(zeros(4, 5), zeros(4, 1), from_logits=True),
        "stable_kl got input of shape (4, 5) and target of shape (4, 1). Dimension -1 must be of one size in both",
    ),
    "kl_mask": (
        lambda: stable_kl(zeros(4, 5), zeros(4, 5), mask=zeros(4)),
        "stable_kl got mask of shape (4,) for input and target of shape (4, 5), which do not go together",
    ),
    "mse_column": (
        lambda: normalized_mse(zeros(4, 1), zeros(4)),
        "normalized_mse got prediction of shape (4, 1) and target of shape (4,), which would be broadcast to (4, 4)",
    ),
    "mse_missing_time": (
        lambda: normalized_mse(zeros(4, 1, 3), zeros(4, 3)),
        "prediction of shape (4, 1, 3) and target of shape (4, 3), which would be broadcast to (4, 4, 3)",
    ),
    "mse_vectors": (
        lambda: normalized_mse(zeros(4, 3), zeros(4, 1)),
        "prediction of shape (4, 3) and target of shape (4, 1). Dimension -1 must be of one size in both",
    ),
    "mse_mask": (
        lambda: normalized_mse(zeros(4, 4), zeros(4, 4), mask=zeros(4, 4)),
        "normalized_mse got mask of shape (4, 4) for prediction without dim of shape (4,)",
    ),
    "dice_column": (
        lambda: dice(zeros(4), zeros(4, 1)),
        "dice takes logits and target of one shape, [N, ...]; got (4,) and (4, 1)",
    ),
    "dice_one_pixel": (lambda: dice(zeros(2, 1, 3, 3), zeros(2, 1, 1, 1)), "got (2, 1, 3, 3) and (2, 1, 1, 1)"),
    "dice_turned": (lambda: dice(zeros(2, 3, 4, 5), zeros(2, 4, 5, 3)), "got (2, 3, 4, 5) and (2, 4, 5, 3)"),
    "dice_mask": (
        lambda: dice(zeros(2, 6), zeros(2, 6), mask=zeros(3, 1, 6)),
        "dice got mask of shape (3, 1, 6) for logits of",
    ),
    "iou_batch": (
        lambda: iou(zeros(2, 6), zeros(3, 6)),
        "iou takes logits and target of one shape, [N, ...]; got (2, 6) and (3, 6)",
    ),
    "iou_mask": (
        lambda: iou(zeros(2, 1, 3, 3), zeros(2, 3, 3), mask=zeros(2, 1, 3, 3)),
        "iou got mask of shape (2, 1, 3, 3) for target of shape (2, 3, 3), which would be broadcast to (2, 2, 3, 3)",
    ),
    "structure": (
        lambda: structure_loss(zeros(2, 8, 8), zeros(2, 4, 4)),
        "structure_loss takes logits and target of one shape",
    ),
    "nce_fewer_keys": (
        lambda: info_nce(zeros(4, 3), zeros(2, 3)),
        "info_nce got query of shape (4, 3), key of shape (2, 3). Give query and key as [B, D]",
    ),
    "nce_sizes": (lambda: info_nce(zeros(4, 3), zeros(4, 1)), "query of shape (4, 3), key of shape (4, 1)"),
    "nce_time": (lambda: info_nce(zeros(4, 4, 3), zeros(4, 4, 3)), "query of shape (4, 4, 3), key of shape (4, 4, 3)"),
    "nce_negatives": (
        lambda: info_nce(zeros(4, 3), zeros(4, 3), zeros(5, 6, 3)),
        "query of shape (4, 3), key of shape (4, 3) and negatives of shape (5, 6, 3)",
    ),
    "nce_key_of_one": (
        lambda: info_nce(zeros(4, 3), zeros(4, 1), zeros(5, 3)),
        "key of shape (4, 1) and negatives of shape (5, 3)",
    ),
    "nce_temperature": (
        lambda: info_nce(zeros(4, 3), zeros(4, 3), temperature=torch.ones(3)),
        "info_nce got temperature of shape (3,) for logits of shape (4, 4)",
    ),
    "clip_batch": (
        lambda: clip_loss(zeros(4, 3), zeros(6, 3)),
        "clip_loss takes image and text of one shape, [B, D], got (4, 3) and (6, 3)",
    ),
    "clip_time": (lambda: clip_loss(zeros(4, 4, 3), zeros(4, 4, 3)), "got (4, 4, 3) and (4, 4, 3)"),
    "clip_scale": (
        lambda: clip_loss(zeros(4, 3), zeros(4, 3), torch.ones(2, 4, 1)),
        "clip_loss got logit_scale of shape (2, 4, 1) for logits of shape (4, 4)",
    ),
    "einsum_sizes": (
        lambda: get_stable_loss_function(0)(zeros(4, 3), zeros(4, 3), zeros(4, 1)),
        "stable_einsum_similarity got features[2] of shape (4, 1) and features[0] of shape (4, 3)",
    ),
    "norm_sizes": (
        lambda: get_stable_loss_function(1)(zeros(4, 3), zeros(3)),
        "stable_norm_based_similarity got features[1] of shape (3,)",
    ),
    "cosine_batch": (
        lambda: get_stable_loss_function(2)(zeros(4, 3), zeros(5, 3)),
        "stable_cosine_similarity_nd got features[1] of shape (5, 3) and features[0] of shape (4, 3). "
        "Give all as [B, D], with one D and one B",
    ),
    "distance_time": (
        lambda: get_stable_loss_function(3)(zeros(2, 4, 3), zeros(2, 4, 3)),
        "stable_euclidean_distance_nd got features[0] of shape (2, 4, 3)",
    ),
    "mean_of_vectors": (
        lambda: StableLossFunctions().stable_mean_n_vectors(zeros(3), zeros(3, 1)),
        "stable_mean_n_vectors takes first and another of one shape, got (3,) and (3, 1)",
    ),
    "softmax_mask": (
        lambda: safe_softmax(zeros(4, 1), mask=zeros(4)),
        "safe_softmax got x of shape (4, 1) and mask of shape (4,), which would be broadcast to (4, 4)",
    ),
    "log_softmax_mask": (
        lambda: safe_log_softmax(zeros(4, 3), mask=zeros(4)),
        "safe_log_softmax got x of shape (4, 3) and mask of",
    ),
    "masked_mean": (
        lambda: masked_mean(zeros(4), zeros(4, 1)),
        "masked_mean got x of shape (4,) and mask of shape (4, 1)",
    ),
    "div": (lambda: safe_div(zeros(3), zeros(4)), "safe_div got shapes (3,) and (4,), which do not go together"),
    "atan2": (lambda: safe_atan2(zeros(2, 3), zeros(2, 1, 4)), "safe_atan2 got shapes (2, 3) and (2, 1, 4)"),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_mismatched_shapes_are_refused_and_named(name: str) -> None:
    call, message = SHAPES[name]
    check_refusals(call, UsageError, re.escape(message))


# --- missing dimensions ---------------------------------------------------------------------------------------------

DIMS: dict[str, tuple[Call, str]] = {
    "norm": (
        lambda: safe_norm(zeros(3, 4), 5),
        "safe_norm got dim=5 for a tensor of shape (3, 4). Name dimensions from -2 to 1",
    ),
    "norm_twice": (lambda: safe_norm(zeros(3, 4), (0, -2)), "safe_norm got dim=(0, -2) for a tensor of shape (3, 4)"),
    "norm_none": (lambda: safe_norm(zeros(3, 4), ()), "safe_norm got dim=() for a tensor of shape (3, 4)"),
    "normalize": (lambda: safe_normalize(zeros(3), 1), "safe_normalize got dim=1 for a tensor of shape (3,)"),
    "std": (lambda: safe_std(zeros(3, 4), -3), "safe_std got dim=-3"),
    "masked_mean": (lambda: masked_mean(zeros(3, 4), None, 2), "masked_mean got dim=2"),
    "softmax": (lambda: safe_softmax(zeros(3, 4), 2), "safe_softmax got dim=2"),
    "softmax_two": (lambda: safe_softmax(zeros(3, 4), (0, 1)), "safe_softmax got dim=(0, 1)"),  # type: ignore[arg-type]
    "log_softmax": (lambda: safe_log_softmax(zeros(3), -2), "safe_log_softmax got dim=-2"),
    "cross_entropy": (lambda: masked_cross_entropy(zeros(3, 4), labels(3), dim=2), "masked_cross_entropy got dim=2"),
    "kl": (lambda: stable_kl(zeros(3, 4), zeros(3, 4), dim=2, from_logits=True), "stable_kl got dim=2"),
    "mse": (lambda: normalized_mse(zeros(3, 4), zeros(3, 4), dim=2), "normalized_mse got dim=2"),
}


@pytest.mark.parametrize("name", list(DIMS))
def test_a_missing_dimension_is_refused_and_never_replaced_by_another(name: str) -> None:
    call, message = DIMS[name]
    check_refusals(call, UsageError, re.escape(message))


# --- values that are not tensors, or of the wrong kind --------------------------------------------------------------

TAKES_ONE = {
    "safe_sqrt": safe_sqrt,
    "safe_log": safe_log,
    "safe_acos": safe_acos,
    "safe_asin": safe_asin,
    "safe_norm": safe_norm,
    "safe_normalize": safe_normalize,
    "safe_std": safe_std,
    "safe_softmax": safe_softmax,
    "safe_log_softmax": safe_log_softmax,
    "masked_mean": masked_mean,
}
TAKES_TWO = {
    "masked_cross_entropy": masked_cross_entropy,
    "stable_bce_with_logits": stable_bce_with_logits,
    "focal": focal,
    "stable_kl": stable_kl,
    "dice": dice,
    "iou": iou,
    "structure_loss": structure_loss,
    "normalized_mse": normalized_mse,
    "info_nce": info_nce,
    "clip_loss": clip_loss,
    "safe_div": safe_div,
    "safe_atan2": safe_atan2,
    "stable_einsum_similarity": get_stable_loss_function(0),
}


@pytest.mark.parametrize("name", list(TAKES_ONE))
def test_a_safe_function_of_a_value_that_is_not_a_real_tensor_is_refused(name: str) -> None:
    piece: Callable[..., Tensor] = TAKES_ONE[name]
    with pytest.raises(UnsupportedError, match=rf"{name}'s x must be a tensor, got list"):
        piece([1.0, 2.0])
    with pytest.raises(
        UnsupportedError, match=rf"{name}'s x must hold real numbers, got torch.complex64 of shape \(3,\)"
    ):
        piece(zeros(3, dtype=torch.complex64))


@pytest.mark.parametrize("name", list(TAKES_TWO))
def test_a_loss_of_a_non_tensor_or_a_tensor_elsewhere_is_refused(name: str) -> None:
    loss: Callable[..., Tensor] = TAKES_TWO[name]
    with pytest.raises(UnsupportedError, match=rf"{name}'s \S+ must be a tensor, got list"):
        loss(zeros(2, 3), [0, 1])
    with pytest.raises(UsageError, match=rf"{name} got \S+ on cpu and \S+ on meta\. Put all of them on one device"):
        loss(zeros(2, 3), zeros(2, 3).to("meta"))


KINDS: dict[str, tuple[Call, str]] = {
    "float_labels": (
        lambda: masked_cross_entropy(zeros(4, 10), zeros(4)),
        "masked_cross_entropy takes class indices, got torch.float32 of shape (4,) as target",
    ),
    "two_numbers": (lambda: safe_div(1.0, 2.0), "safe_div takes at least one tensor, got {'numerator': 1.0"),
    "mask": (
        lambda: focal(zeros(2), zeros(2), mask=[True, False]),  # type: ignore[arg-type]
        "focal's mask must be a tensor, got list",
    ),
    "pos_weight": (
        lambda: stable_bce_with_logits(zeros(2), zeros(2), pos_weight=2.0),  # type: ignore[arg-type]
        "stable_bce_with_logits's pos_weight must be a tensor, got float",
    ),
    "term": (
        lambda: find_bad_terms({"text": 1.0}),  # type: ignore[dict-item]
        "find_bad_terms's text must be a tensor, got float",
    ),
}


@pytest.mark.parametrize("name", list(KINDS))
def test_an_input_of_the_wrong_kind_is_refused_by_name(name: str) -> None:
    call, message = KINDS[name]
    check_refusals(call, UnsupportedError, re.escape(message))


# --- classes out of range -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [10, -1, -100_000])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_label_out_of_range_is_refused_on_the_cpu(label: int, weighted: bool) -> None:
    target = labels(4)
    target[2] = label
    weight = torch.ones(10) if weighted else None
    message = (
        rf"masked_cross_entropy got a class in target .* 10 classes, .*index {label} is out of bounds.*ignore_index"
    )
    check_refusals(lambda: masked_cross_entropy(zeros(4, 10), target, weight=weight), UsageError, message)
    kept = masked_cross_entropy(zeros(4, 10), target, weight=weight, mask=target == 0)
    assert kept.item() == pytest.approx(math.log(10))  # masked labels are not checked


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool])
def test_labels_of_every_integer_dtype_are_accepted(dtype: torch.dtype) -> None:
    logits, target = torch.randn(6, 200), torch.tensor([0, 1, 1, 0, 1, 0])
    assert torch.equal(masked_cross_entropy(logits, target.to(dtype)), F.cross_entropy(logits, target))


def test_the_ignored_label_does_not_wrap_around_in_a_small_dtype() -> None:
    logits, target = torch.randn(2, 200), torch.tensor([156, 3])  # -100 is 156 in eight bits
    assert torch.equal(masked_cross_entropy(logits, target.to(torch.uint8)), F.cross_entropy(logits, target))


# --- settings -------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Call, str]] = {
    "smoothing": (
        lambda: masked_cross_entropy(zeros(2, 3), labels(2), label_smoothing=1.5),
        "masked_cross_entropy's label_smoothing must be between 0 and 1, got 1.5",
    ),
    "smoothing_text": (
        lambda: masked_cross_entropy(zeros(2, 3), labels(2), label_smoothing="0.1"),  # type: ignore[arg-type]
        "masked_cross_entropy's label_smoothing must be between 0 and 1, got '0.1'",
    ),
    "z_loss": (
        lambda: masked_cross_entropy(zeros(2, 3), labels(2), z_loss=-1e-4),
        "z_loss must not be negative, got -0.0001",
    ),
    "ceiling": (
        lambda: masked_cross_entropy(zeros(2, 3), labels(2), ceiling=0.0),
        "ceiling must be a positive number, got 0.0",
    ),
    "ignore_index": (
        lambda: masked_cross_entropy(zeros(2, 3), labels(2), ignore_index=None),  # type: ignore[arg-type]
        "masked_cross_entropy's ignore_index must be a finite number, got None",
    ),
    "gamma": (lambda: focal(zeros(2), zeros(2), gamma=math.nan), "focal's gamma must not be negative, got nan"),
    "gamma_infinite": (
        lambda: focal(zeros(2), zeros(2), gamma=math.inf),
        "focal's gamma must be a finite number, got inf",
    ),
    "alpha": (lambda: focal(zeros(2), zeros(2), alpha=2.0), "focal's alpha must be between 0 and 1, got 2.0"),
    "dice": (lambda: dice(zeros(2, 3), zeros(2, 3), smooth=-1.0), "dice's smooth must not be negative, got -1.0"),
    "iou": (lambda: iou(zeros(2, 3), zeros(2, 3), smooth=-1.0), "iou's smooth must not be negative, got -1.0"),
    "structure": (
        lambda: structure_loss(zeros(2, 3, 3), zeros(2, 3, 3), smooth=-1.0),
        "structure_loss's smooth must not be negative",
    ),
    "border": (
        lambda: structure_loss(zeros(2, 3, 3), zeros(2, 3, 3), border_weight=-5.0),
        "structure_loss's border_weight must not be negative, got -5.0",
    ),
    "window": (
        lambda: structure_loss(zeros(2, 3, 3), zeros(2, 3, 3), window=3.0),  # type: ignore[arg-type]
        "structure_loss's window must be an odd number of pixels, got 3.0",
    ),
    "temperature": (
        lambda: info_nce(zeros(2, 3), zeros(2, 3), temperature=-0.1),
        "info_nce's temperature must be a positive number, got -0.1",
    ),
    "nce_smoothing": (
        lambda: info_nce(zeros(2, 3), zeros(2, 3), label_smoothing=2.0),
        "info_nce's label_smoothing must be between",
    ),
    "logit_scale": (
        lambda: clip_loss(zeros(2, 3), zeros(2, 3), -2.66),
        "clip_loss's logit_scale must be a positive number, got -2.66. Give the factor, not its logarithm",
    ),
    "max_scale": (
        lambda: clip_loss(zeros(2, 3), zeros(2, 3), max_scale=0.0),
        "clip_loss's max_scale must be a positive number, got 0.0",
    ),
    "clip_smoothing": (
        lambda: clip_loss(zeros(2, 3), zeros(2, 3), label_smoothing=-0.1),
        "clip_loss's label_smoothing must be between",
    ),
    "sqrt": (lambda: safe_sqrt(zeros(2), eps=-1e-8), "safe_sqrt's eps must not be negative, got -1e-08"),
    "log": (lambda: safe_log(zeros(2), eps=-1e-8), "safe_log's eps must not be negative, got -1e-08"),
    "div": (lambda: safe_div(zeros(2), zeros(2), eps=-1e-8), "safe_div's eps must not be negative, got -1e-08"),
    "normalize": (
        lambda: safe_normalize(zeros(2), eps=math.inf),
        "safe_normalize's eps must be a finite number, got inf",
    ),
    "std": (lambda: safe_std(zeros(2), correction=math.nan), "safe_std's correction must be a finite number, got nan"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_invalid_settings_are_refused_by_name(name: str) -> None:
    call, message = SETTINGS[name]
    check_refusals(call, ConfigError, re.escape(message))


@pytest.mark.parametrize("name", [n for n in TAKES_TWO if not n.startswith("safe_") and "similarity" not in n])
def test_an_unknown_reduction_is_refused_with_the_loss_and_its_reductions(name: str) -> None:
    loss: Callable[..., Tensor] = TAKES_TWO[name]
    with pytest.raises(ConfigError, match=rf"^{name}'s reduction must be one of .*mean, sum, none, got 'average'"):
        loss(zeros(2, 3, 3), zeros(2, 3, 3), reduction="average")  # before any other check


# --- what is still accepted -----------------------------------------------------------------------------------------


def draw(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


LEGAL: dict[str, tuple[Call, Call]] = {
    "ce_mask_repeated": (
        lambda: masked_cross_entropy(draw(3, 5, 2), labels(3, 2), mask=torch.tensor([True, False])),
        lambda: masked_cross_entropy(draw(3, 5, 2), labels(3, 2), mask=torch.tensor([[True, False]] * 3)),
    ),
    "bce_number": (
        lambda: stable_bce_with_logits(draw(4), draw(4), weight=0.5),  # type: ignore[arg-type]
        lambda: 0.5 * stable_bce_with_logits(draw(4), draw(4)),
    ),
    "bce_repeated": (
        lambda: stable_bce_with_logits(
            draw(4, 3), draw(4, 3), weight=draw(4, 1), pos_weight=draw(3), mask=zeros(1, 1, 3) + 1
        ),
        lambda: stable_bce_with_logits(
            draw(4, 3), draw(4, 3), weight=draw(4, 1).expand(4, 3), pos_weight=draw(3).expand(4, 3)
        ),
    ),
    "kl_one_target": (
        lambda: stable_kl(draw(4, 5).log(), draw(5)),
        lambda: stable_kl(draw(4, 5).log(), draw(5).expand(4, 5)),
    ),
    "kl_one_input": (
        lambda: stable_kl(draw(5).log(), draw(4, 5)),
        lambda: stable_kl(draw(5).log().expand(4, 5), draw(4, 5)),
    ),
    "kl_logits_of_fewer_dimensions": (
        lambda: stable_kl(draw(4, 5), draw(5), from_logits=True, dim=1),
        lambda: stable_kl(draw(4, 5), draw(5).expand(4, 5), from_logits=True, dim=1),
    ),
    "mse_one_target": (
        lambda: normalized_mse(draw(4, 3), draw(3), dim=1),
        lambda: normalized_mse(draw(4, 3), draw(3).expand(4, 3)),
    ),
    "mse_target_of_fewer_dimensions": (
        lambda: normalized_mse(draw(4, 3, 2), draw(3, 2), dim=1),
        lambda: normalized_mse(draw(4, 3, 2), draw(3, 2).expand(4, 3, 2), dim=1),
    ),
    "mse_mask_of_fewer_dimensions": (
        lambda: normalized_mse(draw(4, 3, 2), draw(4, 3, 2).flip(0), dim=0, mask=torch.tensor([True, False])),
        lambda: normalized_mse(draw(4, 3, 2)[..., :1], draw(4, 3, 2).flip(0)[..., :1], dim=0),
    ),
    "mse_images": (
        lambda: normalized_mse(draw(4, 3, 2), draw(4, 3, 2).flip(0), dim=(1, 2), mask=torch.tensor([1, 0, 1, 0])),
        lambda: normalized_mse(draw(4, 3, 2)[::2].flatten(1), draw(4, 3, 2).flip(0)[::2].flatten(1)),
    ),
    "dice_without_channel": (
        lambda: dice(draw(2, 1, 3, 4), draw(2, 3, 4)),
        lambda: dice(draw(2, 1, 3, 4), draw(2, 3, 4).unsqueeze(1)),
    ),
    "iou_one_target": (
        lambda: iou(draw(2, 3, 4), draw(1, 3, 4)),
        lambda: iou(draw(2, 3, 4), draw(1, 3, 4).expand(2, 3, 4)),
    ),
    "dice_flat_target": (
        lambda: dice(draw(2, 3, 4), draw(2, 12)),
        lambda: dice(draw(2, 3, 4), draw(2, 12).reshape(2, 3, 4)),
    ),
    "nce_more_keys": (
        lambda: info_nce(draw(2, 3), draw(5, 3)),
        lambda: info_nce(draw(2, 3), draw(5, 3)[:2], draw(5, 3)[torch.tensor([[1, 2, 3, 4], [0, 2, 3, 4]])]),
    ),
    "nce_one_key": (
        lambda: info_nce(draw(4, 3), draw(1, 3), draw(5, 3)),
        lambda: info_nce(draw(4, 3), draw(1, 3).expand(4, 3), draw(5, 3).expand(4, 5, 3)),
    ),
    "nce_temperature_of_each": (
        lambda: info_nce(draw(4, 3), draw(4, 3), temperature=torch.full((4, 1), 0.5)),
        lambda: info_nce(draw(4, 3), draw(4, 3), temperature=0.5),
    ),
    "einsum_batches": (
        lambda: get_stable_loss_function(0, normalize=False)(draw(4, 3), draw(5, 3)),
        lambda: draw(4, 3) @ draw(5, 3).T,
    ),
    "softmax_shared_scores": (
        lambda: safe_softmax(draw(3, 3), mask=torch.ones(2, 3, 3).tril()),
        lambda: safe_softmax(draw(3, 3).expand(2, 3, 3), mask=torch.ones(2, 3, 3).tril()),
    ),
    "means_of_subsets": (
        lambda: masked_mean(draw(3), torch.eye(3), 1),
        lambda: draw(3),
    ),
    "outer_quotient": (lambda: safe_div(draw(4, 1), draw(4)), lambda: draw(4, 1) / draw(4)),
    "angles_of_a_number": (
        lambda: safe_atan2(1.0, draw(4)),  # type: ignore[arg-type]
        lambda: torch.atan2(torch.ones(4, dtype=torch.float64), draw(4)),
    ),
}


@pytest.mark.parametrize("name", list(LEGAL))
def test_broadcasting_that_enlarges_one_side_equals_the_written_out_form(name: str) -> None:
    broadcast, written_out = LEGAL[name]
    result = broadcast()
    assert result.isfinite().all()
    torch.testing.assert_close(result, written_out())


# --- compilers, vmap, and no host read ------------------------------------------------------------------------------


def all_inputs_of_cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    weight, mask = torch.ones(5), torch.ones(1, dtype=torch.bool)
    return masked_cross_entropy(logits, target, mask=mask, weight=weight, label_smoothing=smoothing, z_loss=smoothing)


def all_inputs_of_latents(x: Tensor, y: Tensor, gamma: float) -> Tensor:
    mse = normalized_mse(x, y[0], dim=1, mask=torch.ones(len(x)))
    return mse + focal(x, y, gamma=gamma, mask=torch.ones(1, 5)) + stable_kl(x, y[0], from_logits=True)


def test_checks_compile_into_one_graph_with_changing_sizes_and_settings() -> None:
    cross_entropy, latents = (
        torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
        for f in (all_inputs_of_cross_entropy, all_inputs_of_latents)
    )
    for num, setting in ((3, 0.1), (4, 0.2), (6, 0.3)):
        x, y = torch.randn(num, 5), torch.rand(num, 5)
        expected = all_inputs_of_cross_entropy(x, labels(num), setting)
        torch.testing.assert_close(cross_entropy(x, labels(num), setting), expected)
        torch.testing.assert_close(latents(x, y, setting), all_inputs_of_latents(x, y, setting))
    torch.compiler.reset()


def test_a_compiled_loss_refuses_with_the_same_message() -> None:
    compiled = torch.compile(focal, backend="aot_eager")
    check_refusals(lambda: compiled(zeros(4, 1), zeros(4)), UsageError, re.escape("got (4, 1) and (4,)"))
    torch.compiler.reset()


def test_checks_of_masks_and_weights_read_no_value() -> None:
    with FakeTensorMode():  # tensors without values: reading one raises
        x, y, target = torch.empty(4, 5), torch.empty(4, 5), torch.empty(4, dtype=torch.long)
        masked_cross_entropy(x, target, mask=torch.empty(4), weight=torch.empty(5), label_smoothing=0.1)
        stable_bce_with_logits(x, y, mask=torch.empty(4, 1), weight=torch.empty(5), pos_weight=torch.empty(5))
        info_nce(x, y, torch.empty(3, 5), temperature=torch.empty(()))
        clip_loss(x, y, torch.empty(()))
        for loss in (dice, iou, stable_kl, focal):
            loss(x, y, mask=torch.empty(5))
        normalized_mse(x, y, mask=torch.empty(4))


def test_losses_of_single_samples_work_with_vmap() -> None:
    logits, target = torch.randn(3, 4, 5), labels(3, 4)
    each = torch.stack([masked_cross_entropy(x, y) for x, y in zip(logits, target)])
    torch.testing.assert_close(torch.vmap(masked_cross_entropy)(logits, target), each)
    check_refusals(lambda: torch.vmap(masked_cross_entropy)(logits, target + 5), UsageError, "index 5 is out of bounds")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_checks_of_masks_and_weights_never_wait() -> None:
    x, y, target = torch.rand(4, 5).cuda(), torch.rand(4, 5).cuda(), labels(4).cuda()
    rows, columns, scale = torch.ones(4).cuda(), torch.ones(5).cuda(), torch.tensor(0.5).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        masked_cross_entropy(x, target, mask=rows, weight=columns, label_smoothing=0.1)
        stable_bce_with_logits(x, y, mask=columns, weight=columns, pos_weight=columns)
        normalized_mse(x, y, mask=rows)
        info_nce(x, y, y, temperature=scale)
        clip_loss(x, y, scale)
        dice(x, y, mask=columns)
    finally:
        torch.cuda.set_sync_debug_mode("default")
