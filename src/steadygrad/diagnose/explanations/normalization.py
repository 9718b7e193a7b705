"""Normalisation layers without a spread to divide by, and hand-written versions of them in float16."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    HALF,
    comes_from,
    goes_to,
    has_negatives,
    has_scalar,
    has_zeros,
    in_dtype,
    reaches,
)
from steadygrad.diagnose.explanations.entry import FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_negatives, count_zeros, show_largest, show_range, show_shape

LAYERS = ("native_layer_norm", "layer_norm", "native_group_norm", "group_norm", "rms_norm", "fused_rms_norm")
BATCHES = (
    "native_batch_norm",
    "batch_norm",
    "cudnn_batch_norm",
    "batch_norm_with_update",
    "native_batch_norm_legit",
    "instance_norm",
)

ENTRIES = (
    Entry(
        name="layer_norm_without_eps",
        ops=LAYERS,
        conditions=(has_scalar("eps", lambda eps: eps == 0),),
        why="the row is constant, its variance 0, and eps is 0: 0 / 0",
        evidence=show_range(),
        fixes=("F.layer_norm(x, x.shape[-1:], eps=1e-5)", "nn.LayerNorm(x.shape[-1])(x)"),
    ),
    Entry(
        name="normalization_overflow",
        ops=(*LAYERS, *BATCHES),
        phases=FORWARD,
        conditions=(reaches(1e15),),
        why="the squares of the input leave the range of the dtype, so the variance is Inf",
        evidence=show_largest(),
        fixes=(
            "F.layer_norm(x / x.abs().amax().clamp_min(1.0), x.shape[-1:])",
            "F.layer_norm(x.clamp(-1e6, 1e6), x.shape[-1:])",
        ),
    ),
    Entry(
        name="running_variance_below_zero",
        ops=BATCHES,
        phases=FORWARD,
        conditions=(has_negatives("running_var"),),
        why="a running variance is negative, and the root of it NaN: a checkpoint that was averaged or edited",
        evidence=count_negatives("running_var"),
        fixes=(
            "F.batch_norm(x, running_mean, running_var.clamp_min(0.0))",
            "F.batch_norm(x, None, None, training=True)",
        ),
    ),
    Entry(
        name="batch_norm_of_one_sample",
        ops=BATCHES,
        phases=FORWARD,
        kinds=("error",),
        why="one value per channel has no variance; the last batch of an epoch is often that small",
        evidence=show_shape(),
        fixes=(
            "F.batch_norm(x, running_mean, running_var, training=len(x) > 1)",
            "F.group_norm(x, 1)",
            "torch.utils.data.DataLoader(data, batch_size=2, drop_last=True)",
        ),
    ),
    Entry(
        name="batch_variance_of_one_sample",
        ops=("var", "std", "var_mean", "std_mean"),
        phases=FORWARD,
        kinds=("nan",),
        conditions=(goes_to("add", "add_"), goes_to("sqrt", "rsqrt")),
        why="a normalisation by hand takes the variance of one sample with n - 1 = 0: 0 / 0",
        evidence=show_shape(),
        fixes=(
            "(x - x.mean(0)) / torch.sqrt(x.var(0, correction=0) + eps)",
            "F.layer_norm(x, x.shape[-1:])",
        ),
    ),
    Entry(
        name="weight_norm_of_zero",
        ops=("weight_norm_interface", "weight_norm"),
        why="weight norm divides by the norm of the weight, and a row of it is 0: 0 / 0",
        evidence=show_range(),
        fixes=(
            "nn.init.orthogonal_(layer.parametrizations.weight.original1)",
            "nn.init.normal_(layer.parametrizations.weight.original1, std=0.02)",
        ),
    ),
    Entry(
        name="rms_norm_eps_lost_in_half",
        ops=("rsqrt",),
        conditions=(has_zeros(), in_dtype(*HALF), comes_from("add", "mean")),
        why="the mean square of a small row, and an eps below 3e-8, are 0 in float16",
        evidence=count_zeros(),
        fixes=(
            "(x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-8)).to(x.dtype)",
            "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)",
            "F.rms_norm(x, x.shape[-1:], eps=1e-5)",
        ),
    ),
)
