"""Cures for square roots, powers and norms."""

from __future__ import annotations

import torch

from .cure import CONSTANT, Cure, Names, half, t

IN_LOGS = "stays in logarithms"


def penalised(names: Names) -> Names:
    """Return the gradient of a small critic, kept in the graph."""
    x = names["x"]
    (g,) = torch.autograd.grad(torch.tanh(x).square().sum(), x, create_graph=True)
    return {"g": g}


def slope_of_norm(result: torch.Tensor, names: Names) -> torch.Tensor:
    (g,) = torch.autograd.grad(result.sum(), names["x"], create_graph=True)
    return g


def as_scale(result: torch.Tensor, names: Names) -> torch.Tensor:
    return names["y"] / (result + 1e-6)


CURES = {
    "scale_of_zeros": Cure(
        broken="torch.sqrt(x)",
        sick={"y": torch.tensor([[0.0, 0, 0], [1, 2, 3]])},
        healthy={"y": torch.tensor([[2.0, 0, 0], [1, 2, 3]])},
        learned=("y",),
        derive=lambda names: {"x": names["y"].square().mean(-1, keepdim=True)},
        apply=as_scale,
    ),
    "sqrt_at_zero": Cure(
        broken="torch.sqrt(x)",
        also=(
            "x.sqrt()",
            "x.clone().sqrt_()",
        ),
        sick={"x": t(0, 1, 4)},
        healthy={"x": t(2, 1, 4)},
    ),
    "distance_at_zero": Cure(
        broken="torch.sqrt(x.square().sum(-1))",
        also=(
            "torch.sqrt(((x[:, None] - x[None]) ** 2).sum(-1))",
            "torch.sqrt(torch.sum(x * x, dim=1))",
        ),
        sick={"x": torch.tensor([[0.0, 0, 0], [1, 2, 3]])},
        healthy={"x": torch.tensor([[2.0, 0, 0], [1, 2, 3]])},
    ),
    "gradient_penalty_at_zero": Cure(
        broken="(torch.sqrt(g.square().sum(-1)) - 1).square()",
        sick={"x": torch.tensor([[0.0, 0.0], [0.3, 0.2]])},
        healthy={"x": torch.tensor([[0.1, 0.4], [0.3, 0.2]])},
        derive=penalised,
        differs={"F.relu(g.square().sum(-1) - 1)": "a one-sided penalty on the square"},
    ),
    "spectrum_magnitude_at_zero": Cure(
        broken="torch.sqrt(torch.view_as_real(torch.fft.rfft(x)).square().sum(-1))",
        sick={"x": torch.zeros(8)},
        healthy={"x": torch.arange(8.0).sin()},
        derive=lambda names: {"z": torch.fft.rfft(names["x"])},
    ),
    "complex_root_at_zero": Cure(
        broken="torch.sqrt(z)",
        sick={"z": torch.tensor([0, 1 + 1j], dtype=torch.complex64)},
        healthy={"z": torch.tensor([2j, 1 + 1j], dtype=torch.complex64)},
        learned=("z",),
    ),
    "sqrt_eps_lost_in_half": Cure(
        broken="torch.sqrt(x + 1e-8)", sick={"x": half(0, 1)}, healthy={"x": half(2, 1)}, tolerance=1e-2
    ),
    "sqrt_of_negative": Cure(broken="torch.sqrt(x)", sick={"x": t(-1e-7, 1, 4)}, healthy={"x": t(2, 1, 4)}),
    "rsqrt_at_zero": Cure(broken="torch.rsqrt(x)", sick={"x": t(0, 1, 4)}, healthy={"x": t(2, 1, 4)}),
    "rsqrt_of_negative": Cure(broken="torch.rsqrt(x)", sick={"x": t(-1e-7, 1, 4)}, healthy={"x": t(2, 1, 4)}),
    "rsqrt_slope_overflow": Cure(broken="torch.rsqrt(x)", sick={"x": t(1e-30, 1, 4)}, healthy={"x": t(2, 1, 4)}),
    "hypot_at_zero": Cure(
        broken="torch.hypot(x, y)",
        sick={"x": t(0, 1), "y": t(0, 2)},
        healthy={"x": t(3, 1)},
        learned=("x", "y"),
    ),
    "second_derivative_of_norm_at_zero": Cure(
        broken="torch.linalg.vector_norm(x, dim=-1)",
        sick={"x": torch.zeros(2, 3)},
        healthy={"x": torch.tensor([[1.0, 2, 3], [2, 0, 1]])},
        apply=slope_of_norm,
    ),
    "norm_overflow_in_half": Cure(
        broken="torch.linalg.vector_norm(x)",
        also=(
            "x.norm()",
            "torch.linalg.norm(x)",
        ),
        sick={"x": torch.full((60000,), 300.0, dtype=torch.float16)},
        healthy={"x": torch.full((600,), 3.0, dtype=torch.float16)},
    ),
    "norm_overflow": Cure(
        broken="torch.linalg.vector_norm(x, dim=-1)",
        also=("x.norm(dim=-1)",),
        sick={"x": torch.tensor([[1e25, 1.0], [3.0, 4.0]])},
        healthy={"x": torch.tensor([[1.0, 1.0], [3.0, 4.0]])},
    ),
    "distance_overflow": Cure(
        broken="torch.cdist(x, y)",
        sick={"x": torch.eye(3) * 1e25, "y": torch.ones(2, 3), "scale": 1e25},
        healthy={"x": torch.eye(3), "scale": 1.0},
        learned=("x", "y"),
    ),
    "inverse_distance_at_zero": Cure(
        broken="1 / torch.cdist(x, y)",
        also=("torch.cdist(x, y) / torch.cdist(x, y)",),
        sick={"x": torch.eye(3), "y": torch.eye(3)},
        healthy={"y": torch.ones(2, 3)},
        learned=("x", "y"),
    ),
    "fractional_power_at_zero": Cure(
        broken="x ** p",
        also=(
            "torch.pow(x, 0.5)",
            "torch.float_power(x, p)",
            "torch.sign(x) * x.abs() ** p",
        ),
        sick={"x": t(0, 1, 4), "p": 0.3},
        healthy={"x": t(2, 1, 4)},
    ),
    "power_of_negative": Cure(broken="x ** p", sick={"x": t(-2, 1, 4), "p": 0.3}, healthy={"x": t(2, 1, 4)}),
    "negative_power_at_zero": Cure(
        broken="x ** p",
        also=(
            "x ** -1",
            "x ** -0.5",
        ),
        sick={"x": t(0, 1, 4), "p": -2},
        healthy={"x": t(2, 1, 4)},
    ),
    "power_overflow": Cure(
        broken="x ** p",
        also=("x.pow(p)",),
        sick={"x": t(1e3, 1, 4), "p": 30},
        healthy={"x": t(2, 1, 4)},
        differs={"p * torch.log(x)": IN_LOGS},
    ),
    "square_overflow_in_half": Cure(
        broken="x ** 2",
        also=("x.square()",),
        sick={"x": half(300, 2)},
        healthy={"x": half(3, 2)},
        differs={"(x / 64).square()": "is smaller by 4096; scale the result back in float32"},
        tolerance=1e-2,
    ),
    "learned_power_at_zero": Cure(
        broken="x ** y", sick={"x": t(0, 1, 4), "y": t(0.5, 0.5, 2)}, healthy={"x": t(2, 1, 4)}, learned=("x", "y")
    ),
    "learned_power_of_negative": Cure(
        broken="x ** y",
        sick={"x": t(-2, 1, 4), "y": t(2, 0.5, 2)},
        healthy={"x": t(2, 1, 4)},
        learned=("x", "y"),
        differs={"x ** y.detach()": CONSTANT},
    ),
    "power_of_negative_constant": Cure(
        broken="torch.pow(b, y)",
        sick={"b": -2.0, "y": t(2, 3)},
        healthy={"b": 2.0},
        learned=("y",),
        differs={"torch.pow(b, y.detach())": CONSTANT},
    ),
}
