"""Square roots, powers and norms: infinite slopes at 0, and negative bases."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import (
    COMPLEX,
    HALF,
    comes_from,
    comes_from_backward,
    feeds,
    gradient_has_zeros,
    has_negatives,
    has_scalar,
    has_zeros,
    in_dtype,
    made_by,
    unless,
)
from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_negatives, count_zeros, join, show_largest, show_scalar

CDISTS = ("cdist", "cdist_forward", "euclidean_dist", "pdist", "pdist_forward")

ROOTS = (
    Entry(
        name="sqrt_at_zero",
        ops=("sqrt",),
        phases=BACKWARD,
        why="the derivative of sqrt is infinite at 0; 0 * inf then gives NaN",
        evidence=count_zeros(),
        fixes=("torch.sqrt(x + eps)", "torch.sqrt(x.clamp_min(eps))", "steadygrad.losses.safe_sqrt(x)"),
    ),
    Entry(
        name="scale_of_zeros",
        ops=("sqrt",),
        phases=BACKWARD,
        conditions=(has_zeros(), gradient_has_zeros(), comes_from("mean", "sum"), feeds("add", "div", within=2)),
        why="a row of zeros is divided by its own size: no gradient arrives at the root, whose slope is infinite at 0, "
        "and 0 * inf is NaN; an eps added after the root does not change that slope",
        evidence=count_zeros(),
        fixes=("torch.sqrt(x + eps)", "torch.sqrt(x.clamp_min(eps))", "steadygrad.losses.safe_sqrt(x)"),
    ),
    Entry(
        name="distance_at_zero",
        ops=("sqrt",),
        phases=BACKWARD,
        conditions=(has_zeros(), comes_from("sum")),
        why="the root of a sum of squares has an infinite derivative where all of them are 0: a zero vector, two equal "
        "points, the diagonal of a distance matrix",
        evidence=count_zeros(),
        fixes=(
            "torch.linalg.vector_norm(x, dim=-1)",
            "torch.sqrt(x.square().sum(-1) + eps)",
            "steadygrad.losses.safe_norm(x, dim=-1)",
        ),
    ),
    Entry(
        name="gradient_penalty_at_zero",
        ops=("sqrt",),
        phases=BACKWARD,
        conditions=(has_zeros(), comes_from("sum"), comes_from_backward()),
        why="the norm of a gradient is penalised where that gradient is 0, and the derivative of the root is infinite "
        "there",
        evidence=count_zeros(),
        fixes=(
            "(torch.sqrt(g.square().sum(-1) + eps) - 1).square()",
            "(steadygrad.losses.safe_norm(g, dim=-1) - 1).square()",
            "F.relu(g.square().sum(-1) - 1)",
        ),
    ),
    Entry(
        name="spectrum_magnitude_at_zero",
        ops=("sqrt",),
        phases=BACKWARD,
        conditions=(has_zeros(), comes_from("sum"), comes_from("view_as_real", "fft_r2c", "fft_c2c", "stft")),
        why="the magnitude sqrt(re^2 + im^2) has an infinite derivative where the spectrum is 0, as in silence",
        evidence=count_zeros(),
        fixes=("z.abs()", "torch.sqrt(torch.view_as_real(z).square().sum(-1) + eps)"),
    ),
    Entry(
        name="complex_root_at_zero",
        ops=("sqrt", "pow"),
        phases=BACKWARD,
        conditions=(has_zeros(), in_dtype(*COMPLEX)),
        why="the derivative of a root of a complex number is infinite at 0",
        evidence=count_zeros(),
        fixes=("torch.sqrt(z + eps)", "torch.sqrt(torch.where(z == 0, eps, z))"),
    ),
    Entry(
        name="sqrt_eps_lost_in_half",
        ops=("sqrt",),
        phases=BACKWARD,
        conditions=(has_zeros(), in_dtype(*HALF), made_by("add")),
        why="the derivative of sqrt is infinite at 0: an eps below 3e-8 that is added rounds to 0 in float16",
        evidence=count_zeros(),
        fixes=("torch.sqrt(x + 1e-3)", "steadygrad.losses.safe_sqrt(x)"),
    ),
    Entry(
        name="sqrt_of_negative",
        ops=("sqrt",),
        phases=FORWARD,
        why="sqrt of a negative number is NaN; rounding can push a variance or a squared distance below 0",
        evidence=count_negatives(),
        fixes=("torch.sqrt(x.clamp_min(eps))", "steadygrad.losses.safe_sqrt(x)"),
    ),
    Entry(
        name="rsqrt_at_zero",
        ops=("rsqrt",),
        conditions=(has_zeros(),),
        why="1 / sqrt(x) is infinite at 0",
        evidence=count_zeros(),
        fixes=("torch.rsqrt(x + eps)", "torch.rsqrt(x.clamp_min(eps))"),
    ),
    Entry(
        name="rsqrt_of_negative",
        ops=("rsqrt",),
        conditions=(has_negatives(),),
        why="1 / sqrt(x) of a negative number is NaN",
        evidence=count_negatives(),
        fixes=("torch.rsqrt(x.clamp_min(eps))", "steadygrad.losses.safe_sqrt(x).clamp_min(eps).reciprocal()"),
    ),
    Entry(
        name="rsqrt_slope_overflow",
        ops=("rsqrt",),
        phases=BACKWARD,
        why="the derivative of 1 / sqrt(x) is x**-1.5 / 2, too large to hold for a tiny x",
        evidence=show_largest(),
        fixes=("torch.rsqrt(x + eps)", "torch.rsqrt(x.clamp_min(eps))"),
    ),
    Entry(
        name="hypot_at_zero",
        ops=("hypot",),
        phases=BACKWARD,
        why="the derivative of hypot is x / hypot(x, y): 0 / 0 at the origin",
        evidence=count_zeros(),
        fixes=(
            "torch.sqrt(x.square() + y.square() + eps)",
            "torch.linalg.vector_norm(torch.stack([x, y]), dim=0)",
            "steadygrad.losses.safe_norm(torch.stack([x, y]), dim=0)",
        ),
    ),
    Entry(
        name="second_derivative_of_norm_at_zero",
        ops=("linalg_vector_norm", "norm"),
        phases=BACKWARD,
        why="torch takes the first derivative of a norm as 0 at 0, and the second is 0 / 0 there",
        evidence=count_zeros(),
        fixes=("steadygrad.losses.safe_norm(x, dim=-1)", "torch.sqrt(x.square().sum(-1) + eps)"),
    ),
    Entry(
        name="norm_overflow_in_half",
        ops=("linalg_vector_norm", "norm"),
        phases=FORWARD,
        conditions=(in_dtype(*HALF),),
        why="the norm of many float16 numbers exceeds 65504",
        evidence=show_largest(),
        fixes=("torch.linalg.vector_norm(x, dtype=torch.float32)", "x.float().norm()"),
    ),
)

DISTANCES = (
    Entry(
        name="norm_overflow",
        ops=("linalg_vector_norm", "norm"),
        phases=FORWARD,
        kinds=("inf",),
        # 1.8e19 is the root of 3.4e38, the largest float32; 255.9 that of 65504, the largest float16
        why="a norm squares its elements, and squares of anything above 1.8e19 leave the range of float32",
        evidence=show_largest(),
        fixes=(
            "steadygrad.losses.safe_norm(x, dim=-1)",
            "torch.linalg.vector_norm(x.clamp(-1e6, 1e6), dim=-1)",
        ),
    ),
    Entry(
        name="distance_overflow",
        ops=CDISTS,
        phases=FORWARD,
        why="a distance squares differences, and squares of anything above 1.8e19 leave the range of float32",
        evidence=show_largest(0, 1),
        fixes=("torch.cdist(x / scale, y / scale)", "torch.cdist(x.clamp(-1e6, 1e6), y.clamp(-1e6, 1e6))"),
    ),
    Entry(
        name="inverse_distance_at_zero",
        ops=("reciprocal", "div"),
        conditions=(has_zeros(-1), comes_from(*CDISTS)),
        why="the distance of a point from itself, or from an equal one, is 0, and it is divided by",
        evidence=count_zeros(-1),
        fixes=("1 / (torch.cdist(x, y) + eps)", "1 / torch.cdist(x, y).clamp_min(eps)"),
    ),
)

POWERS = (
    Entry(
        name="fractional_power_at_zero",
        ops=("pow", "float_power"),
        phases=BACKWARD,
        conditions=(has_scalar("exponent", lambda p: 0 < p < 1),),
        why="the derivative p * x**(p - 1) is infinite at 0 when p is below 1",
        evidence=join(show_scalar("exponent"), count_zeros()),
        fixes=("(x + eps) ** p", "x.clamp_min(eps) ** p"),
    ),
    Entry(
        name="power_of_negative",
        ops=("pow", "float_power"),
        phases=FORWARD,
        conditions=(has_negatives(),),
        kinds=("nan",),
        why="a negative number has no real power with an exponent that is not a whole number",
        evidence=join(show_scalar("exponent"), count_negatives()),
        fixes=("x.clamp_min(eps) ** p", "torch.sign(x) * (x.abs() + eps) ** p"),
    ),
    Entry(
        name="negative_power_at_zero",
        ops=("pow", "float_power"),
        conditions=(has_zeros(), has_scalar("exponent", lambda p: p < 0)),
        why="a negative power is a division by x, infinite at 0",
        evidence=join(show_scalar("exponent"), count_zeros()),
        fixes=("(x + eps) ** p", "x.clamp_min(eps) ** p"),
    ),
    Entry(
        name="power_overflow",
        ops=("pow", "float_power"),
        phases=FORWARD,
        kinds=("inf",),
        why="the power is larger than the dtype can hold",
        evidence=join(show_scalar("exponent"), show_largest()),
        fixes=("x.clamp(-10.0, 10.0) ** p", "p * torch.log(x)"),
    ),
    Entry(
        name="square_overflow_in_half",
        ops=("pow",),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF), has_scalar("exponent", lambda p: p >= 2)),
        why="the square of anything above 255.9 is too large for float16",
        evidence=show_largest(),
        fixes=("x.float().square()", "x.to(torch.bfloat16).square()", "(x / 64).square()"),
    ),
    Entry(
        name="learned_power_at_zero",
        ops=("pow",),
        phases=BACKWARD,
        conditions=(has_zeros(0), unless(has_scalar("exponent", lambda _: True))),
        why="the derivative y * x**(y - 1) is infinite at x = 0 where y is below 1",
        evidence=count_zeros(),
        fixes=("x.clamp_min(eps) ** y", "torch.exp(y * steadygrad.losses.safe_log(x))"),
    ),
    Entry(
        name="learned_power_of_negative",
        ops=("pow",),
        phases=BACKWARD,
        conditions=(has_negatives(0), unless(has_scalar("exponent", lambda _: True))),
        kinds=("nan",),
        why="the derivative by the exponent is x**y * log(x), and log of a negative base is NaN",
        evidence=count_negatives(),
        fixes=("x ** y.detach()", "x.clamp_min(eps) ** y"),
    ),
    Entry(
        name="power_of_negative_constant",
        ops=("pow",),
        phases=BACKWARD,
        conditions=(has_scalar("self", lambda base: base < 0),),
        why="the derivative of b**y is b**y * log(b), and log of a negative b is NaN",
        evidence=show_scalar("self"),
        fixes=("torch.pow(abs(b), y)", "torch.pow(b, y.detach())"),
    ),
)

ENTRIES = ROOTS + DISTANCES + POWERS
