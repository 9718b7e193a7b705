"""Distributions at the edge of their parameters."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import has_zeros, made_by
from steadygrad.diagnose.explanations.entry import FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import count_zeros, show_range

ENTRIES = (
    Entry(
        name="dirichlet_with_tiny_concentration",
        ops=("sample_dirichlet", "dirichlet_grad", "standard_gamma"),
        why="samples of a Dirichlet or gamma distribution underflow to 0 for a tiny concentration, and so "
        "does the divisor of their derivative",
        evidence=show_range(),
        fixes=(
            "torch.distributions.Dirichlet(x.clamp_min(0.1)).rsample()",
            "torch.distributions.Dirichlet(F.softplus(x) + 0.1).rsample()",
        ),
    ),
    Entry(
        name="scale_of_zero",
        ops=("log",),
        phases=FORWARD,
        conditions=(has_zeros(), made_by("relu", "exp", "softplus")),
        why="relu, exp or softplus gave exactly 0, for a scale or variance perhaps, and log(0) is -inf",
        evidence=count_zeros(),
        fixes=(
            "F.gaussian_nll_loss(mean, target, F.relu(x))",
            "F.gaussian_nll_loss(mean, target, F.softplus(x) + eps)",
        ),
    ),
    Entry(
        name="sampling_from_nothing",
        ops=("multinomial",),
        phases=FORWARD,
        kinds=("error",),
        why="multinomial needs probabilities that are finite, not negative and not all 0",
        evidence=show_range(),
        fixes=("torch.multinomial(x + eps, 1)", "torch.multinomial(torch.softmax(x, dim=-1), 1)"),
    ),
)
