"""Values that were bad before any op ran: in the batch, in a weight, in memory that was never written."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import is_named
from steadygrad.diagnose.explanations.entry import FORWARD, STEP, Entry
from steadygrad.diagnose.explanations.evidence import count_nonfinite

DROP = "drop its samples that are not finite"
WITHOUT_NAN = ("replace its NaN with torch.nan_to_num", DROP, "fill its NaN with the mean of their column")
WITHOUT_INF = ("bound it with torch.clamp", DROP)

ENTRIES = (
    Entry(
        name="batch_with_nan",
        phases=("input",),
        kinds=("nan",),
        why="the batch held NaN before any op ran: a missing value, or a normalisation of a constant column",
        evidence=count_nonfinite(),
        fixes=(
            "torch.nan_to_num(x)",
            "x[torch.isfinite(x).flatten(1).all(1)]",
            "torch.where(torch.isnan(x), x.nanmean(0), x)",
        ),
        advice=WITHOUT_NAN,
    ),
    Entry(
        name="outside_tensor_with_nan",
        ops=("outside",),
        phases=("input",),
        kinds=("nan",),
        why="a tensor that the step uses and does not make held NaN before any op ran",
        evidence=count_nonfinite(),
        fixes=("torch.nan_to_num(x)", "torch.where(torch.isfinite(x), x, 0.0)"),
        advice=WITHOUT_NAN[:1],
    ),
    Entry(
        name="batch_with_inf",
        phases=("input",),
        kinds=("inf",),
        why="the batch held Inf before any op ran: a log or a division in the data pipeline, or a cast to float16",
        evidence=count_nonfinite(),
        fixes=("x.clamp(-1e4, 1e4)", "x[torch.isfinite(x).flatten(1).all(1)]"),
        advice=WITHOUT_INF,
    ),
    Entry(
        name="outside_tensor_with_inf",
        ops=("outside",),
        phases=("input",),
        kinds=("inf",),
        why="a tensor that the step uses and does not make held Inf before any op ran",
        evidence=count_nonfinite(),
        fixes=("x.clamp(-1e4, 1e4)", "torch.where(torch.isfinite(x), x, 0.0)"),
        advice=WITHOUT_INF[:1],
    ),
    Entry(
        name="weight_not_finite",
        phases=("parameter",),
        why="a weight held NaN or Inf before the step: an earlier step or the checkpoint wrote it, and no "
        "skip can heal it",
        evidence=count_nonfinite(),
        fixes=("layer.load_state_dict(last_good)", "layer.reset_parameters()"),
    ),
    Entry(
        name="other_weight_not_finite",
        ops=("outside",),
        phases=("parameter",),
        why="a weight of another network that the step uses held NaN or Inf before the step: the checkpoint that "
        "it was loaded from or the code that updates it wrote it, and no skip can heal it",
        evidence=count_nonfinite(),
        fixes=("network.load_state_dict(last_good)", "network.load_state_dict(model.state_dict())"),
    ),
    Entry(
        name="running_statistics_not_finite",
        phases=("parameter",),
        conditions=(is_named("running_mean", "running_var"),),
        why="the running statistics of a normalisation hold NaN or Inf: one forward with a bad batch is enough, "
        "even when its step was skipped",
        evidence=count_nonfinite(),
        fixes=("layer.reset_running_stats()", "layer.load_state_dict(last_good)"),
    ),
    Entry(
        name="nan_written_on_purpose",
        ops=("full", "full_like", "fill", "masked_fill", "where", "new_full"),
        phases=FORWARD,
        kinds=("nan",),
        why="a NaN written in the code, as a placeholder for a missing value, was used as a number",
        fixes=("torch.nan_to_num(constant)", "torch.zeros_like(constant)"),
    ),
    Entry(
        name="made_outside_of_torch",
        ops=("lift_fresh", "given"),
        phases=STEP,
        why="the numbers that became a tensor here were already non-finite: placeholders for missing values, or "
        "results of Python or numpy",
        fixes=(
            "torch.nan_to_num(constant, posinf=1e4, neginf=-1e4)",
            "torch.where(torch.isfinite(constant), constant, 0.0)",
        ),
    ),
    Entry(
        name="uninitialised_memory",
        ops=("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize"),
        phases=(*FORWARD, "backward", "parameter", "input"),
        why="torch.empty holds whatever was in memory, NaN at times, and part of it was never written",
        fixes=("torch.zeros_like(x)", "torch.full_like(x, 0.0)"),
    ),
)
