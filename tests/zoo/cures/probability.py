"""Cures for distributions."""

from __future__ import annotations

import torch

from .cure import Cure, t

CURES = {
    "dirichlet_with_tiny_concentration": Cure(
        broken="torch.distributions.Dirichlet(x).rsample()", sick={"x": torch.full((100,), 1e-30)}
    ),
    "scale_of_zero": Cure(
        broken="(0.5 * (torch.log(F.relu(x)) + (target - mean).square() / F.relu(x))).mean()",
        sick={"x": t(-1, 2), "mean": t(1, 2), "target": t(2, 4)},
        healthy={"x": t(1, 2)},
        learned=("x", "mean"),
        differs={"F.gaussian_nll_loss(mean, target, F.softplus(x) + eps)": "has another link from x to the variance"},
    ),
    "sampling_from_nothing": Cure(broken="torch.multinomial(x, 1)", sick={"x": t(0, 0, 0)}, learned=()),
}
