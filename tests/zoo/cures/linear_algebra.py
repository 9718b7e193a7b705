"""Cures for decompositions and matrix products."""

from __future__ import annotations

import torch

from .cure import CONSTANT, Cure

SINGULAR = torch.ones(3, 3)
REGULAR = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
EYE = torch.eye(3)
RIGHT = torch.tensor([[1.0], [2.0], [3.0]])
WAVE = torch.arange(48.0).view(2, 3, 8).sin() + 1
VALUES = "gives the values only: they have a derivative where the vectors have none"
JITTER = {"eps": 1e-2}
"""Large enough for float32 to distinguish the eigenvalues."""

CURES = {
    "svd_with_equal_values": Cure(
        broken="torch.linalg.svd(x)[0]",
        also=("torch.svd(x)[0]",),
        sick={"x": EYE, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
        differs={"torch.linalg.svdvals(x)": VALUES},
    ),
    "eigh_with_equal_values": Cure(
        broken="torch.linalg.eigh(x)[1]",
        also=("torch.linalg.eig(x)[1].real",),
        sick={"x": EYE, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
        differs={"torch.linalg.eigh(x.detach())[1]": CONSTANT, "torch.linalg.eigvalsh(x)": VALUES},
    ),
    "qr_of_singular": Cure(
        broken="torch.linalg.qr(x)[0]",
        sick={"x": SINGULAR, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
        differs={"torch.linalg.qr(x.detach() + eps * torch.eye(*x.shape))[0]": CONSTANT},
    ),
    "lu_of_singular": Cure(
        broken="torch.linalg.lu(x)[1]",
        sick={"x": SINGULAR, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
    ),
    "log_determinant_of_singular": Cure(
        broken="torch.logdet(x)",
        also=("torch.linalg.slogdet(x)[1]",),
        sick={"x": SINGULAR, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
    ),
    "log_determinant_of_negative": Cure(broken="torch.logdet(x)", sick={"x": -REGULAR}, healthy={"x": REGULAR}),
    "inverse_of_singular": Cure(
        broken="torch.linalg.inv_ex(x)[0]",
        also=(
            "torch.linalg.inv(x)",
            "torch.inverse(x)",
        ),
        sick={"x": SINGULAR, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
    ),
    "solve_of_singular": Cure(
        broken="torch.linalg.solve_ex(x, b)[0]",
        also=(
            "torch.linalg.solve(x, b)",
            "torch.linalg.solve_triangular(x.triu() - torch.eye(3), b, upper=True)",
        ),
        sick={"x": SINGULAR, "b": RIGHT, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
    ),
    "cholesky_of_indefinite": Cure(
        broken="torch.linalg.cholesky_ex(x)[0]",
        also=(
            "torch.linalg.cholesky(x)",
            "torch.linalg.cholesky(-x)",
        ),
        sick={"x": SINGULAR, **JITTER},
        healthy={"x": REGULAR, "eps": 1e-5},
    ),
    "matrix_exponential_overflow": Cure(
        broken="torch.matrix_exp(x)",
        sick={"x": 100 * EYE},
        healthy={"x": REGULAR},
        differs={"torch.matrix_exp(x - x.mT)": "is a rotation: it keeps the part of x that cannot grow"},
    ),
    "matrix_product_overflow_in_half": Cure(
        broken="x @ w",
        also=(
            "F.linear(x, w)",
            "F.linear(x, w, x[0])",
            "torch.einsum('ij,jk->ik', x, w)",
        ),
        sick={"x": (300 * REGULAR).half(), "w": (300 * REGULAR).half()},
        healthy={"x": REGULAR.half(), "w": REGULAR.half()},
        learned=("x", "w"),
        differs={"F.layer_norm(x, x.shape[-1:]) @ w": "normalises x"},
        tolerance=2e-2,
    ),
    "matrix_product_overflow": Cure(
        broken="x @ w",
        also=("F.linear(x, w)",),
        sick={"x": 1e5 * REGULAR, "w": 1e35 * REGULAR},
        healthy={"x": REGULAR, "w": REGULAR},
        differs={"F.normalize(x, dim=-1) @ w": "normalises x"},
    ),
    "convolution_overflow_in_half": Cure(
        broken="F.conv1d(x, w)",
        sick={"x": (300 * WAVE).half(), "w": torch.full((2, 3, 3), 300.0).half()},
        healthy={"x": (3 * WAVE).half(), "w": torch.full((2, 3, 3), 3.0).half()},
        learned=("x", "w"),
        differs={"F.conv1d(F.group_norm(x, 1), w)": "normalises x"},
        tolerance=2e-2,
    ),
}
