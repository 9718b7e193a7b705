"""What single losses guarantee: masks, ignored labels, infinite logits, scales, named terms."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad import Guard
from steadygrad.errors import ConfigError, UnsupportedError, UsageError
from steadygrad.losses import (
    Loss,
    clip_loss,
    dice,
    find_bad_terms,
    focal,
    info_nce,
    iou,
    masked_cross_entropy,
    normalized_mse,
    stable_bce_with_logits,
    stable_kl,
    structure_loss,
)

INF = math.inf


def gradient_of(loss: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, x)
    return gradient


# --- cross entropy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_labels_weights_and_smoothing_match_torch(smoothing: float, weighted: bool, reduction: str) -> None:
    logits = torch.randn(6, 4, 3, dtype=torch.float64)
    target = torch.randint(0, 4, (6, 3))
    target[0], target[2, 1] = -100, -100
    weight = torch.rand(4, dtype=torch.float64) if weighted else None

    loss = masked_cross_entropy(logits, target, weight=weight, label_smoothing=smoothing, reduction=reduction)

    expected = F.cross_entropy(logits, target, weight=weight, label_smoothing=smoothing, reduction=reduction)
    torch.testing.assert_close(loss, expected)


def test_each_plain_cross_entropy_equals_torchs_bit_for_bit() -> None:
    logits, target = torch.randn(64, 10), torch.randint(0, 10, (64,))
    expected = F.cross_entropy(logits, target, reduction="none")
    assert torch.equal(masked_cross_entropy(logits, target, reduction="none"), expected)


def test_classes_may_be_the_last_dimension() -> None:
    logits, target = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(masked_cross_entropy(logits, target, dim=-1), expected)
    torch.testing.assert_close(
        masked_cross_entropy(logits[0, 0], target[0, 0]), F.cross_entropy(logits[:1, 0], target[:1, 0])
    )


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-4}, {"weight": torch.ones(3)}])
def test_only_ignored_labels_give_a_zero_connected_to_the_graph(options: dict[str, object]) -> None:
    layer = nn.Linear(2, 3)
    target = torch.full((4,), -100)
    plain = F.cross_entropy(layer(torch.randn(4, 2)), target)
    assert plain.isnan()

    loss = masked_cross_entropy(layer(torch.randn(4, 2)), target, **options)  # type: ignore[arg-type]
    loss.backward()

    assert loss.item() == 0.0
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))


@pytest.mark.parametrize("garbage", [math.nan, INF, 1e38])
def test_logits_at_ignored_labels_do_not_matter(garbage: float) -> None:
    logits = torch.randn(3, 4)
    target = torch.tensor([1, -100, 2])
    expected = F.cross_entropy(logits, target)
    logits[1] = garbage
    logits.requires_grad_()

    loss = masked_cross_entropy(logits, target, z_loss=0.0)

    assert torch.equal(loss, expected)
    assert gradient_of(loss, logits)[1].tolist() == [0.0] * 4
    masked = masked_cross_entropy(logits, target.clamp(min=0), mask=torch.tensor([True, False, True]))
    assert torch.equal(masked, expected)


def test_a_class_at_minus_infinity_is_excluded_from_the_smoothing() -> None:
    logits = torch.tensor([[1.0, 2.0, -INF]], requires_grad=True)
    target = torch.tensor([0])
    assert F.cross_entropy(logits, target, label_smoothing=0.1).isinf()

    loss = masked_cross_entropy(logits, target, label_smoothing=0.1)

    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :2], target, label_smoothing=0.1))
    assert gradient_of(loss, logits).isfinite().all()


def test_a_row_without_remaining_classes_does_not_count() -> None:
    logits = torch.tensor([[-INF, -INF], [1.0, 2.0]], requires_grad=True)
    loss = masked_cross_entropy(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(loss, F.cross_entropy(logits[1:], torch.tensor([1])))
    assert gradient_of(loss, logits)[0].tolist() == [0.0, 0.0]


def test_a_label_whose_class_is_at_minus_infinity_is_large_but_finite() -> None:
    logits = torch.tensor([[0.0, -INF]] * 3, requires_grad=True)
    loss = masked_cross_entropy(logits, torch.tensor([1, 1, 1]))
    assert loss.item() > 1e38
    assert loss.isfinite()
    assert gradient_of(loss, logits).isfinite().all()


def test_the_ceiling_limits_the_loss_and_stops_the_gradient() -> None:
    logits = torch.tensor([[500.0, 0.0]], requires_grad=True)
    assert masked_cross_entropy(logits, torch.tensor([1]), ceiling=1000.0).item() == 500.0
    loss = masked_cross_entropy(logits, torch.tensor([1]), ceiling=100.0)
    assert loss.item() == 100.0
    assert gradient_of(loss, logits).tolist() == [[0.0, 0.0]]


def test_probabilities_as_labels_and_invalid_smoothing_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"class indices, got torch.float32 .*stable_kl"):
        masked_cross_entropy(torch.randn(2, 3), torch.rand(2, 3))
    with pytest.raises(ConfigError, match=r"label_smoothing must be between 0 and 1, got 1\.5"):
        masked_cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]), label_smoothing=1.5)


# --- binary, focal, divergence --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("logit", "label", "expected"), [(INF, 1.0, 0.0), (-INF, 0.0, 0.0), (INF, 0.0, 3.4028235e38)])
def test_infinite_logits_have_a_finite_binary_loss(logit: float, label: float, expected: float) -> None:
    x = torch.tensor([logit], requires_grad=True)
    y = torch.tensor([label])
    assert not F.binary_cross_entropy_with_logits(x, y).isfinite()
    for loss in (stable_bce_with_logits(x, y), focal(x, y, alpha=None)):
        assert loss.item() == pytest.approx(expected)
        assert gradient_of(loss, x).isfinite().all()


def test_binary_weights_match_torch() -> None:
    x, y, weight, pos = torch.randn(4, 3), torch.rand(4, 3), torch.rand(4, 3), torch.rand(3) * 5
    expected = F.binary_cross_entropy_with_logits(x, y, weight, pos_weight=pos)
    torch.testing.assert_close(stable_bce_with_logits(x, y, weight=weight, pos_weight=pos), expected)
    torch.testing.assert_close(
        stable_bce_with_logits(x, y > 0.5), F.binary_cross_entropy_with_logits(x, (y > 0.5).float())
    )


@pytest.mark.parametrize("loss", [stable_bce_with_logits, focal])
def test_a_mask_excludes_elements_and_their_garbage(loss: type) -> None:
    x = torch.tensor([0.3, math.nan, -2.0], requires_grad=True)
    y = torch.tensor([1.0, math.nan, 0.0])
    mask = torch.tensor([True, False, True])
    value = loss(x, y, mask=mask)
    torch.testing.assert_close(value, loss(x[[0, 2]], y[[0, 2]]))
    assert gradient_of(value, x)[1].item() == 0.0
    nothing = loss(x, y, mask=torch.zeros(3))
    assert nothing.item() == 0.0
    assert gradient_of(nothing, x).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("logit", [-200.0, -20.0, 0.0, 20.0, 200.0])
def test_focal_is_finite_for_any_gamma(gamma: float, logit: float) -> None:
    for label in (0.0, 1.0, 0.3):
        x = torch.tensor([logit], requires_grad=True)
        loss = focal(x, torch.tensor([label]), gamma=gamma)
        assert loss.isfinite()
        assert gradient_of(loss, x).isfinite().all()


def test_the_plain_focal_formula_is_nan_where_ours_is_not() -> None:
    x = torch.tensor([200.0], requires_grad=True)
    plain = (1 - x.sigmoid()) ** 0.5 * F.binary_cross_entropy_with_logits(x, torch.ones(1))
    assert gradient_of(plain.sum(), x).isnan()
    assert gradient_of(focal(x, torch.ones(1), gamma=0.5), x).tolist() == [0.0]
    with pytest.raises(ConfigError, match=r"gamma must not be negative, got -1"):
        focal(x, torch.ones(1), gamma=-1)


def test_a_divergence_is_zero_for_classes_without_mass() -> None:
    log_q = torch.tensor([[0.0, -INF]], requires_grad=True)
    p = torch.tensor([[1.0, 0.0]])
    assert F.kl_div(log_q, p, reduction="batchmean").isnan()
    for target, is_log in ((p, False), (p.log(), True)):
        loss = stable_kl(log_q, target, log_target=is_log)
        assert loss.item() == 0.0
        assert gradient_of(loss, log_q).isfinite().all()


def test_a_divergence_has_finite_gradients_to_a_target_without_mass() -> None:
    p = torch.tensor([[1.0, 0.0, 0.0]], requires_grad=True)
    log_q = torch.tensor([[-0.1, -INF, -2.3]])
    plain = torch.where(p > 0, p * (p.log() - log_q), 0.0).sum()
    assert gradient_of(plain, p).isnan().any()
    assert gradient_of(stable_kl(log_q, p), p).isfinite().all()


def test_a_divergence_with_no_mass_only_in_the_input_is_large_but_finite() -> None:
    log_q = torch.tensor([[-INF, 0.0]], requires_grad=True)
    loss = stable_kl(log_q, torch.tensor([[0.5, 0.5]]))
    assert loss.isfinite()
    assert loss.item() > 1e37


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
def test_divergences_of_logits_probabilities_and_log_probabilities_agree(reduction: str) -> None:
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    log_q, log_p = a.log_softmax(-1), b.log_softmax(-1)
    each = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    expected = {"none": each, "mean": each.mean(), "sum": each.sum(), "batchmean": each.sum() / 3}[reduction]
    torch.testing.assert_close(stable_kl(log_q, log_p, log_target=True, reduction=reduction), expected)
    torch.testing.assert_close(stable_kl(log_q, log_p.exp(), reduction=reduction), expected)
    torch.testing.assert_close(stable_kl(a, b, from_logits=True, reduction=reduction), expected)


def test_a_divergence_has_finite_gradients_on_both_sides() -> None:
    a = torch.tensor([[1e4, -1e4, -INF]], requires_grad=True)
    b = torch.tensor([[-1e4, 1e4, -INF]], requires_grad=True)
    loss = stable_kl(a, b, from_logits=True)
    for gradient in torch.autograd.grad(loss, (a, b)):
        assert gradient.isfinite().all()


# --- segmentation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [dice, iou])
@pytest.mark.parametrize("smooth", [0.0, 1.0])
def test_an_empty_mask_predicted_as_empty_is_a_perfect_match(loss: type, smooth: float) -> None:
    x = torch.full((2, 1, 4, 4), -200.0, requires_grad=True)  # sigmoid is 0 there
    value = loss(x, torch.zeros(2, 1, 4, 4), smooth=smooth)
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert gradient_of(value, x).isfinite().all()


@pytest.mark.parametrize("loss", [dice, iou])
def test_perfect_masks_give_zero_and_opposite_masks_one(loss: type) -> None:
    y = torch.randint(0, 2, (3, 8, 8)).float()
    assert loss(y, y, from_logits=False, smooth=0.0).item() == pytest.approx(0.0, abs=1e-6)
    assert loss(1 - y, y, from_logits=False, smooth=0.0).item() == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="smooth must not be negative"):
        loss(y, y, smooth=-1.0)


@pytest.mark.parametrize("loss", [dice, iou])
def test_an_image_whose_sum_overflows_fp16_is_measured(loss: type) -> None:
    y = torch.ones(1, 1, 512, 512, dtype=torch.float16)
    assert y.sum().isinf()
    assert loss(y * 20, y).item() == pytest.approx(0.0, abs=1e-3)


def test_a_segmentation_mask_excludes_pixels() -> None:
    x, y = torch.randn(2, 6), torch.randint(0, 2, (2, 6)).float()
    mask = torch.tensor([True, True, True, True, False, False])
    expected = dice(x[:, :4], y[:, :4])
    x[:, 4:] = math.nan
    torch.testing.assert_close(dice(x, y, mask=mask), expected)


def test_structure_loss_accepts_images_without_channels_and_refuses_other_shapes() -> None:
    x, y = torch.randn(2, 8, 8), torch.randint(0, 2, (2, 8, 8)).float()
    torch.testing.assert_close(structure_loss(x, y), structure_loss(x.unsqueeze(1), y.unsqueeze(1)))
    with pytest.raises(UsageError, match=r"got \(2, 8, 8\) and \(2, 1, 8, 8\)"):
        structure_loss(x, y.unsqueeze(1))
    with pytest.raises(ConfigError, match="window must be an odd number of pixels, got 30"):
        structure_loss(x, y, window=30)


# --- embeddings -----------------------------------------------------------------------------------------------------


def test_latents_that_differ_only_in_size_have_no_normalized_error() -> None:
    x = torch.randn(4, 8)
    assert normalized_mse(x, 1e30 * x).item() == pytest.approx(0.0, abs=1e-12)
    assert normalized_mse(x, -x).item() == pytest.approx(4 / 8)
    mask = torch.tensor([True, True, False, False])
    torch.testing.assert_close(normalized_mse(x, x.flip(0), mask=mask), normalized_mse(x[:2], x.flip(0)[:2]))


def test_shared_and_separate_negatives_agree() -> None:
    q, k, negatives = torch.randn(3, 4), torch.randn(3, 4), torch.randn(5, 4)
    shared = info_nce(q, k, negatives)
    torch.testing.assert_close(info_nce(q, k, negatives.expand(3, 5, 4)), shared)
    unit = [F.normalize(v, dim=-1) for v in (q, k, negatives)]
    logits = torch.cat([(unit[0] * unit[1]).sum(-1, keepdim=True), unit[0] @ unit[2].T], -1) / 0.07
    torch.testing.assert_close(shared, F.cross_entropy(logits, torch.zeros(3, dtype=torch.long)))


def test_a_learned_scale_is_clamped_and_finite() -> None:
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    held = clip_loss(a, b, torch.tensor(1e38))
    torch.testing.assert_close(held, clip_loss(a, b, 100.0))
    torch.testing.assert_close(info_nce(a, b, temperature=torch.tensor(0.0)), info_nce(a, b, temperature=0.01))
    scale = torch.tensor(14.3, requires_grad=True)
    assert gradient_of(clip_loss(a, b, scale), scale).item() != 0.0
    with pytest.raises(ConfigError, match="temperature must be a positive number, got 0"):
        info_nce(a, b, temperature=0)


def test_zero_embeddings_give_the_chance_loss_and_zero_gradients() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    loss = clip_loss(x, torch.randn(4, 8))
    assert loss.item() == pytest.approx(math.log(4))
    assert gradient_of(loss, x).abs().max().item() == 0.0


# --- named terms ----------------------------------------------------------------------------------------------------


def test_terms_are_weighted_in_the_loss_and_reported_unweighted() -> None:
    text, latent = torch.tensor(2.0, requires_grad=True), torch.tensor([3.0], requires_grad=True)
    result = Loss(text=1.0, latent=0.1)(latent=latent, text=text)
    assert list(result) == ["loss", "text", "latent"]
    assert result["loss"].item() == pytest.approx(2.3)
    assert [result["text"].item(), result["latent"].item()] == [2.0, 3.0]
    assert not result["text"].requires_grad
    result["loss"].backward()
    assert text.grad is not None
    assert latent.grad is not None
    assert [text.grad.item(), latent.grad.item()] == [1.0, pytest.approx(0.1)]


def test_a_term_of_weight_zero_cannot_poison_the_loss() -> None:
    result = Loss(text=1.0, latent=0.0)(text=torch.tensor(2.0), latent=torch.tensor(math.nan))
    assert result["loss"].item() == 2.0
    assert find_bad_terms(result) == ("latent",)


def test_guard_accepts_the_result_and_names_the_bad_term() -> None:
    model = nn.Linear(3, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    criterion = Loss(text=1.0, latent=0.1)

    def training_step(x: Tensor) -> dict[str, Tensor]:
        out = model(x)
        return criterion(text=out.square().mean(), latent=out.sum().sqrt() * math.inf)

    weights = copy.deepcopy(model.state_dict())
    result = guard.step(training_step, torch.randn(4, 3))
    guard.flush()

    assert find_bad_terms(result) == ("latent",)
    assert guard.last is not None
    assert guard.last.skipped
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"text": torch.tensor(1.0)}, r"called with the terms text\. Give each term once"),
        ({"text": torch.tensor(1.0), "latent": torch.ones(2)}, r"'latent' must be a scalar tensor, got shape \(2,\)"),
        ({"text": 1.0, "latent": torch.tensor(1.0)}, r"'text' must be a scalar tensor, got float"),
    ],
)
def test_wrong_terms_are_refused_by_name(terms: dict[str, Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loss(text=1.0, latent=0.1)(**terms)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "at least one term"),
        ({"loss": 1.0}, "cannot have a term named 'loss'"),
        ({"text": 0.0, "latent": 0.0}, "every weight is 0, of text, latent"),
        ({"text": math.nan}, "weight of 'text' must be a finite number, got nan"),
    ],
)
def test_wrong_weights_are_refused_by_name(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loss(**weights)
