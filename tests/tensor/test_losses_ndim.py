"""StableLossFunctions and get_stable_loss_function: four kinds of logits over combinations of M features."""

from __future__ import annotations

import math
from functools import reduce

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F

from steadygrad.errors import ConfigError, UsageError
from steadygrad.losses import StableLossFunctions, get_stable_loss_function

VERSIONS = [0, 1, 2, 3]


def spread(features: list[Tensor]) -> list[Tensor]:
    """Each feature as a view [.., B, .., D] with B at the feature's position: broadcasting makes the combinations."""
    return [f.reshape([1] * m + [len(f)] + [1] * (len(features) - 1 - m) + [-1]) for m, f in enumerate(features)]


def plain_logits(version: int, features: list[Tensor]) -> Tensor:
    """The formulas, written out for unit vectors."""
    features = [F.normalize(f, dim=-1) for f in features]
    if version == 0:
        return reduce(torch.mul, spread(features)).sum(-1)
    if version == 1:
        return reduce(torch.add, spread(features)).norm(dim=-1)
    centre = torch.stack(features).mean(0)
    if version == 2:
        cosines = [f @ F.normalize(centre, dim=-1).T for f in features]
        return reduce(torch.mul, cosines).abs() ** (1 / len(features))
    distances = [(f[:, None] - centre[None]).square().sum(-1).add(1e-8).sqrt() for f in features]
    return -torch.stack(distances).mean(0)


def make_features(num: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(3, 5).to(dtype).requires_grad_() for _ in range(num)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("num", [2, 3, 4, 6])
def test_logits_equal_the_formula(version: int, num: int) -> None:
    features = make_features(num)
    logits = get_stable_loss_function(version)(*features)
    assert logits.shape == ((3,) * num if version < 2 else (3, 3))
    torch.testing.assert_close(logits, plain_logits(version, features))


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_are_true(version: int) -> None:
    assert gradcheck(get_stable_loss_function(version), make_features(3))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fill", ["zero", "equal", "opposite", "orthogonal", "huge", "tiny"])
def test_degenerate_features_have_finite_logits_and_gradients(version: int, dtype: torch.dtype, fill: str) -> None:
    row = torch.eye(4)[:2]
    pairs = {
        "zero": (row * 0, row),
        "equal": (row, row),
        "opposite": (row, -row),
        "orthogonal": (row, row.flip(1)),
        "huge": (row * 6e4, row * 6e4),
        "tiny": (row * 1e-7, row),
    }
    features = [f.to(dtype).requires_grad_() for f in pairs[fill]]
    logits = get_stable_loss_function(version)(*features)
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    for gradient in torch.autograd.grad(logits.sum(), features):
        assert gradient.isfinite().all()


def test_the_plain_geometric_mean_has_no_gradient_at_a_right_angle() -> None:
    row = torch.eye(4)[:2]
    features = [row.clone().requires_grad_(), row.flip(1).requires_grad_()]
    gradients = torch.autograd.grad(plain_logits(2, features).sum(), features)
    assert not all(g.isfinite().all() for g in gradients)


def test_unnormalized_features_keep_their_size() -> None:
    features = make_features(2)
    product = get_stable_loss_function(0, normalize=False)(*features)
    torch.testing.assert_close(product, features[0] @ features[1].T)
    norm = get_stable_loss_function(1, normalize=False)(*features)
    torch.testing.assert_close(norm, reduce(torch.add, spread(features)).norm(dim=-1))


@pytest.mark.parametrize("version", [-1, 4, 17, None, "1"])
def test_an_unknown_version_is_refused_at_once(version: object) -> None:
    with pytest.raises(ConfigError, match=r"loss_version must be 0 \(product\), 1 \(norm\)"):
        get_stable_loss_function(version)  # type: ignore[arg-type]


def test_a_single_feature_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got 1 feature tensor\(s\), at least 2"):
        get_stable_loss_function(1)(torch.randn(3, 4))


def test_all_functions_share_eps_and_clamp() -> None:
    stable = StableLossFunctions(eps=1e-4, clamp_min=-10, clamp_max=10)
    x = torch.tensor([4.0, 0.0, -1.0])
    assert stable.stable_sqrt(x).tolist() == [2.0, 0.0, 0.0]
    torch.testing.assert_close(stable.stable_log(x), torch.tensor([math.log(4), math.log(1e-4), math.log(1e-4)]))
    assert stable.stable_division(torch.ones(3), torch.tensor([-2.0, 0.0, -1e-9])).tolist() == [-0.5, 10.0, -10.0]
    torch.testing.assert_close(stable.stable_norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.6, 0.8]]))
    big = torch.full((2,), 3e38)
    torch.testing.assert_close(stable.stable_mean_n_vectors(big, big), big)


@pytest.mark.parametrize("settings", [{"eps": 0.0}, {"eps": math.nan}, {"clamp_min": 1.0, "clamp_max": 1.0}])
def test_invalid_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"StableLossFunctions\.(eps|clamp_min) must be"):
        StableLossFunctions(**settings)


@pytest.mark.parametrize("version", VERSIONS)
def test_products_are_fp32_under_autocast(version: int) -> None:
    features = make_features(3, torch.float32)
    expected = get_stable_loss_function(version)(*features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = get_stable_loss_function(version)(*features)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("size", [1e-30, 1e15, 1e30, 1e38])
def test_unnormalized_features_may_have_any_size(size: float, version: int) -> None:
    features = [(torch.randn(3, 4).clamp(-1, 1) * size).requires_grad_() for _ in range(3)]
    logits = get_stable_loss_function(version, normalize=False)(*features)
    assert logits.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(logits.sum(), features))


@pytest.mark.parametrize("version", [0, 1])
def test_large_and_small_features_give_their_ordinary_product(version: int) -> None:
    ordinary = [torch.randn(3, 4) for _ in range(3)]
    sizes = (1e20, 1e-20, 1.0) if version == 0 else (1e5, 1e5, 1e5)
    function = StableLossFunctions(clamp_min=-1e9, clamp_max=1e9)
    similar = function.stable_einsum_similarity if version == 0 else function.stable_norm_based_similarity
    found = similar(*(f * size for f, size in zip(ordinary, sizes)), normalize=False)
    expected = similar(*ordinary, normalize=False) * (1.0 if version == 0 else 1e5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
