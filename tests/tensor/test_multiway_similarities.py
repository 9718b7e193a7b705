"""Norm, cosine and distance in every precision: the accuracy of one rounded product, and when three are used."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from multiway_inputs import assert_same, evaluate, make_features
from torch import Tensor

from steadygrad.losses.multiway.layout import Layout, choose_layout
from steadygrad.losses.multiway.precision import DEFAULTS, Precision
from steadygrad.losses.multiway.similarity import Similarity

HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# (M, B, D): odd sizes, so that every tile has a partial border, and a depth that no tile divides.
SHAPES = [(2, 11, 7), (3, 5, 17), (5, 3, 9)]
# Largest error of loss and gradients over the largest entry, against float64. Logits of a few tens times a relative
# error of 2^-24 (fp32), 2^-22 (fp16x3), 2^-12 (TF32, fp16) and 2^-9 (bf16), with some room.
LIMITS: dict[Precision, float] = {"fp32": 3e-5, "fp16x3": 3e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}

every_similarity = pytest.mark.parametrize("similarity", ["norm", "cosine", "distance"])
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def make_both(features: list[Tensor], scale: float) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """Return the same features in fp32 and float64, both with values that fp32 has."""
    single = [f.detach().float().to(DEVICE).requires_grad_() for f in features]
    exact = [f.detach().double().requires_grad_() for f in single]
    scales = [
        torch.tensor(scale, dtype=dtype, device=DEVICE, requires_grad=True) for dtype in (torch.float32, torch.float64)
    ]
    return single, scales[0], exact, scales[1]


def assert_near(
    found: list[Tensor], expected: list[Tensor], features: list[Tensor], scale: float, limit: float
) -> None:
    """Like `assert_same`, except for the gradient of the scale, which is a small difference of large sums.

    By Euler's theorem scale * dL/dscale is the sum over all vectors of <f, dL/df>: its error may be `limit` of their
    sizes.
    """
    sizes = sum(float((f.detach().norm(dim=1) * g.norm(dim=1)).sum()) for f, g in zip(features, expected[2:]))
    assert abs(float(found[1]) - float(expected[1])) < limit * sizes / scale + 1e-6
    assert_same([found[0], *found[2:]], [expected[0], *expected[2:]], rtol=limit, atol=1e-6)


def options_for(impl: str, precision: str) -> dict[str, Any]:
    if impl == "tiled":
        return {"impl": "tiled", "precision": precision}
    from steadygrad.losses.multiway.triton import Tiles

    return {"impl": "triton", "precision": precision, "tiles": Tiles(16, 16, 16, 1, 1)}


@every_similarity
@pytest.mark.parametrize("precision", list(LIMITS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("impl", ["tiled", pytest.param("triton", marks=needs_triton)])
def test_every_precision_is_close_to_the_specification(
    shape: tuple[int, int, int], similarity: str, precision: Precision, negatives: str, impl: str
) -> None:
    single, scale, exact, exact_scale = make_both(make_features(*shape), 14.3)
    options = {"similarity": similarity, "negatives": negatives, "reduction": "none"}
    found = evaluate(single, scale, **options_for(impl, precision), **options)
    expected = evaluate(exact, exact_scale, impl="naive", **options)
    assert_near(found, expected, exact, 14.3, LIMITS[precision])


@needs_triton
@every_similarity
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("negatives", ["all", "fibre"])
def test_absent_modalities_are_masked_by_the_kernels(similarity: str, precision: Precision, negatives: str) -> None:
    single, scale, exact, exact_scale = make_both(make_features(3, 5, 17), 14.3)
    present = torch.ones(5, 3, dtype=torch.bool, device=DEVICE)
    present[1, 2] = present[3, 0] = False
    options = {"similarity": similarity, "negatives": negatives, "present": present}
    found = evaluate(single, scale, **options_for("triton", precision), **options)
    assert_near(found, evaluate(exact, exact_scale, impl="naive", **options), exact, 14.3, LIMITS[precision])


def make_hard_case(name: str) -> list[Tensor]:
    """Inputs that are hard for a precision rule: 4 modalities, 4 samples, 256 dimensions."""
    source = torch.Generator().manual_seed(0)  # the same for every precision that is compared
    common, *noise = torch.randn(5, 4, 256, dtype=torch.float64, generator=source)
    noise = torch.stack(noise)
    if name == "twins":  # two samples that are the same but for 1 %: distances near 0 among the negatives
        common[1] = common[0]
        rows = common + 1e-2 * noise
    elif name == "cancelling":  # all sums near 0
        rows = common[:1] * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None, None] + 1e-2 * noise
    elif name == "aligned":
        rows = common + 0.1 * noise
    else:
        rows = noise
    return list(torch.nn.functional.normalize(rows, dim=-1))


def measure_error(case: str, similarity: str, precision: str, scale: float, impl: str = "tiled") -> float:
    """Return the error of the features' gradients as a share of their norm."""
    single, single_scale, exact, exact_scale = make_both(make_hard_case(case), scale)
    found = evaluate(single, single_scale, similarity=similarity, **options_for(impl, precision))
    expected = evaluate(exact, exact_scale, similarity=similarity, impl="tiled")
    gradients, wanted = torch.stack(found[2:]).double(), torch.stack(expected[2:])
    return float((gradients - wanted).norm() / wanted.norm())


@every_similarity
@pytest.mark.parametrize("case", ["random", "aligned"])
@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_the_cuda_default_is_as_accurate_as_mip_on_ordinary_features(
    similarity: Similarity, case: str, scale: float
) -> None:
    assert measure_error(case, similarity, DEFAULTS[similarity], scale) < 1e-3


@pytest.mark.parametrize("scale", [14.3, 100.0, 1000.0])
@pytest.mark.parametrize(("similarity", "case"), [("distance", "twins"), ("norm", "cancelling")])
def test_three_products_are_as_accurate_as_fp32_near_a_root_of_zero(
    similarity: Similarity, case: str, scale: float
) -> None:
    """With one product the error would be far larger: the slope of the root itself is wrong."""
    assert DEFAULTS[similarity] == "fp16x3"
    error = measure_error(case, similarity, "fp16x3", scale)
    assert error < 4 * measure_error(case, similarity, "fp32", scale) + 1e-5
    assert error < 5e-3
    assert measure_error(case, similarity, "fp16", scale) > 5 * error


@needs_triton
@pytest.mark.parametrize(("similarity", "case"), [("distance", "twins"), ("norm", "cancelling")])
def test_the_kernels_are_as_accurate_there(similarity: Similarity, case: str) -> None:
    assert measure_error(case, similarity, "fp16x3", 100.0, impl="triton") < 5e-3


@every_similarity
@pytest.mark.parametrize("precision", ["fp16", "fp16x3"])
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e4, 1e8])
def test_weights_stay_within_the_range_of_fp16(scale: float, similarity: str, precision: str, negatives: str) -> None:
    """They are multiplied by a slope of up to 1e6: zero vectors, and identical samples."""
    features = make_features(4, 4, 8, dtype=torch.float32, device=DEVICE)
    with torch.no_grad():
        features[1][2] = 0.0
        for feature in features:
            feature[3] = features[0][3]
            feature[1] = features[0][3]
    leaf = torch.tensor(scale, device=DEVICE, requires_grad=True)
    options = {"similarity": similarity, "precision": precision, "negatives": negatives, "impl": "tiled"}
    assert all(bool(tensor.isfinite().all()) for tensor in evaluate(features, leaf, **options))


@needs_triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns about its arithmetic
@pytest.mark.parametrize("curve", ["line", "root", "minus root"])
def test_a_nan_feature_is_not_hidden_by_a_root(curve: str) -> None:
    from steadygrad.losses.multiway.engine import Diagonal, Panel
    from steadygrad.losses.multiway.triton import Tiles, TritonEngine

    p, q = torch.rand(5, 16, device=DEVICE), torch.rand(7, 16, device=DEVICE)
    p[2, 3] = torch.nan
    rows, columns = TritonEngine("fp32", Tiles(16, 16, 16, 1, 1), curve=curve).sum_panel(
        Panel(p, q, Diagonal(0, 1, 0, 1, 0))
    )
    assert rows[2].isnan()
    assert bool(columns.isnan().all())


@pytest.mark.parametrize("precision", ["fp16", "fp16x3", "tf32", "bf16"])
def test_extra_columns_do_not_reduce_the_features_precision(precision: Precision) -> None:
    """Lengths a thousand times the features: rounded once, their error would exceed the features."""
    layout = choose_layout(precision, "norm", 5)
    p, q = (torch.cat([torch.zeros(9, 5), 10 * torch.rand(9, 2)], 1) for _ in range(2))
    rounded = layout.round(p, None, first=True).double() @ layout.round(q, None, first=False).double().t()
    torch.testing.assert_close(rounded, p.double() @ q.double().t(), rtol=2**-22, atol=0)


@pytest.mark.parametrize("precision", ["fp16", "fp16x3"])
@pytest.mark.parametrize("first", [True, False])
def test_the_gradient_of_a_half_has_its_layout(precision: Precision, first: bool) -> None:
    layout = Layout(precision, 5, plain=False)
    other, weights = torch.randn(7, 8), torch.randn(4, 7)
    laid = layout.round(other, None, first=not first).float()
    found = layout.join(weights @ laid, 8, first=first)
    torch.testing.assert_close(found[:, 5:], weights @ other[:, 5:], rtol=1e-5, atol=1e-5)
    digits = 1e-5 if precision == "fp16x3" else 1e-2
    torch.testing.assert_close(found[:, :5], weights @ other[:, :5], rtol=digits, atol=digits)
