"""Divisions by 0: by an empty mask, a zero vector, a constant row, an eps that is 0 in float16; and 0 * inf."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    HALF,
    comes_from,
    either,
    has_infs,
    has_scalar,
    has_zeros,
    in_dtype,
    in_module,
    unless,
)
from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, Condition, Entry
from steadygrad.diagnose.explanations.evidence import count_infs, count_zeros, join, show_range

NORMS = ("linalg_vector_norm", "norm", "linalg_norm")
DEVIATIONS = ("std", "var", "std_mean", "var_mean")
SEGMENTS = ("index_add", "scatter_add", "scatter_reduce", "bincount", "index_reduce")
LINKS = ("relu", "exp", "softplus", "sigmoid")
NEAR = 4
"""Ops before an op, without views: those that made its operand, and those before them."""
EXTREMES = ("amax", "max", "amin", "min", "aminmax")


def divisor_from(*ops: str, within: int | None = None) -> Condition:
    """Whether one of these is among the ops that made the divisor: what made the dividend is not the reason."""
    return comes_from(*ops, within=within, key=1)


BY_ZERO = (
    Entry(
        name="division_by_zero",
        ops=("div", "true_divide", "divide"),
        conditions=(has_zeros(1),),
        why="a division by 0 gives inf, and 0 / 0 gives NaN",
        evidence=count_zeros(1),
        fixes=("x / (y + eps)", "x / y.clamp_min(eps)", "steadygrad.losses.safe_div(x, y)"),
    ),
    Entry(
        name="division_by_empty_sum",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from("sum", "count_nonzero", within=NEAR)),
        why="the divisor is 0, as the sum of a mask that selects nothing is, or of a row of zeros",
        evidence=count_zeros(1),
        fixes=(
            "(x * mask).sum(-1) / mask.sum(-1).clamp_min(1)",
            "steadygrad.losses.masked_mean(x, mask, dim=-1)",
            "steadygrad.losses.safe_div((x * mask).sum(-1), mask.sum(-1))",
        ),
    ),
    Entry(
        name="division_by_empty_segment",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from(*SEGMENTS, within=NEAR)),
        why="a segment received no element, so its count is 0",
        evidence=count_zeros(1),
        fixes=(
            "total / count.clamp_min(1)",
            "steadygrad.losses.safe_div(total, count)",
        ),
    ),
    Entry(
        name="division_by_norm_of_zero",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from(*NORMS)),
        why="the vector is all zeros: it has no direction, and 0 / 0 is NaN",
        evidence=count_zeros(1),
        fixes=(
            "F.normalize(x, dim=-1)",
            "x / x.norm(dim=-1, keepdim=True).clamp_min(eps)",
            "steadygrad.losses.safe_normalize(x, dim=-1)",
        ),
    ),
    Entry(
        name="normalize_in_half",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from(*NORMS), divisor_from("clamp_min", "clamp"), in_dtype(*HALF)),
        why="the guard eps = 1e-12 (1e-8 in cosine_similarity) is 0 in float16, so a zero vector gives 0 / 0",
        evidence=count_zeros(1),
        fixes=("F.normalize(x, dim=-1, eps=1e-4)", "steadygrad.losses.safe_normalize(x, dim=-1)"),
    ),
    Entry(
        name="eps_lost_in_half",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from("add", within=NEAR), in_dtype(*HALF)),
        # 3e-8 is half of 2**-24, the smallest float16; so in all entries about a lost eps.
        why="the divisor is 0 in float16: an eps below 3e-8 that is added to it rounds to 0",
        evidence=count_zeros(1),
        fixes=("x / (y + 1e-2)", "x / y.clamp_min(1e-3)", "steadygrad.losses.safe_div(x, y)"),
    ),
    Entry(
        name="division_by_activation_of_zero",
        ops=("div",),
        phases=FORWARD,
        conditions=(has_zeros(1), divisor_from(*LINKS, within=NEAR)),
        why="the divisor comes from relu, exp, softplus or sigmoid, which give exactly 0 far below 0",
        evidence=count_zeros(1),
        fixes=("x / (y + eps)", "x / y.clamp_min(eps)", "steadygrad.losses.safe_div(x, y)"),
    ),
    Entry(
        name="division_by_zero_in_half",
        ops=("div",),
        conditions=(has_zeros(1), in_dtype(*HALF)),
        why="the divisor is 0 in float16, where anything below 3e-8 is; its derivative overflows far above that",
        evidence=count_zeros(1),
        fixes=("x / y.clamp_min(1e-2)", "steadygrad.losses.safe_div(x, y)"),
    ),
    Entry(
        name="division_by_deviation_of_constant",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from(*DEVIATIONS, within=NEAR)),
        why="all values are equal, so their deviation is 0",
        evidence=count_zeros(1),
        fixes=(
            "(x - x.mean()) / (x.std() + eps)",
            "(x - x.mean()) / x.std().clamp_min(eps)",
            "(x - x.mean()) / (steadygrad.losses.safe_std(x) + eps)",
        ),
    ),
    Entry(
        name="division_by_largest_of_zeros",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from(*EXTREMES, within=NEAR)),
        why="the divisor is the largest or smallest of a row, and that is 0: a row of zeros",
        evidence=count_zeros(1),
        fixes=(
            "x / x.abs().amax(-1, keepdim=True).clamp_min(eps)",
            "steadygrad.losses.safe_div(x, x.abs().amax(-1, keepdim=True))",
        ),
    ),
    Entry(
        name="division_by_range_of_constant",
        ops=("div",),
        conditions=(has_zeros(1), divisor_from("sub", within=NEAR), divisor_from(*EXTREMES)),
        why="all values are equal, so max - min is 0",
        evidence=count_zeros(1),
        fixes=(
            "(x - x.min()) / (x.max() - x.min() + eps)",
            "steadygrad.losses.safe_div(x - x.min(), x.max() - x.min())",
        ),
    ),
    Entry(
        name="spectral_norm_of_zero",
        ops=("div",),
        conditions=(has_zeros(1), in_module("_SpectralNorm", "SpectralNorm")),
        why="spectral norm divides by the largest singular value, which is 0 for a weight of zeros",
        evidence=count_zeros(1),
        fixes=(
            "nn.init.orthogonal_(layer.parametrizations.weight.original)",
            "nn.init.normal_(layer.parametrizations.weight.original, std=0.02)",
        ),
    ),
    Entry(
        name="division_by_zero_count",
        ops=("div",),
        conditions=(has_scalar("other", lambda n: n == 0),),
        why="the divisor is the number 0: a count of nothing, n - 1 of one observation, or a temperature",
        fixes=("x / max(n, 1)", "x / n if n else 0 * x"),
    ),
    Entry(
        name="reciprocal_at_zero",
        ops=("reciprocal",),
        why="1 / 0 is infinite",
        evidence=count_zeros(),
        fixes=("1 / (x + eps)", "x.clamp_min(eps).reciprocal()", "steadygrad.losses.safe_div(torch.ones_like(x), x)"),
    ),
    Entry(
        name="addcdiv_by_zero",
        ops=("addcdiv",),
        phases=FORWARD,
        why="addcdiv divides by its second tensor, which holds 0",
        evidence=count_zeros(2),
        fixes=("torch.addcdiv(x, y, z.clamp_min(eps))", "x + steadygrad.losses.safe_div(y, z)"),
    ),
    Entry(
        name="remainder_by_zero",
        ops=("remainder", "fmod"),
        why="the remainder of a division by 0 is NaN",
        evidence=count_zeros(1),
        fixes=("torch.remainder(x, y.clamp_min(eps))", "torch.remainder(x, torch.where(y == 0, 1.0, y))"),
    ),
    Entry(
        name="division_slope_overflow",
        ops=("div", "reciprocal"),
        phases=BACKWARD,
        # -1 is the divisor of both: the second operand of div, the only one of reciprocal.
        conditions=(unless(has_zeros(-1)),),
        why="the derivative -x / y**2 of a division is too large to hold for a tiny divisor",
        evidence=show_range(-1),
        fixes=("x / (y + eps)", "x / y.clamp_min(eps)", "x / y.detach()"),
    ),
)

INFINITIES = (
    Entry(
        name="zero_times_infinity",
        ops=("mul",),
        kinds=("nan",),
        conditions=(either(has_infs(0), has_infs(1)),),
        why="0 * inf is NaN: multiplying with a mask does not remove an infinity",
        evidence=join(count_infs(0), count_infs(1), count_zeros(0), count_zeros(1)),
        fixes=("torch.where(mask, x, 0.0)", "x.masked_fill(~mask, 0.0)"),
    ),
    Entry(
        name="target_over_masked_class",
        ops=("mul",),
        kinds=("nan",),
        conditions=(either(has_infs(0), has_infs(1)), comes_from("log_softmax")),
        why="a masked class has log-probability -inf and target 0, and 0 * -inf is NaN",
        evidence=join(count_infs(0), count_infs(1)),
        fixes=(
            "F.cross_entropy(x.masked_fill(~mask, -1e4), target)",
            "-(target * F.log_softmax(x.masked_fill(~mask, -torch.inf), -1).masked_fill(~mask, 0.0)).sum(-1).mean()",
        ),
    ),
    Entry(
        name="shift_by_masked_maximum",
        ops=("sub",),
        kinds=("nan",),
        conditions=(either(has_infs(0), has_infs(1)), comes_from("amax", "max", within=NEAR)),
        why="every element of a row is -inf and so is the largest: x - max(x) is -inf + inf, NaN",
        evidence=join(count_infs(0), count_infs(1)),
        fixes=(
            "x.masked_fill(~mask, -1e4) - x.masked_fill(~mask, -1e4).amax(-1, keepdim=True)",
            "steadygrad.losses.safe_log_softmax(x, dim=-1, mask=mask)",
        ),
    ),
    Entry(
        name="infinity_minus_infinity",
        ops=("sub", "add", "rsub"),
        kinds=("nan",),
        conditions=(either(has_infs(0), has_infs(1)),),
        why="inf - inf is NaN",
        evidence=join(count_infs(0), count_infs(1)),
        fixes=(
            "x.clamp(-1e30, 1e30) - y.clamp(-1e30, 1e30)",
            "torch.where(torch.isfinite(x), x, 0.0) - torch.where(torch.isfinite(y), y, 0.0)",
        ),
    ),
)

ENTRIES = BY_ZERO + INFINITIES
