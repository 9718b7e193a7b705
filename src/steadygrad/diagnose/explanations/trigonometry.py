"""Inverse trigonometric, hyperbolic and error functions at the ends of their range, and the gamma functions."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import comes_from, reaches
from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import join, show_range

ARCS = ("acos", "asin", "arccos", "arcsin")
PRODUCTS = ("sum", "bmm", "mm", "mv", "dot", "linalg_vecdot")

ENTRIES = (
    Entry(
        name="arc_at_one",
        ops=ARCS,
        phases=BACKWARD,
        conditions=(reaches(1.0),),
        why="the derivative of acos and asin is infinite at 1 and -1; clamping to [-1, 1] does not help",
        evidence=show_range(),
        fixes=(
            "torch.acos(x.clamp(-1 + eps, 1 - eps))",
            "steadygrad.losses.safe_acos(x)",
            "math.pi / 2 - steadygrad.losses.safe_asin(x)",
        ),
    ),
    Entry(
        name="arc_out_of_range",
        ops=ARCS,
        phases=FORWARD,
        conditions=(reaches(1.0),),
        why="acos and asin are NaN beyond 1 and -1, where rounding can push a cosine",
        evidence=show_range(),
        fixes=("torch.acos(x.clamp(-1 + eps, 1 - eps))", "steadygrad.losses.safe_acos(x)"),
    ),
    Entry(
        name="angle_between_parallel_vectors",
        ops=("acos", "arccos"),
        conditions=(reaches(1.0), comes_from(*PRODUCTS)),
        why="the cosine of two parallel vectors is 1, where acos has an infinite derivative, or a "
        "rounding error above it",
        evidence=show_range(),
        fixes=(
            "torch.acos(x.clamp(-1 + eps, 1 - eps))",
            "steadygrad.losses.safe_acos(x)",
            "torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(-1))",
        ),
    ),
    Entry(
        name="atan2_near_origin",
        ops=("atan2", "arctan2"),
        phases=BACKWARD,
        why="the derivative of atan2 divides by x**2 + y**2, which underflows near the origin",
        evidence=join(show_range(0), show_range(1)),
        fixes=("torch.atan2(y, torch.where(x.abs() < eps, eps, x))", "steadygrad.losses.safe_atan2(y, x)"),
    ),
    Entry(
        name="acosh_at_one",
        ops=("acosh", "arccosh"),
        phases=BACKWARD,
        why="the derivative of acosh is infinite at 1: the distance of a point from itself in hyperbolic space",
        evidence=show_range(),
        fixes=("torch.acosh(x.clamp_min(1 + eps))", "torch.log(x + torch.sqrt(x.square() - 1 + eps))"),
    ),
    Entry(
        name="acosh_below_one",
        ops=("acosh", "arccosh"),
        phases=FORWARD,
        why="acosh is NaN below 1, where rounding can push a hyperbolic distance",
        evidence=show_range(),
        fixes=("torch.acosh(x.clamp_min(1 + eps))", "torch.acosh(1 + eps + F.relu(x - 1 - eps))"),
    ),
    Entry(
        name="atanh_at_one",
        ops=("atanh", "arctanh"),
        conditions=(reaches(1.0),),
        why="atanh is infinite at 1 and -1 and NaN beyond: an action that was squashed by tanh to "
        "exactly 1 has no preimage",
        evidence=show_range(),
        fixes=("torch.atanh(x.clamp(-1 + eps, 1 - eps))", "torch.atanh(x * (1 - eps))"),
    ),
    Entry(
        name="erfinv_at_one",
        ops=("erfinv", "special_erfinv"),
        conditions=(reaches(1.0),),
        why="erfinv is infinite at 1 and -1 and NaN beyond",
        evidence=show_range(),
        fixes=("torch.erfinv(x.clamp(-1 + eps, 1 - eps))", "torch.erfinv(x * (1 - eps))"),
    ),
    Entry(
        name="normal_quantile_at_bounds",
        ops=("special_ndtri",),
        why="the normal quantile is infinite at 0 and 1 and NaN outside",
        evidence=show_range(),
        fixes=("torch.special.ndtri(x.clamp(eps, 1 - eps))", "torch.special.ndtri(eps + (1 - 2 * eps) * x)"),
    ),
    Entry(
        name="gamma_at_pole",
        ops=("lgamma", "digamma", "polygamma", "mvlgamma", "special_digamma", "special_polygamma"),
        why="the gamma functions have poles at 0 and at the negative whole numbers; concentrations must stay above 0",
        evidence=show_range(),
        fixes=("torch.lgamma(x.clamp_min(eps))", "torch.lgamma(x + eps)", "torch.lgamma(F.softplus(x) + eps)"),
    ),
)
