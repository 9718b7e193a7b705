"""Errors in the targets of a loss, and healthy programs whose targets look out of range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]
LONG = 102
"""Steps until a second look at the targets of a regression."""


def _train(loss: Any, batches: Iterator[tuple[Tensor, ...]]) -> Train:
    def train(guard: Any) -> None:
        for batch in batches:
            guard.step(loss, *batch)

    return train


def _make_values(num: int, width: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and standardised values that depend on them."""
    weight = torch.randn(8, width) / 2
    for _ in range(num):
        x = torch.randn(16, 8)
        yield x, (x @ weight).sin() * 1.4


# --- errors -----------------------------------------------------------------------------------------------------------


@case("unreachable_targets", "discuss.pytorch.org: a ReLU after the last layer, and standardised targets")
def relu_at_the_end(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 16, 1), nn.ReLU() if bug else nn.Identity())
    return model, adam(model), _train(lambda x, y: F.mse_loss(model(x), y), _make_values(LONG))


@case("unreachable_targets", "stackoverflow: an autoencoder with a sigmoid, and images of mean 0 and deviation 1")
def sigmoid_for_standardised_images(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 4, 8), nn.Sigmoid() if bug else nn.Identity())
    return model, adam(model), _train(lambda x, _: F.smooth_l1_loss(model(x), x), _make_values(LONG))


@case("unreachable_targets", "a tanh generator, and images from 0 to 255")
def tanh_for_bytes(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 16, 8), nn.Tanh())

    def loss(x: Tensor, _: Tensor) -> Tensor:
        image = x.tanh()
        return F.mse_loss((image + 1) * 127.5 if bug else image, model(x))  # the target comes first

    return model, adam(model), _train(loss, _make_values(LONG))


@case("unreachable_targets", "the mean squared error of a softmax and the number of the class")
def softmax_for_class_numbers(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 16, 4), nn.Softmax(1))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), (y[:, None].expand(-1, 4) if bug else F.one_hot(y, 4)).float())

    return model, adam(model), _train(loss, clusters(LONG))


@case("unreachable_targets", "stackoverflow: labels of -1 and 1 for a binary cross entropy, which grows negative")
def signs_for_a_cross_entropy(bug: bool) -> Built:
    model = mlp(8, 16, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        labels = (y > 1).float()
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], labels * 2 - 1 if bug else labels)

    return model, adam(model), _train(loss, clusters(5))


@case("unreachable_targets", "discuss.pytorch.org: masks of 0 and 255 for a binary cross entropy")
def bytes_for_a_mask(bug: bool) -> Built:
    model = nn.Conv2d(1, 1, 3, padding=1)

    def train(guard: Any) -> None:
        for _ in range(5):
            x = torch.randn(4, 1, 8, 8)
            mask = (F.avg_pool2d(x, 3, 1, 1) > 0).float() * (255 if bug else 1)
            loss = F.binary_cross_entropy_with_logits(model(x), mask)
            guard.step(loss)

    return model, adam(model), train


@case("unreachable_targets", "labels of 0 and 1 for a cosine embedding loss, which wants -1 and 1")
def bits_for_pairs(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        same = (y == y.roll(1)).float()
        return F.cosine_embedding_loss(model(x), model(x.roll(1, 0)), same if bug else 2 * same - 1)

    return model, adam(model), _train(loss, clusters(5))


@case("unreachable_targets", "labels of 0 and 1 for a ranking loss, which wants -1 and 1")
def bits_for_ranks(bug: bool) -> Built:
    model, criterion = mlp(8, 16, 1), nn.MarginRankingLoss(margin=0.1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        score = model(x)[:, 0]
        above = (y > y.roll(1)).float()
        return criterion(score, score.roll(1), above if bug else 2 * above - 1)

    return model, adam(model), _train(loss, clusters(5))


@case("unreachable_targets", "kl_div gets log-probabilities as its target, without log_target=True")
def logs_for_probabilities(bug: bool) -> Built:
    model, teacher = mlp(8, 16, 4), mlp(8, 16, 4)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x).log_softmax(1)
        return F.kl_div(model(x).log_softmax(1), target, reduction="batchmean", log_target=not bug)

    return model, adam(model), _train(loss, clusters(5))


@case("wrong_loss_input", "kl_div gets probabilities: stackoverflow, 'KL divergence is negative'")
def probabilities_for_logs(bug: bool) -> Built:
    model, teacher = mlp(8, 16, 4), mlp(8, 16, 4)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x).softmax(1)
        logits = model(x)
        return F.kl_div(logits.softmax(1) if bug else logits.log_softmax(1), target, reduction="batchmean")

    return model, adam(model), _train(loss, clusters(5))


@case("wrong_loss_input", "ctc_loss gets logits, without a log_softmax")
def logits_for_ctc(bug: bool) -> Built:
    model = nn.Linear(8, 6)

    def train(guard: Any) -> None:
        for _ in range(5):
            labels = torch.randint(1, 6, (4, 3))
            x = F.one_hot(labels.repeat_interleave(3, 1), 8).float() + 0.1 * torch.randn(4, 9, 8)
            scores = model(x.transpose(0, 1))  # [time, samples, classes]
            scores = scores if bug else scores.log_softmax(2)
            guard.step(F.ctc_loss(scores, labels, torch.full((4,), 9), torch.full((4,), 3)))

    return model, adam(model), train


# --- programs that look like them -------------------------------------------------------------------------------------


@case(None, "missing labels are -1, and a mask takes them out afterwards, or a weight at once")
def missing_labels(bug: bool) -> Built:
    model = mlp(8, 16, 3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        labels = F.one_hot(y, 4)[:, :3].float().masked_fill(torch.rand(len(y), 3) < 0.4, -1.0)
        known = (labels >= 0).float()
        each = F.binary_cross_entropy_with_logits(model(x), labels, reduction="none")
        squares = F.mse_loss(model(x).sigmoid(), labels, reduction="none")
        weighted = F.binary_cross_entropy_with_logits(model(x), labels, weight=known)
        return ((each + squares) * known).sum() / known.sum() + weighted

    return model, adam(model), _train(loss, clusters(LONG))


@case(None, "a discriminator with noisy labels: 0.7 to 1.2 for real, 0 to 0.3 for made up")
def noisy_labels(bug: bool) -> Built:
    model = mlp(8, 16, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        is_real = (y > 1).float()
        labels = torch.where(is_real > 0, 0.7 + 0.5 * torch.rand(len(y)), 0.3 * torch.rand(len(y)))
        return F.binary_cross_entropy_with_logits(model(x)[:, 0], labels)

    return model, adam(model), _train(loss, clusters(LONG))


@case(None, "a background was subtracted, so targets scatter around 0; a ReLU keeps the output positive")
def subtracted_background(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 16, 8), nn.ReLU())

    def loss(x: Tensor, _: Tensor) -> Tensor:
        signal = x.clamp(min=0) ** 2
        return F.mse_loss(model(x), signal + 0.2 * torch.randn_like(x))

    return model, adam(model), _train(loss, _make_values(LONG))


@case(None, "images overshoot the range of a tanh a little after they were scaled")
def overshooting_images(bug: bool) -> Built:
    model = nn.Sequential(mlp(8, 16, 8), nn.Tanh())
    return model, adam(model), _train(lambda x, _: F.mse_loss(model(x), 1.1 * (2 * x).tanh()), _make_values(LONG))


@case(None, "pairs that do not count are labelled 0 beside -1 and 1")
def pairs_left_out(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        sign = torch.where(y == 0, 0, 2 * (y == y.roll(1)).long() - 1)
        return F.cosine_embedding_loss(model(x), model(x.roll(1, 0)), sign)

    return model, adam(model), _train(loss, clusters(LONG))


@case(None, "a VQ-VAE whose encoder ends in a ReLU: the codes start around 0 and follow it")
def codes_that_follow(bug: bool) -> Built:
    model = nn.ModuleDict(
        {"encoder": nn.Sequential(mlp(8, 32, 4), nn.ReLU()), "codes": nn.Embedding(16, 4), "decoder": mlp(4, 32, 8)}
    )
    nn.init.uniform_(model["codes"].weight, -1 / 16, 1 / 16)

    def loss(x: Tensor, _: Tensor) -> Tensor:
        z = model["encoder"](x)
        code = model["codes"](torch.cdist(z, model["codes"].weight).argmin(1))
        matched = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(model["decoder"](z + (code - z).detach()), x) + matched

    return model, adam(model, 3e-3), _train(loss, clusters(2 * LONG))


@case(None, "a hinge on distances: what a ReLU returns is compared with zeros")
def one_sided(bug: bool) -> Built:
    model = mlp(8, 16, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(F.relu(1 - model(x)), torch.zeros(len(x), 1)) + F.mse_loss(model(x).exp(), y[:, None].float())

    return model, adam(model), _train(loss, clusters(LONG))
