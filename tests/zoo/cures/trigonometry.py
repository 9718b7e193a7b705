"""Cures for inverse functions at the limits of their range."""

from __future__ import annotations

import torch

from .cure import Cure, t

POSITIVE = "makes any number positive first"

CURES = {
    "arc_at_one": Cure(
        broken="torch.acos(x)",
        also=(
            "torch.asin(x)",
            "torch.arccos(x)",
        ),
        sick={"x": t(1, 0.5, -1)},
        healthy={"x": t(0.1, 0.5, -0.9)},
    ),
    "arc_out_of_range": Cure(
        broken="torch.acos(x)", also=("torch.asin(x)",), sick={"x": t(1.001, 0.5)}, healthy={"x": t(0.1, 0.5)}
    ),
    "angle_between_parallel_vectors": Cure(
        broken="torch.acos(x)",
        sick={"a": torch.tensor([[1.0, 0, 0], [0, 1, 0]]), "b": torch.tensor([[1.0, 0, 0], [0, 0.6, 0.8]])},
        healthy={"a": torch.tensor([[0.8, 0.6, 0], [0, 1, 0]])},
        learned=("a",),
        derive=lambda names: {"x": (names["a"] * names["b"]).sum(-1)},
        differs={
            "torch.atan2(torch.linalg.cross(a, b).norm(dim=-1), (a * b).sum(-1))": "has the same angle, and a "
            "gradient that does not stretch a, which acos of a product of unit vectors lets happen"
        },
    ),
    "atan2_near_origin": Cure(
        broken="torch.atan2(y, x)",
        sick={"x": t(1e-22, 1), "y": t(1e-20, 2)},
        healthy={"x": t(2, 1)},
        learned=("x", "y"),
    ),
    "acosh_at_one": Cure(broken="torch.acosh(x)", sick={"x": t(1, 2)}, healthy={"x": t(3, 2)}),
    "acosh_below_one": Cure(broken="torch.acosh(x)", sick={"x": t(0.999, 2)}, healthy={"x": t(3, 2)}),
    "atanh_at_one": Cure(
        broken="torch.atanh(x)", also=("torch.atanh(x * 1.5)",), sick={"x": t(1, 0.5)}, healthy={"x": t(0.1, 0.5)}
    ),
    "erfinv_at_one": Cure(
        broken="torch.erfinv(x)",
        also=(
            "torch.erfinv(x * 1.5)",
            "torch.special.erfinv(x)",
        ),
        sick={"x": t(1, 0.5)},
        healthy={"x": t(0.1, 0.5)},
    ),
    "normal_quantile_at_bounds": Cure(
        broken="torch.special.ndtri(x)", sick={"x": t(0, 0.5, 1)}, healthy={"x": t(0.1, 0.5, 0.9)}
    ),
    "gamma_at_pole": Cure(
        broken="torch.lgamma(x)",
        also=(
            "torch.digamma(x)",
            "torch.polygamma(1, x)",
        ),
        sick={"x": t(0, 0.5)},
        healthy={"x": t(1, 0.5)},
        differs={"torch.lgamma(F.softplus(x) + eps)": POSITIVE},
    ),
}
