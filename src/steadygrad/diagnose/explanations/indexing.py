"""Indices outside their table, and selections that hide a bad value instead of avoiding it."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    both,
    either,
    feeds,
    gradient_has_zeros,
    has_negatives,
    has_zeros,
    is_op,
    unless,
)
from steadygrad.diagnose.explanations.entry import FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_negatives, count_zeros, join, show_range, show_shape

SINGULAR = ("sqrt", "log", "log1p", "log2", "log10", "div", "pow")
NOT_FROM_THE_VALUE = both(is_op("log", "log2", "log10"), has_zeros(), unless(has_negatives()))
"""log(0) is -inf: a NaN that was born there came from the derivative, 0 / 0."""

ENTRIES = (
    Entry(
        name="where_computes_both_branches",
        ops=SINGULAR,
        kinds=("nan",),
        conditions=(either(gradient_has_zeros(), feeds("where", "masked_fill", within=2), NOT_FROM_THE_VALUE),),
        why="the result is not used where it is bad, so a gradient of 0 arrives there, and 0 * inf is NaN: "
        "where and masks drop a value, not its derivative",
        evidence=join(count_zeros(-1), count_negatives(-1)),
        fixes=(
            "torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), 0.0)",
            "torch.where(x > 0, x.clamp_min(eps).sqrt(), 0.0)",
        ),
    ),
    Entry(
        name="embedding_out_of_range",
        ops=("embedding", "embedding_bag", "embedding_renorm"),
        phases=FORWARD,
        kinds=("error",),
        why="an index is negative or not below the number of rows of the table: a token that the "
        "vocabulary does not know",
        evidence=join(show_shape(0), show_range(1)),
        fixes=(
            "F.embedding(index.clamp(0, len(table) - 1), table)",
            "F.embedding(torch.where(index < len(table), index, 0), table)",
        ),
    ),
    Entry(
        name="index_out_of_range",
        ops=(
            "index",
            "gather",
            "index_select",
            "scatter",
            "scatter_add",
            "index_put",
            "index_add",
            "take",
            "scatter_reduce",
        ),
        phases=FORWARD,
        kinds=("error",),
        why="an index is not below the size of the dimension that it picks from",
        evidence=join(show_shape(0), show_range(1)),
        fixes=("x[index.clamp(0, len(x) - 1)]", "x[index[index < len(x)]]"),
    ),
    Entry(
        name="label_out_of_range",
        ops=("nll_loss", "nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "cross_entropy_loss"),
        phases=FORWARD,
        kinds=("error",),
        why="a label is not below the number of classes, and not the ignore index",
        evidence=join(show_shape(0), show_range(1)),
        fixes=(
            "F.cross_entropy(x, torch.where(target < x.shape[1], target, -100))",
            "F.cross_entropy(x, target.clamp_max(x.shape[1] - 1))",
        ),
    ),
)
