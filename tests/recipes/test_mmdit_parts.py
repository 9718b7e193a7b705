"""What the mmdit recipe is made of: losses as the document writes them, chords on a sphere, a model that can mask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from steadygrad_recipes.mmdit.config import DiffusionConfig, LossConfig, ModelConfig, SamplingConfig
from steadygrad_recipes.mmdit.diffusion import Hidden, draw_times, find_clean, go_back, hide, onto_sphere
from steadygrad_recipes.mmdit.losses import JointLoss
from steadygrad_recipes.mmdit.metrics import place_on_sphere, take_from_sphere
from steadygrad_recipes.mmdit.model import MMDiT, Shapes, group_parameters
from steadygrad_recipes.mmdit.sampling import draw_samples, spell

SHAPES = Shapes(vocab_size=11, text_length=6, num_latents=3, latent_dim=8)
TINY = ModelConfig(hidden_size=16, num_layers=2, num_heads=2)


def make_hidden(num: int = 4, prediction: str = "flow") -> Hidden:
    words = torch.randint(0, 11, (num, 6))
    real = torch.arange(6) < torch.randint(2, 7, (num, 1))
    return hide(words, real, onto_sphere(torch.randn(num, 3, 8)), mask_token=11, prediction=prediction)


def compute_as_written(
    text_logits: Tensor, text_target: Tensor, text_mask: Tensor, latent_pred: Tensor, latent_target: Tensor
) -> tuple[Tensor, Tensor]:
    """The document's two losses, word for word."""
    eps = 1e-8
    vocab_size = text_logits.shape[-1]
    text_loss_unmasked = F.cross_entropy(
        text_logits.view(-1, vocab_size), text_target.view(-1), ignore_index=-100, reduction="none"
    )
    mask_sum = text_mask.sum().clamp(min=1) + eps
    text_loss = (text_loss_unmasked * text_mask.view(-1)).sum() / mask_sum
    text_loss = torch.clamp(text_loss, max=100.0)
    latent_pred_norm = F.normalize(latent_pred, p=2, dim=-1, eps=eps)
    latent_target_norm = F.normalize(latent_target, p=2, dim=-1, eps=eps)
    latent_loss = F.mse_loss(latent_pred_norm, latent_target_norm)
    return text_loss, torch.clamp(latent_loss, max=100.0)


# --- losses -------------------------------------------------------------------------------------------------------


def test_both_losses_are_those_of_the_document() -> None:
    hidden = make_hidden()
    logits, prediction = torch.randn(4, 6, 11, dtype=torch.float64), torch.randn(4, 3, 8, dtype=torch.float64)
    text, latent = compute_as_written(logits, hidden.words, hidden.is_hidden, prediction, hidden.target.double())

    terms = JointLoss(LossConfig())(logits, prediction, hidden)

    torch.testing.assert_close(terms["text_loss"], text, rtol=1e-6, atol=0)  # its 1e-8 in the divisor is all
    torch.testing.assert_close(terms["latent_loss"], latent, rtol=1e-6, atol=0)
    torch.testing.assert_close(terms["loss"], 1.0 * text + 0.1 * latent, rtol=1e-6, atol=0)


def test_loss_scale_multiplies_the_sum_and_not_the_terms() -> None:
    hidden = make_hidden()
    logits, prediction = torch.randn(4, 6, 11), torch.randn(4, 3, 8)
    plain = JointLoss(LossConfig())(logits, prediction, hidden)

    scaled = JointLoss(LossConfig(loss_scale=8.0))(logits, prediction, hidden)

    torch.testing.assert_close(scaled["loss"], 8 * plain["loss"])
    assert torch.equal(scaled["text_loss"], plain["text_loss"])


def test_a_batch_in_which_nothing_is_hidden_has_a_zero_loss_with_a_gradient() -> None:
    words = torch.zeros(2, 6, dtype=torch.long)
    hidden = make_hidden(2)
    nothing = Hidden(**{**vars(hidden), "words": words, "is_hidden": torch.zeros(2, 6, dtype=torch.bool)})
    logits = torch.randn(2, 6, 11, requires_grad=True)

    terms = JointLoss(LossConfig(latent_loss_weight=0.0))(logits, torch.randn(2, 3, 8), nothing)
    terms["loss"].backward()

    assert terms["text_loss"] == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_latents_beyond_the_range_of_squares_give_a_finite_loss_only_when_they_are_normalised() -> None:
    hidden = make_hidden()
    huge = torch.full((4, 3, 8), 1e25, requires_grad=True)

    def compare(*, normalize: bool) -> Tensor:
        config = LossConfig(normalize_latents=normalize, ceiling=math.inf)
        return JointLoss(config)(torch.randn(4, 6, 11), huge, hidden)["latent_loss"]

    assert compare(normalize=False).isinf()
    assert compare(normalize=True).isfinite()


def test_the_losses_are_held_at_100() -> None:
    hidden = make_hidden()
    far = torch.full((4, 6, 11), 1e4)
    far.scatter_(2, hidden.words.unsqueeze(-1), -1e4)

    assert JointLoss(LossConfig())(far, torch.randn(4, 3, 8), hidden)["text_loss"] == 100.0
    plain = LossConfig(normalize_latents=False)
    assert JointLoss(plain)(far, torch.full((4, 3, 8), 1e5), hidden)["latent_loss"] == 100.0


@pytest.mark.parametrize("normalize", [True, False])
def test_a_nan_is_not_hidden_by_the_ceiling_which_takes_no_gradient_from_it(normalize: bool) -> None:
    prediction = torch.randn(4, 3, 8)
    prediction[0, 0, 0] = math.nan
    prediction.requires_grad_()

    found = JointLoss(LossConfig(normalize_latents=normalize))(torch.randn(4, 6, 11), prediction, make_hidden())
    found["loss"].backward()

    assert found["loss"].isnan()
    assert prediction.grad is not None
    assert prediction.grad[0, 0, 0].isnan()
    assert prediction.grad[1:].all()


# --- diffusion ----------------------------------------------------------------------------------------------------


def test_times_are_in_every_part_of_the_unit_interval() -> None:
    times = draw_times(64, torch.device("cpu"))

    assert times.min() > 0
    assert times.max() <= 1
    assert torch.histc(times, 16, 0, 1).tolist() == [4.0] * 16


def test_only_words_are_hidden_and_by_their_share() -> None:
    words = torch.randint(0, 11, (512, 6))
    real = torch.arange(6).expand(512, 6) < 4
    hidden = hide(words, real, onto_sphere(torch.randn(512, 3, 8)), mask_token=11)

    assert not (hidden.is_hidden & ~real).any()
    assert torch.equal(hidden.tokens == 11, hidden.is_hidden)
    assert torch.equal(hidden.tokens[~hidden.is_hidden], words[~hidden.is_hidden])
    late, early = hidden.text_time > 0.8, hidden.text_time < 0.2
    shares = [float(hidden.is_hidden[rows][:, :4].float().mean()) for rows in (late, early)]
    assert shares[0] == pytest.approx(0.9, abs=0.08)  # 400 draws: three sigma are 0.045, of 0.3 in the time
    assert shares[1] == pytest.approx(0.1, abs=0.08)


@pytest.mark.parametrize("prediction", ["flow", "epsilon"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_direction_of_the_true_answer_gives_the_latents_back(prediction: str, scale: float) -> None:
    clean, times = onto_sphere(torch.randn(64, 3, 8)), torch.rand(64) * 0.98 + 0.01
    hidden = hide(torch.zeros(64, 6).long(), torch.ones(64, 6).bool(), clean, mask_token=11, prediction=prediction)
    share = times.view(-1, 1, 1)
    noise = hidden.target + clean if prediction == "flow" else hidden.target
    noisy = (1 - share) * clean + share * noise

    found = find_clean(noisy, scale * hidden.target, times, prediction)

    # the noisy point is 1e-2 or more of the way from the noise: rounding of 1e-7 grows by 1e2 at most, twice
    torch.testing.assert_close(found, clean, rtol=0, atol=2e-3)


def test_going_back_stays_on_the_chord() -> None:
    clean, noise = onto_sphere(torch.randn(5, 3, 8)), onto_sphere(torch.randn(5, 3, 8))
    noisy = 0.4 * clean + 0.6 * noise

    torch.testing.assert_close(go_back(noisy, clean, 0.6, 0.3), 0.7 * clean + 0.3 * noise, rtol=0, atol=1e-5)
    assert torch.equal(go_back(noisy, clean, 0.6, 0.0), clean)


def test_an_answer_of_zero_leaves_finite_latents() -> None:
    noisy = onto_sphere(torch.randn(2, 3, 8))

    for prediction in ("flow", "epsilon"):
        assert find_clean(noisy, torch.zeros(2, 3, 8), torch.ones(2), prediction).isfinite().all()


# --- model --------------------------------------------------------------------------------------------------------


def make_model(**settings: object) -> MMDiT:
    return MMDiT(ModelConfig(**{"hidden_size": 16, "num_layers": 2, "num_heads": 2, **settings}), SHAPES)  # type: ignore[arg-type]


def ask_model(model: MMDiT, tokens: Tensor, real: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    time = torch.full((len(tokens),), 0.5)
    answers: tuple[Tensor, Tensor] = model(tokens, real, latents, time, time)
    return answers


def test_what_stands_on_padding_changes_nothing() -> None:
    model, latents = make_model(), torch.randn(2, 3, 8)
    tokens = torch.randint(0, 11, (2, 6))
    real = torch.arange(6).expand(2, 6) < 4
    other = torch.where(real, tokens, (tokens + 1) % 11)

    one, two = (ask_model(model, words, real, latents) for words in (tokens, other))

    torch.testing.assert_close(one[0][:, :4], two[0][:, :4])
    torch.testing.assert_close(one[1], two[1])


def test_each_side_sees_the_other() -> None:
    model, real = make_model(), torch.ones(2, 6, dtype=torch.bool)
    tokens, latents = torch.randint(0, 11, (2, 6)), torch.randn(2, 3, 8)
    before = ask_model(model, tokens, real, latents)

    assert not torch.allclose(ask_model(model, (tokens + 1) % 11, real, latents)[1], before[1])
    assert not torch.allclose(ask_model(model, tokens, real, -latents)[0], before[0])


def test_every_parameter_has_a_gradient_at_the_first_step() -> None:
    model, hidden = make_model(), make_hidden(16)
    answers = model(hidden.tokens, hidden.real, hidden.noisy, hidden.text_time, hidden.latent_time)

    JointLoss(LossConfig())(*answers, hidden)["loss"].backward()

    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_queries_and_keys_of_any_size_give_finite_bf16_attention_only_with_their_norm() -> None:
    tokens, real, latents = torch.randint(0, 11, (2, 6)), torch.ones(2, 6, dtype=torch.bool), torch.randn(2, 3, 8)

    def largest_score(*, qk_norm: bool) -> float:
        model = make_model(qk_norm=qk_norm)
        stream = model.blocks[0].text
        with torch.no_grad():
            stream.qkv.weight.mul_(1e4)
            shifts = stream.modulate(torch.zeros(2, 16))
            query, key, _ = stream.project(model.words(tokens), shifts)
            assert all(a.isfinite().all() for a in ask_model(model, tokens, real, latents))
        return float((query @ key.mT).abs().max()) / math.sqrt(8)

    assert largest_score(qk_norm=False) > 1e5
    assert largest_score(qk_norm=True) < math.sqrt(8) + 1e-3  # |q| = |k| = sqrt(8)


def test_decay_is_for_matrices_only() -> None:
    model = make_model()
    decayed, others = group_parameters(model, 0.01)

    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    free = {names[id(p)] for p in others["params"]}  # type: ignore[attr-defined]
    assert {"words.weight", "word_places", "latent_places", "blocks.0.text.query_scale"} <= free
    assert all(p.dim() == 2 for p in decayed["params"])  # type: ignore[attr-defined]
    assert len(names) == len(decayed["params"]) + len(others["params"])  # type: ignore[arg-type]


def test_a_model_of_1024_by_23_has_the_892_million_parameters_that_broke() -> None:
    with torch.device("meta"):
        model = MMDiT(ModelConfig(hidden_size=1024, num_layers=23, num_heads=16), Shapes(8192, 256, 32, 64))

    assert sum(p.numel() for p in model.parameters()) == pytest.approx(892e6, rel=0.01)


# --- samples ------------------------------------------------------------------------------------------------------


def test_latents_come_back_from_the_sphere_with_their_mean_and_length() -> None:
    model = make_model()
    model.latent_mean.fill_(5.0)
    model.latent_std.fill_(0.1)
    latents = 5.0 + 0.1 * onto_sphere(torch.randn(4, 3, 8))

    torch.testing.assert_close(take_from_sphere(model, place_on_sphere(model, latents)), latents, rtol=1e-5, atol=1e-5)


def test_samples_have_no_hidden_word_left_and_lengths_that_were_learned() -> None:
    model = make_model()
    model.length_counts[3] = 1.0
    rows = draw_samples(model, SamplingConfig(num_samples=5, num_steps=4), DiffusionConfig())

    assert rows.mask.sum(1).tolist() == [3] * 5
    assert int(rows.tokens.max()) < model.mask_token
    assert rows.latents.shape == (5, 3, 8)
    assert rows.latents.isfinite().all()


def test_samples_depend_on_their_seed_and_on_nothing_else() -> None:
    model = make_model()

    def draw(seed: int) -> Tensor:
        torch.rand(seed + 1)
        return draw_samples(model, SamplingConfig(num_steps=3, seed=seed), DiffusionConfig()).latents

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_what_is_given_stays_when_the_other_side_is_drawn() -> None:
    model = make_model()
    given = draw_samples(model, SamplingConfig(num_samples=2, num_steps=2), DiffusionConfig())
    sampling = SamplingConfig(num_steps=3)

    by_text = draw_samples(model, sampling, DiffusionConfig(), texts=given)
    by_latents = draw_samples(model, sampling, DiffusionConfig(), latents=given.latents)

    assert torch.equal(by_text.tokens, given.tokens)
    torch.testing.assert_close(by_latents.latents, given.latents, rtol=1e-4, atol=1e-5)


def test_texts_are_spelled_by_words_or_by_ids() -> None:
    model = make_model()
    rows = draw_samples(model, SamplingConfig(num_samples=1, num_steps=1), DiffusionConfig())

    ids = rows.tokens[0][rows.mask[0]].tolist()
    assert spell(rows, None) == [" ".join(map(str, ids))]
    assert spell(rows, tuple("abcdefghijk")) == [" ".join("abcdefghijk"[i] for i in ids)]
