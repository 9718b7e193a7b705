"""Decompositions of matrices that are singular or have equal eigenvalues, and products that overflow."""

from __future__ import annotations

from steadygrad.diagnose.explanations.conditions import HALF, in_dtype
from steadygrad.diagnose.explanations.entry import BACKWARD, FORWARD, Entry
from steadygrad.diagnose.explanations.evidence import show_largest, show_shape

ANY_KIND = ("nan", "inf", "error")
SOLVERS = (
    "linalg_solve",
    "linalg_solve_ex",
    "linalg_lu_solve",
    "linalg_solve_triangular",
    "triangular_solve",
    "cholesky_solve",
)

ENTRIES = (
    Entry(
        name="svd_with_equal_values",
        ops=("linalg_svd", "svd"),
        phases=BACKWARD,
        why="the derivative of the singular vectors divides by differences of squared singular values, "
        "which are 0 where two are equal",
        evidence=show_shape(),
        fixes=(
            "torch.linalg.svd(x + eps * torch.diag(torch.arange(1.0, 1 + x.shape[-1])))[0]",
            "torch.linalg.svdvals(x)",
        ),
    ),
    Entry(
        name="eigh_with_equal_values",
        ops=("linalg_eigh", "linalg_eig", "symeig"),
        phases=BACKWARD,
        why="the derivative of the eigenvectors divides by differences of eigenvalues: 0 where two are equal",
        evidence=show_shape(),
        fixes=(
            "torch.linalg.eigh(x + eps * torch.diag(torch.arange(1.0, 1 + x.shape[-1])))[1]",
            "torch.linalg.eigh(x.detach())[1]",
            "torch.linalg.eigvalsh(x)",
        ),
    ),
    Entry(
        name="qr_of_singular",
        ops=("linalg_qr", "qr"),
        phases=BACKWARD,
        why="the derivative of QR divides by the diagonal of R, which is 0 when the columns are dependent",
        evidence=show_shape(),
        fixes=(
            "torch.linalg.qr(x + eps * torch.eye(*x.shape))[0]",
            "torch.linalg.qr(x.detach() + eps * torch.eye(*x.shape))[0]",
        ),
    ),
    Entry(
        name="lu_of_singular",
        ops=("linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex"),
        phases=BACKWARD,
        why="the derivative of LU divides by the diagonal of U, which is 0 for a singular matrix",
        evidence=show_shape(),
        fixes=(
            "torch.linalg.lu(x + eps * torch.eye(x.shape[-1]))[1]",
            "torch.linalg.lu(x.double() + eps * torch.eye(x.shape[-1]))[1]",
        ),
    ),
    Entry(
        name="log_determinant_of_singular",
        ops=("linalg_slogdet", "logdet", "slogdet"),
        why="the determinant of a singular matrix is 0, its logarithm -inf and the derivative the missing inverse",
        evidence=show_shape(),
        fixes=(
            "torch.logdet(x + eps * torch.eye(x.shape[-1]))",
            "2 * torch.linalg.cholesky(x + eps * torch.eye(x.shape[-1])).diagonal().log().sum()",
        ),
    ),
    Entry(
        name="log_determinant_of_negative",
        ops=("scalar_tensor", "logdet"),
        phases=FORWARD,
        kinds=("nan",),
        why="a constant NaN was selected; torch.logdet does so where the determinant is negative",
        evidence=show_shape(),
        fixes=("torch.linalg.slogdet(x)[1]", "torch.logdet(x @ x.mT) / 2"),
    ),
    Entry(
        name="inverse_of_singular",
        ops=("linalg_inv", "linalg_inv_ex", "inverse", "linalg_pinv"),
        kinds=ANY_KIND,
        why="a singular matrix has no inverse",
        evidence=show_shape(),
        fixes=("torch.linalg.inv(x + eps * torch.eye(x.shape[-1]))", "torch.linalg.pinv(x)"),
    ),
    Entry(
        name="solve_of_singular",
        ops=SOLVERS,
        kinds=ANY_KIND,
        why="the system has no unique solution: its matrix is singular",
        evidence=show_shape(),
        fixes=(
            "torch.linalg.solve(x + eps * torch.eye(x.shape[-1]), b)",
            "torch.linalg.lstsq(x + eps * torch.eye(x.shape[-1]), b).solution",
            "torch.linalg.pinv(x) @ b",
        ),
    ),
    Entry(
        name="cholesky_of_indefinite",
        ops=("linalg_cholesky", "linalg_cholesky_ex", "cholesky"),
        kinds=ANY_KIND,
        why="the matrix is not positive definite: a covariance of too few or dependent samples, or rounding",
        evidence=show_shape(),
        fixes=(
            "torch.linalg.cholesky(x + eps * torch.eye(x.shape[-1]))",
            "torch.linalg.cholesky((x + x.mT) / 2 + eps * torch.eye(x.shape[-1]))",
        ),
    ),
    Entry(
        name="matrix_exponential_overflow",
        ops=("linalg_matrix_exp", "matrix_exp"),
        why="the matrix exponential grows like exp of the largest eigenvalue and overflows above 88",
        evidence=show_largest(),
        fixes=("torch.matrix_exp(x - x.mT)", "torch.matrix_exp(x * (10.0 / x.norm()).clamp_max(1.0))"),
    ),
    Entry(
        name="matrix_product_overflow_in_half",
        ops=("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "addmv", "mv", "dot", "einsum"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF),),
        why="the product of the matrices exceeds 65504 in float16",
        evidence=show_largest(0, 1, 2),
        fixes=(
            "x.float() @ w.float()",
            "x.to(torch.bfloat16) @ w.to(torch.bfloat16)",
            "F.layer_norm(x, x.shape[-1:]) @ w",
        ),
    ),
    Entry(
        name="matrix_product_overflow",
        ops=("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "addmv", "mv", "dot", "einsum", "convolution"),
        phases=FORWARD,
        kinds=("inf",),
        why="weights or activations have grown until their product left the range of the dtype",
        evidence=show_largest(0, 1, 2),
        fixes=("x.clamp(-10.0, 10.0) @ w", "F.normalize(x, dim=-1) @ w"),
    ),
    Entry(
        name="convolution_overflow_in_half",
        ops=("convolution", "conv1d", "conv2d", "conv3d", "cudnn_convolution"),
        phases=FORWARD,
        kinds=("inf",),
        conditions=(in_dtype(*HALF),),
        why="the sum of a convolution exceeds 65504 in float16",
        evidence=show_largest(0, 1),
        fixes=(
            "F.conv1d(x.float(), w.float())",
            "F.conv1d(x.to(torch.bfloat16), w.to(torch.bfloat16))",
            "F.conv1d(F.group_norm(x, 1), w)",
        ),
    ),
)
