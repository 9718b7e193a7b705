"""The Triton engine equals the specification: in the interpreter here, or on a device if available."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from multiway_inputs import assert_same, evaluate, make_features, make_scale

from steadygrad.errors import UnsupportedError
from steadygrad.losses.multiway import multiway_contrastive

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

from steadygrad.losses.multiway.engine import Diagonal, Panel, Side
from steadygrad.losses.multiway.similarity import CURVES
from steadygrad.losses.multiway.tiled import TiledEngine
from steadygrad.losses.multiway.triton import Tiles, TritonEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(16, 32, 16, 1, 1)
POSITIVES = Diagonal(2, 3, 1, 5, 6)
# (M, B, D): odd sizes, so that every tile has a partial border.
SHAPES = [(2, 19, 7), (3, 5, 17), (4, 5, 16), (5, 3, 33), (6, 3, 9), (8, 2, 5)]
# fp32 against float64; logits of a few tens.
SINGLE = 3e-5


def make_both(
    num: int, size: int, dim: int
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The same features in float64 for the specification and in fp32 for the kernel."""
    exact, scale = make_features(num, size, dim, device=DEVICE), make_scale(num, dim, device=DEVICE)
    single = [f.detach().float().requires_grad_() for f in exact]
    return single, scale.detach().float().requires_grad_(), exact, scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_triton_equals_the_specification(shape: tuple[int, int, int], negatives: str, reduction: str) -> None:
    single, single_scale, exact, scale = make_both(*shape)
    options = {"negatives": negatives, "reduction": reduction}
    found = evaluate(single, single_scale, impl="triton", precision="fp32", tiles=SMALL, **options)
    assert_same(found, evaluate(exact, scale, impl="naive", **options), rtol=SINGLE, atol=1e-6)


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_a_lower_precision_rounds_like_the_tiled_engine(precision: str) -> None:
    single, scale, *_ = make_both(4, 5, 32)
    found = evaluate(single, scale, impl="triton", precision=precision, tiles=SMALL)
    expected = evaluate(single, scale, impl="tiled", precision=precision)
    # Halves are rounded alike; so are the weights, but the interpreter cuts where the device rounds: up to 2^-8 each.
    # The gradient of the scale is a small difference of sums.
    assert_same(found, expected, rtol=1.5e-2 if precision == "bf16" else 1e-3, atol=1e-4)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5 if DEVICE == "cpu" else 1e-4, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("layout", ["columns first", "interleaved", "every second", "one row for all"])
def test_features_may_have_any_memory_layout(layout: str, negatives: str, precision: str) -> None:
    """As after (W @ x.T).T, or slices of one [B, M, D]; the kernels read contiguous rows."""
    single, scale, *_ = make_both(4, 5, 16)
    dense = [f.detach().contiguous() for f in single]
    strange = {
        "columns first": lambda: [f.t().contiguous().t() for f in dense],
        "interleaved": lambda: list(torch.stack(dense, 1).unbind(1)),
        "every second": lambda: [torch.stack([f, -f], -1)[..., 0] for f in dense],
        "one row for all": lambda: [f[:1].expand(5, 16) for f in dense],
    }[layout]()
    if layout == "one row for all":
        dense = [f.contiguous() for f in strange]
    options = {"impl": "triton", "negatives": negatives, "precision": precision, "tiles": SMALL}
    found, expected = (
        evaluate([f.requires_grad_() for f in features], scale, **options) for features in (strange, dense)
    )
    assert_same(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("absent", [[(0, 0)], [(1, 2), (3, 0), (3, 1), (2, 2)]])
def test_absent_modalities_are_masked(absent: list[tuple[int, int]]) -> None:
    single, single_scale, exact, scale = make_both(4, 5, 17)
    present = torch.ones(5, 4, dtype=torch.bool, device=DEVICE)
    for place in absent:
        present[place] = False
    found = evaluate(single, single_scale, impl="triton", precision="fp32", tiles=SMALL, present=present)
    assert_same(found, evaluate(exact, scale, impl="naive", present=present), rtol=SINGLE, atol=1e-6)


@pytest.mark.parametrize("gap", [0.0, 30.0, 100.0, 1e4])
def test_rows_far_below_the_maximum_of_their_tile_keep_their_sums(gap: float) -> None:
    """One exponential for a whole tile would leave such rows and columns at zero."""
    p, q = torch.randn(21, 16, device=DEVICE), torch.randn(37, 16, device=DEVICE)
    p[:, 0], q[:, 0] = 1.0, 1.0
    p[3, 0] -= gap
    q[5, 0] -= gap
    fast, plain = TritonEngine("fp32", SMALL), TiledEngine("fp64", CURVES["mip"])
    for found, expected in zip(
        fast.sum_panel(Panel(p, q, POSITIVES)), plain.sum_panel(Panel(p.double(), q.double(), POSITIVES))
    ):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gap", [0.0, 30.0, 200.0, 1e30])
def test_maxima_far_apart_neither_overflow_nor_vanish(gap: float) -> None:
    p, q = torch.randn(21, 16, device=DEVICE), torch.randn(37, 16, device=DEVICE)
    fast, plain = TritonEngine("fp32", SMALL), TiledEngine("fp64", CURVES["mip"])
    rows, columns = plain.sum_panel(Panel(p.double(), q.double(), POSITIVES))
    rows[4] += gap
    sides = [
        Side(rows, torch.randn(21, device=DEVICE).double()),
        Side(columns, torch.randn(37, device=DEVICE).double()),
    ]
    narrow = [Side(side.peak.float(), side.weight.float()) for side in sides]
    found_q, expected_q = torch.zeros_like(q), torch.zeros_like(q).double()
    found = fast.pull_panel(Panel(p, q, POSITIVES), *narrow, found_q)
    expected = plain.pull_panel(Panel(p.double(), q.double(), POSITIVES), *sides, expected_q)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_q.double(), expected_q, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["triton", "tiled"])
def test_a_logit_rounded_above_its_maximum_has_weight_one(name: str) -> None:
    """Logits of 2^30 are up to 128 apart in fp32: exp(L - peak) would be e^128 instead of 1."""
    engine = TritonEngine("fp32", SMALL) if name == "triton" else TiledEngine("fp32", CURVES["mip"])
    p, q = torch.full((16, 16), 2.0**26, device=DEVICE), torch.ones(32, 16, device=DEVICE)
    rows, columns = (
        Side(torch.full((n,), 2.0**30 - 128, device=DEVICE), torch.ones(n, device=DEVICE)) for n in (16, 32)
    )
    grad = engine.pull_panel(Panel(p, q, Diagonal(0, 1, 0, 1, 0)), rows, columns, torch.zeros_like(q))
    torch.testing.assert_close(grad, torch.full_like(grad, 2.0 * 32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns about its arithmetic
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nan_feature_is_not_hidden(value: float, negatives: str, precision: str) -> None:
    single, scale, *_ = make_both(3, 4, 16)
    with torch.no_grad():
        single[1][2, 3] = value
    loss = multiway_contrastive(single, scale, impl="triton", precision=precision, tiles=SMALL, negatives=negatives)
    assert not loss.isfinite()


def test_unsupported_arguments_are_refused_by_name() -> None:
    features = make_features(3, 4, 5, dtype=torch.float32, device=DEVICE)
    with pytest.raises(UnsupportedError, match="fp64"):
        multiway_contrastive([f.double() for f in features], 1.0, impl="triton")
