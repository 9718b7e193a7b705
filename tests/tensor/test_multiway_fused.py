"""The multiway loss in few launches: the same numbers as the sweep it replaces, for every split."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from launches import CountLaunches
from multiway_inputs import assert_same, evaluate, make_features, make_scale

if not importlib.util.find_spec("triton"):
    pytest.skip("triton is not installed", allow_module_level=True)

from steadygrad.losses.multiway import fused, multiway_contrastive, sweep, triton
from steadygrad.losses.multiway.batch import Batch, score_positives
from steadygrad.losses.multiway.halves import Gains, Half, ProductHalves
from steadygrad.losses.multiway.layout import choose_layout
from steadygrad.losses.multiway.precision import Precision, round_half
from steadygrad.losses.multiway.similarity import CURVES, Similarity, build_columns, build_rows
from steadygrad.losses.multiway.sums import SumHalves
from steadygrad.losses.multiway.tiled import TiledEngine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = triton.Tiles(16, 16, 16, 1, 1)
# fp32 against float64; logits of a few tens.
SINGLE = 3e-5
# Before the kernels: 261 for mip in fp16, 335 to 374 for the others in fp32. The CPU adds four conversions
# (eight with three products), which CUDA's matmul does itself.
MOST_LAUNCHES = {
    ("mip", "fp16"): 36,
    ("mip", "tf32"): 30,
    ("mip", "bf16"): 45,
    ("cosine", "fp16"): 54,
    ("norm", "fp16x3"): 55,
    ("distance", "fp16x3"): 66,
}


@pytest.mark.skipif(DEVICE == "cuda", reason="counts kernels of the interpreter; tests/gpu counts real ones")
@pytest.mark.parametrize(("similarity", "precision"), list(MOST_LAUNCHES))
def test_a_small_batch_takes_few_launches_and_never_waits(similarity: Similarity, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    features = make_features(6, 4, 32, dtype=dtype)
    with CountLaunches() as counter:
        loss = multiway_contrastive(
            features, 14.0, similarity=similarity, impl="triton", precision=precision, tiles=SMALL
        )
        torch.autograd.grad(loss, features)
    assert counter.total <= MOST_LAUNCHES[similarity, precision], counter.names
    assert "_local_scalar_dense" not in counter.names  # .item() and similar calls


# Three products have fp32's accuracy, one and a half-precision half 11 bits; logits of a few tens.
CHOICES = [("mip", "fp32", SINGLE), ("mip", "fp16", 3e-3), ("cosine", "fp16", 3e-3), ("norm", "fp16x3", 6e-5),
           ("distance", "fp16x3", 6e-5), ("norm", "tf32", 3e-3)]  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 3, 9), (7, 2, 5)], ids=str)
@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize(("similarity", "precision", "limit"), CHOICES)
def test_the_split_changes_nothing(
    shape: tuple[int, int, int],
    rows: int,
    similarity: Similarity,
    precision: str,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = make_features(*shape, device=DEVICE)
    scale = make_scale(shape[0] if similarity == "mip" else 2, shape[2], device=DEVICE)
    features, single = [f.detach().float().requires_grad_() for f in exact], scale.detach().float().requires_grad_()
    # The same boxes for sums and gradients; what PANEL_BYTES allows is far above these sizes
    monkeypatch.setattr(triton.TritonEngine, "count_rows", lambda self, num_columns, depth, pull: rows)
    options = {"similarity": similarity, "reduction": "none"}
    found = evaluate(features, single, impl="triton", precision=precision, tiles=SMALL, **options)
    # The gradient of the scale is a small difference of large sums
    found, expected = (
        [tensors[0], tensors[1] * scale.detach() / 14.0, *tensors[2:]]
        for tensors in (found, evaluate(exact, scale, impl="naive", **options))
    )
    assert_same(found[:1] + found[2:], expected[:1] + expected[2:], rtol=limit, atol=1e-6)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=limit, atol=limit * 14.0)


@pytest.mark.parametrize(("similarity", "precision", "limit"), CHOICES)
@pytest.mark.parametrize("span", [slice(0, 2), slice(1, 5)], ids=str)
@pytest.mark.parametrize("num", [2, 3, 6])
def test_a_part_of_the_first_index_is_summed_like_in_the_sweep(
    num: int, span: slice, similarity: Similarity, precision: Precision, limit: float
) -> None:
    """Like each of several processes."""
    size = 5 if num < 6 else 3
    span = slice(min(span.start, size - 1), min(span.stop, size))
    features = make_features(num, size, 8, device=DEVICE)
    scale = make_scale(num if similarity == "mip" else 2, 8, device=DEVICE)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (scale, *features)]
        batch = Batch(tuple(leaves[1:]), leaves[0], similarity, None, span)
        if dtype == torch.float64:
            table = sweep.sum_combinations(batch, TiledEngine("fp64", CURVES[similarity]))
            positives = score_positives(batch)
        else:
            engine = triton.TritonEngine(precision, SMALL, curve=CURVES[similarity].name)
            table, positives = fused.sum_combinations(batch, engine)
        there = table > -1e29  # not if the first index belongs to another process
        table = torch.where(there, table, 0.0)
        weights = torch.linspace(-1, 2, table.numel(), dtype=dtype, device=DEVICE).view_as(table)
        total = (table * weights).sum() + positives[span].sum()
        _, *grads = torch.autograd.grad(total, leaves)
        results.append([there.to(dtype), table, positives, *grads])
    assert_same(*results, rtol=limit, atol=1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "norm"])
@pytest.mark.parametrize("precision", ["tf32", "fp16", "fp16x3", "bf16"])
@pytest.mark.parametrize("first", [True, False])
def test_one_half_of_the_sums_has_the_layout_of_plain_torch(
    similarity: Similarity, precision: Precision, first: bool
) -> None:
    features = torch.stack([f.detach() for f in make_features(5, 6, 33, dtype=torch.float32, device=DEVICE)])
    scale, gain = torch.tensor(3.7, device=DEVICE), torch.tensor(2.0**9, device=DEVICE)
    halves = SumHalves(features, scale, precision, 3, similarity, Gains(gain.expand(4)))
    box = (slice(2, 5), slice(0, 6), slice(1, 2))
    found = halves.build(Half(1, box), first=first)
    a, b, c = (f[r] for f, r in zip(features[1:], box))
    views = [a[:, None, None], b[None, :, None], c[None, None]]
    plain = build_rows(views, scale, similarity, num=5, whole=5) if first else build_columns(views, similarity)
    layout = choose_layout(precision, similarity, 33)
    expected = layout.round(plain, gain, first=first)
    # Factors are multiplied in another order, so that here and there a number rounds the other way; its low part then
    # has the other sign. What a row adds up to is the same.
    assert found.shape == expected.shape
    width = plain.shape[-1]
    joined, wanted = (layout.join(t.float(), width, first=not first) for t in (found, expected))
    torch.testing.assert_close(joined, wanted, rtol=2e-6 if precision == "fp16x3" else 1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_a_half_is_built_and_rounded_as_in_plain_torch(precision: Precision) -> None:
    features = torch.stack([f.detach() for f in make_features(5, 6, 33, dtype=torch.float32, device=DEVICE)])
    scale, gain = torch.tensor(3.7, device=DEVICE), torch.tensor(2.0**9, device=DEVICE)
    halves = ProductHalves(features, scale, precision, 3, Gains(gain.expand(4)))
    box = (slice(2, 5), slice(0, 6), slice(1, 2))
    found = halves.build(Half(1, box), first=True)
    a, b, c = (f[r] for f, r in zip(features[1:], box))
    plain = (a * scale)[:, None, None] * b[None, :, None] * c[None, None]
    assert torch.equal(found, round_half(plain.reshape(-1, 33), precision, gain))
