"""The scale for a product of M vectors: CLIP's at M=2, usable at M=6, clamped but still trainable."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from steadygrad.errors import ConfigError
from steadygrad.losses.multiway import MultiwayScale, align_gain, multiway_contrastive, spread_gain


def test_with_two_modalities_the_scale_equals_clips() -> None:
    scale = MultiwayScale(2, 512)
    assert scale().item() == pytest.approx(1 / 0.07, rel=1e-6)
    assert align_gain(2, 512) == 1.0
    with torch.no_grad():
        scale.log_scale.fill_(50.0)
    assert scale().item() == pytest.approx(100.0, rel=1e-5)


@pytest.mark.parametrize("num", [2, 3, 4, 6])
def test_gains_fit_random_and_aligned_vectors(num: int) -> None:
    dim = 256
    signs = torch.randn(1, dim, dtype=torch.float64).sign() / math.sqrt(dim)
    aligned = signs.abs().expand(num, dim).prod(0).sum() * align_gain(num, dim)
    assert aligned.item() == pytest.approx(1.0)
    units = [F.normalize(torch.randn(4000, dim, dtype=torch.float64), dim=1) for _ in range(num)]
    products = torch.stack(units).prod(0).sum(1) * spread_gain(num, dim)
    assert products.std().item() == pytest.approx(1.0, abs=0.1)  # of 4000: 1 % of noise, heavier tails at M=6


def test_six_modalities_learn_with_this_scale_and_not_with_clips() -> None:
    torch.manual_seed(0)
    common = torch.randn(4, 512)
    features = [F.normalize(common + 0.3 * torch.randn(4, 512), dim=1) for _ in range(6)]
    chance = 5 * math.log(4)
    assert abs(multiway_contrastive(features, 1 / 0.07).item() - chance) < 0.01
    assert multiway_contrastive(features, MultiwayScale(6, 512)().detach()).item() < 0.5 * chance


def test_a_clamped_scale_still_gets_a_gradient_that_leads_back() -> None:
    scale = MultiwayScale(3, 16, maximum=20.0, initial=20.0)
    with torch.no_grad():
        scale.log_scale += 1.0
    value = scale()
    value.backward()
    assert value.item() == pytest.approx(20.0 * align_gain(3, 16), rel=1e-5)
    assert scale.log_scale.grad is not None
    assert scale.log_scale.grad.item() == pytest.approx(value.item(), rel=1e-5)


def test_sums_need_no_gain() -> None:
    assert MultiwayScale(6, 512, similarity="cosine").gain == 1.0


@pytest.mark.parametrize("options", [{"initial": 0.0}, {"initial": 5.0, "maximum": 1.0}, {"maximum": math.inf}])
def test_an_invalid_scale_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="initial"):
        MultiwayScale(3, 16, **options)
    with pytest.raises(ConfigError, match="dot"):
        MultiwayScale(3, 16, similarity="dot")  # type: ignore[arg-type]
