"""The multiway loss: every implementation equals the specification, including gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from multiway_inputs import assert_same, evaluate, make_features, make_scale
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steadygrad.errors import ConfigError, UnsupportedError
from steadygrad.losses.multiway import MultiwayScale, multiway_contrastive
from steadygrad.losses.multiway.batch import Batch, score_positives
from steadygrad.losses.multiway.similarity import CURVES, SIMILARITIES
from steadygrad.losses.multiway.sweep import cut_boxes
from steadygrad.losses.multiway.tiled import TILE_BYTES, TiledEngine

# (M, B, D): odd and even, one sample, one dimension, M up to 8.
SHAPES = [(2, 7, 5), (2, 1, 3), (3, 5, 7), (4, 4, 1), (5, 3, 5), (6, 3, 7), (6, 1, 4), (7, 2, 3), (8, 2, 5)]
# float64 on both sides; sums over up to 729 combinations.
EXACT = 1e-10

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_similarity = pytest.mark.parametrize("similarity", SIMILARITIES)


def scale_for(similarity: str, num: int, dim: int) -> torch.Tensor:
    return make_scale(num if similarity == "mip" else 2, dim)


@every_similarity
@every_shape
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_tiled_loss_equals_the_specification(
    shape: tuple[int, int, int], similarity: str, negatives: str, reduction: str
) -> None:
    features, scale = make_features(*shape), scale_for(similarity, shape[0], shape[2])
    options = {"similarity": similarity, "negatives": negatives, "reduction": reduction}
    assert_same(
        evaluate(features, scale, impl="tiled", **options),
        evaluate(features, scale, impl="naive", **options),
        rtol=EXACT,
        atol=EXACT,
    )


@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("tile_bytes", [8, 64, 1 << 12])
def test_the_split_changes_nothing(tile_bytes: int, negatives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features, scale = make_features(5, 4, 6), make_scale(5, 6)
    expected = evaluate(features, scale, impl="tiled", negatives=negatives)

    from steadygrad.losses.multiway import loss

    monkeypatch.setattr(loss, "TiledEngine", lambda p, c: TiledEngine(p, c, tile_bytes=tile_bytes))
    found = evaluate(features, scale, impl="tiled", negatives=negatives)
    assert_same(found, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("max_rows", [1, 2, 5, 9, 10, 27, 28, 1000])
@pytest.mark.parametrize("span", [slice(0, 3), slice(1, 2), slice(2, 3)])
def test_boxes_cover_every_row_once_and_stay_within_their_size(max_rows: int, span: slice) -> None:
    seen: list[tuple[int, ...]] = []
    for box in cut_boxes(3, 3, span, max_rows):
        rows = list(itertools.product(*(range(r.start, r.stop) for r in box)))
        assert len(rows) <= max_rows
        seen += rows
    assert seen == list(itertools.product(range(span.start, span.stop), range(3), range(3)))


@every_similarity
def test_gradients_equal_the_slopes_of_the_value(similarity: str) -> None:
    features, scale = make_features(4, 3, 4), scale_for(similarity, 4, 4)

    def loss(scale: torch.Tensor, *features: torch.Tensor) -> torch.Tensor:
        return multiway_contrastive(features, scale, similarity=similarity, impl="tiled", reduction="none")

    assert torch.autograd.gradcheck(loss, (scale, *features))


@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("similarity", ["mip", "cosine"])
def test_with_two_modalities_the_loss_equals_clip(negatives: str, smoothing: float, similarity: str) -> None:
    features, scale = make_features(2, 9, 6), make_scale(2, 6)
    logits = scale * features[0] @ features[1].T
    labels = torch.arange(9)
    clip = [F.cross_entropy(x, labels, label_smoothing=smoothing) for x in (logits, logits.T)]
    loss = multiway_contrastive(features, scale, negatives=negatives, label_smoothing=smoothing, similarity=similarity)
    torch.testing.assert_close(loss, sum(clip) / 2, rtol=1e-12, atol=0)


@every_similarity
@pytest.mark.parametrize("negatives", ["all", "fibre"])
def test_the_order_of_the_modalities_does_not_matter(similarity: str, negatives: str) -> None:
    features, scale = make_features(5, 3, 6), scale_for(similarity, 5, 6)
    options = {"similarity": similarity, "negatives": negatives, "reduction": "none"}
    loss = multiway_contrastive(features, scale, **options)
    for order in ([1, 0, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 1, 0, 3]):
        moved = multiway_contrastive([features[m] for m in order], scale, **options)
        torch.testing.assert_close(moved, loss[:, order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("impl", ["naive", "tiled"])
def test_smoothing_equals_that_of_cross_entropy_over_all_classes(negatives: str, impl: str) -> None:
    features, scale = make_features(3, 4, 5), make_scale(3, 5)
    losses = multiway_contrastive(
        features, scale, negatives=negatives, label_smoothing=0.2, reduction="none", impl=impl
    )
    a, b, c = features
    for i in range(4):
        table = scale * torch.einsum("d,jd,kd->jk", a[i], b, c)
        if negatives == "fibre":
            table, label = scale * torch.einsum("jd,d,d->j", a, b[i], c[i]), i
        else:
            table, label = table.reshape(-1), i * 4 + i
        expected = F.cross_entropy(table[None], torch.tensor([label]), label_smoothing=0.2)
        torch.testing.assert_close(losses[i, 0], expected, rtol=1e-10, atol=0)


def test_for_random_features_the_loss_is_the_log_of_the_number_of_combinations() -> None:
    features = [f.detach() for f in make_features(5, 4, 64)]
    chance = 4 * math.log(4)
    assert abs(float(multiway_contrastive(features, 0.0)) - chance) < 1e-12
    assert abs(float(multiway_contrastive(features, 0.0, negatives="fibre")) - math.log(4)) < 1e-12


def test_anchors_select_columns_and_reductions_agree() -> None:
    features, scale = make_features(4, 3, 5), make_scale(4, 5)
    table = multiway_contrastive(features, scale, reduction="none")
    assert table.shape == (3, 4)
    chosen = multiway_contrastive(features, scale, anchors=[2, 0], reduction="none")
    torch.testing.assert_close(chosen, table[:, [2, 0]], rtol=0, atol=0)
    torch.testing.assert_close(multiway_contrastive(features, scale), table.mean())
    torch.testing.assert_close(multiway_contrastive(features, scale, reduction="sum"), table.sum())


def test_fibre_is_below_all() -> None:
    features, scale = make_features(4, 5, 6), make_scale(4, 6)
    fibre = multiway_contrastive(features, scale, negatives="fibre", reduction="none")
    every = multiway_contrastive(features, scale, reduction="none")
    for m in range(4):  # exchanging modality m does not change the other anchors
        others = [other for other in range(4) if other != m]
        assert bool((fibre[:, m, None] <= every[:, others]).all())
    assert bool((fibre > 0).all())


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4, 1e8, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_similarity
@pytest.mark.parametrize("negatives", ["all", "fibre"])
def test_value_and_gradients_are_finite_at_every_scale(
    scale: float, dtype: torch.dtype, similarity: str, negatives: str
) -> None:
    features = make_features(4, 4, 8, dtype=dtype)
    with torch.no_grad():
        features[1][2] = 0.0
        features[2][3] = features[3][3]
    if dtype == torch.float16 and scale > 1e4:
        features = [f.detach().float().requires_grad_() for f in features]  # the gradients themselves are beyond fp16
        dtype = torch.float32
    found = evaluate(features, torch.tensor(scale, requires_grad=True), similarity=similarity, negatives=negatives)
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    assert [grad.dtype for grad in found[2:]] == [dtype] * 4


def test_identical_vectors_have_finite_gradients() -> None:
    same = [torch.ones(3, 4) / 2 for _ in range(3)]
    for similarity in SIMILARITIES:
        features = [f.clone().requires_grad_() for f in same]
        found = evaluate(features, torch.tensor(10.0, requires_grad=True), similarity=similarity)
        assert all(bool(tensor.isfinite().all()) for tensor in found)


@pytest.mark.parametrize("negatives", ["all", "fibre"])
def test_wrong_second_derivatives_are_refused(negatives: str) -> None:
    features = make_features(3, 4, 5)
    for impl in ("naive", "tiled"):
        loss = multiway_contrastive(features, 30.0, negatives=negatives, impl=impl)
        if impl == "naive":
            (grad,) = torch.autograd.grad(loss, features[:1], create_graph=True)
            assert torch.autograd.grad(grad.square().sum(), features[0])[0].norm() > 0
            continue
        with pytest.raises(UnsupportedError, match=r"create_graph=True.*impl='naive'"):
            torch.autograd.grad(loss, features[:1], create_graph=True)


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-3])
def test_the_distance_of_nearly_equal_vectors_is_exact_in_fp32(noise: float, present: bool) -> None:
    """A difference of squares is pure rounding error there: gradients were three times too large, or zero."""
    exact = [f.detach().float().double().requires_grad_() for f in make_features(6, 3, 256, noise=noise)]
    single = [f.detach().float().requires_grad_() for f in exact]
    here = torch.ones(3, 6, dtype=torch.bool)
    here[1, 2] = not present
    found, expected = (
        score_positives(Batch(tuple(f), torch.tensor(100.0, dtype=f[0].dtype), "distance", here, slice(0, 3)))
        for f in (single, exact)
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)
    for f, e in zip(torch.autograd.grad(found.sum(), single), torch.autograd.grad(expected.sum(), exact)):
        torch.testing.assert_close(f.double(), e, rtol=1e-3, atol=1e-3)


def test_the_specification_is_the_same_under_autocast() -> None:
    features, scale = make_features(3, 4, 8, dtype=torch.float32), make_scale(2, 8, dtype=torch.float32)
    plain = evaluate(features, scale, impl="naive", similarity="cosine")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = evaluate(features, scale, impl="naive", similarity="cosine")
    assert all(torch.equal(a, b) for a, b in zip(plain, inside))


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def test_no_tensor_is_larger_than_a_tile() -> None:
    features, scale = make_features(6, 12, 8, dtype=torch.float32), make_scale(6, 8, dtype=torch.float32)
    with LargestTensor() as naive_like:
        torch.einsum("az,bz->ab", torch.zeros(12**3, 8), torch.zeros(12**3, 8))
    with LargestTensor() as swept:
        evaluate(features, scale)
    assert naive_like.numel == 12**6  # 3 million: the check would notice such a tensor
    assert swept.numel <= TILE_BYTES["cpu"] // 4


def test_wrong_arguments_are_refused_by_name() -> None:
    features = make_features(3, 4, 5)
    for options in ({"negatives": "some"}, {"similarity": "dot"}, {"reduction": "max"}, {"impl": "fast"},
                    {"precision": "int8"}, {"label_smoothing": 1.0}, {"num_samples": 0}, {"anchors": []},
                    {"anchors": [3]}, {"anchors": "some"}, {"anchors": 1}, {"anchors": [0.5]}, {"num_samples": 1.5},
                    {"present": torch.ones(4, 3)}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(options))):
            multiway_contrastive(features, 1.0, **options)
    for scale in (-1.0, float("nan"), torch.ones(2)):
        with pytest.raises(ConfigError, match="logit_scale"):
            multiway_contrastive(features, scale)
    for num, dim in ((-3, 512), (1, 512), (6, 0)):
        with pytest.raises(ConfigError, match=f"{num} and {dim}"):
            MultiwayScale(num, dim)
    with pytest.raises(ConfigError, match="2 to 8"):
        multiway_contrastive(features[:1], 1.0)
    with pytest.raises(ConfigError, match=r"features\[2\].*\(4, 6\)"):
        multiway_contrastive([*features[:2], torch.zeros(4, 6, dtype=torch.float64)], 1.0)
    with pytest.raises(UnsupportedError, match="int64"):
        multiway_contrastive([*features[:2], torch.zeros(4, 5, dtype=torch.int64)], 1.0)
    with pytest.raises(UnsupportedError, match="norm"):
        multiway_contrastive(features, 1.0, similarity="norm", label_smoothing=0.1)
    with pytest.raises(UnsupportedError, match="bf16"):
        multiway_contrastive(features, 1.0, precision="bf16")


def test_curves_have_the_slopes_they_report() -> None:
    for curve in CURVES.values():
        x = torch.tensor([0.1, 1.0, 9.0], dtype=torch.float64, requires_grad=True)
        y = curve.value(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(torch.ones_like(slope) if curve.slope is None else curve.slope(y.detach()), slope)


@pytest.mark.parametrize("scale", [10.5, 12.0, 14.0])
def test_a_sample_far_off_loses_no_precision(scale: float) -> None:
    """softplus is linear above 20: 2e-9 too small, a hundred thousand rounding errors of float64."""
    left = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    right = -left  # each sample is closest to the other one's
    found = multiway_contrastive([left, right], torch.tensor(scale, dtype=torch.float64), reduction="none")
    wanted = F.cross_entropy(scale * left @ right.T, torch.arange(2), reduction="none")
    torch.testing.assert_close(found[:, 0], wanted, rtol=1e-15, atol=0.0)
