"""Values that were bad before any op ran: in the batch, in a weight, in memory that was never written."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import is_named
from steadygrad.diagnose.explanations.entry import FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_nonfinite

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
    ),
    Entry(
        name="batch_with_inf",
        phases=("input",),
        kinds=("inf",),
        why="the batch held Inf before any op ran: a log or a division in the data pipeline, or a cast to float16",
        evidence=count_nonfinite(),
        fixes=("x.clamp(-1e4, 1e4)", "x[torch.isfinite(x).flatten(1).all(1)]"),
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
        ops=("lift_fresh", "given", "full", "full_like", "fill", "masked_fill", "where", "new_full"),
        phases=FORWARD,
        kinds=("nan",),
        why="a NaN that stands in the code, for what is missing, was used as a number",
        fixes=("torch.nan_to_num(constant)", "torch.zeros_like(constant)"),
    ),
    Entry(
        name="uninitialised_memory",
        ops=("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize"),
        phases=(*FORWARD, "backward", "parameter", "input"),
        why="torch.empty holds whatever was in memory, NaN at times, and part of it was never written",
        fixes=("torch.zeros_like(x)", "torch.full_like(x, 0.0)"),
    ),
)
