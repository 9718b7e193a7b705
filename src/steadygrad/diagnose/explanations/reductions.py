"""Means, deviations, sums and products: over nothing, over one element, and beyond the largest number."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    HALF,
    comes_from,
    either,
    goes_to,
    has_infs,
    in_dtype,
    is_empty,
    is_op,
)
from steadygrad.diagnose.explanations.entry import FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_infs, join, show_largest, show_scalar, show_shape

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div", "soft_margin_loss")
MASKS = ("masked_fill", "where", "fill", "full", "full_like", "scatter", "index_put", "scalar_tensor")
SUMS = ("sum", "mean", "add", "sub", "cumsum")
MAXIMA = ("max", "amax", "maximum", "max_pool1d", "max_pool2d", "adaptive_max_pool1d")

ENTRIES = (
    Entry(
        name="mean_of_nothing",
        ops=("mean", "nanmean", "median", "nanmedian"),
        conditions=(is_empty(),),
        why="the mean of no elements is 0 / 0",
        evidence=show_shape(),
        fixes=("x.sum() / max(x.numel(), 1)", "x.mean() if x.numel() else x.sum()", "steadygrad.losses.masked_mean(x)"),
    ),
    Entry(
        name="mean_of_empty_selection",
        ops=("mean", "median"),
        conditions=(is_empty(), comes_from("index", "masked_select", "nonzero")),
        why="the mask selected nothing, and the mean of no elements is 0 / 0",
        evidence=show_shape(),
        fixes=("steadygrad.losses.masked_mean(x, mask)", "(x * mask).sum() / mask.sum().clamp_min(1)"),
    ),
    Entry(
        name="loss_of_nothing",
        ops=(*LOSSES, "binary_cross_entropy_with_logits"),
        phases=FORWARD,
        conditions=(is_empty(),),
        why="the loss is the mean over no elements, 0 / 0",
        evidence=show_shape(),
        fixes=(
            "loss(x, y, reduction='sum') / max(x.numel(), 1)",
            "loss(x, y) if x.numel() else x.sum()",
        ),
    ),
    Entry(
        name="deviation_of_one",
        ops=("std", "var", "std_mean", "var_mean"),
        kinds=("nan",),
        why="the deviation divides by n - correction, which is 0 for one element: 0 / 0",
        evidence=join(show_shape(), show_scalar("correction")),
        fixes=(
            "x.std(0, correction=0)",
            "steadygrad.losses.safe_std(x, dim=0)",
            "x.std(0) if len(x) > 1 else 0 * x[0]",
        ),
    ),
    Entry(
        name="sum_overflow_in_half",
        ops=("sum", "cumsum", "mean"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF),),
        why="the sum exceeds 65504 in float16",
        evidence=show_largest(),
        fixes=("x.sum(dtype=torch.float32)", "x.float().sum()"),
    ),
    Entry(
        name="deviation_overflow_in_half",
        ops=("std", "var", "std_mean", "var_mean"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF),),
        why="the variance exceeds 65504, the largest float16",
        evidence=show_largest(),
        fixes=("x.float().var()", "x.to(torch.bfloat16).var()"),
    ),
    Entry(
        name="product_overflow",
        ops=("prod", "cumprod"),
        why="the product of many numbers above 1 is larger than the dtype can hold",
        evidence=join(show_shape(), show_largest()),
        fixes=("torch.log(x).sum()", "torch.exp(torch.log(x).mean())", "torch.prod(x.clamp(-1.0, 1.0))"),
    ),
    Entry(
        name="maximum_over_masked_row",
        ops=(*MASKS, *SUMS, *MAXIMA),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(
            either(is_op(*MASKS), has_infs()),
            either(goes_to(*MAXIMA), comes_from(*MAXIMA), is_op(*MAXIMA)),
        ),
        why="every element of a row is masked with -inf, so the largest of them is -inf and reaches the loss",
        evidence=count_infs(),
        fixes=(
            "x.masked_fill(~mask, torch.finfo(x.dtype).min).amax(-1)",
            "torch.where(mask.any(-1), x.masked_fill(~mask, -1e4).amax(-1), 0.0)",
        ),
    ),
    Entry(
        name="infinity_written_on_purpose",
        ops=(*MASKS, *SUMS),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(either(is_op(*MASKS), has_infs()),),
        why="an infinity written in the code, such as that of a mask, was used as a number and reached the loss",
        fixes=("x.masked_fill(~mask, 0.0).sum(-1)", "torch.where(mask, x, 0.0).sum(-1)"),
    ),
    Entry(
        name="maximum_of_nothing",
        ops=("max", "min", "amax", "amin", "argmax", "argmin"),
        phases=FORWARD,
        kinds=("error",),
        why="the largest of no elements does not exist",
        evidence=show_shape(),
        fixes=("x.amax() if x.numel() else x.sum()", "torch.cat([x, torch.zeros(1)]).amax()"),
    ),
)
