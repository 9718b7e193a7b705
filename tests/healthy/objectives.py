"""Objectives that are unusual from the start: zero, constant or negative losses, and terms that are ramped up."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, miss_sum, seeded
from healthy.scenario import Trial, scenario


@scenario
def vae_kl_warmup(trial: Trial) -> None:
    """A VAE whose KL term is brought in over 600 steps: the loss falls, then rises with the weight."""
    encoder, decoder = make_mlp(16, 32, 8), make_mlp(4, 32, 16)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    mixing = torch.randn(4, 16, generator=seeded(5))

    def loss(number: int) -> Tensor:
        x = (torch.randn(64, 4) @ mixing).tanh()
        mean, log_variance = encoder(x).chunk(2, 1)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return (decoder(z) - x).square().sum(1).mean() + min(1, number / 600) * divergence

    loop = trial.run(model, optimizer, 900, loss)
    trial.expect("last loss", loop.final, below=7.0)


@scenario
def mixup_on_midrun(trial: Trial) -> None:
    """Mixup is switched on at step 300: no classifier can reach the old loss on mixed labels."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=3.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(number: int) -> Tensor:
        x, y = task.draw(128)
        if number < 300:
            return F.cross_entropy(model(x), y)
        share, other = random.random(), torch.randperm(128)
        out = model(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=0.7)


@scenario
def hinge_perceptron(trial: Trial) -> None:
    """A hinge loss on separable points: exactly 0 on most batches from the start."""
    model, direction = nn.Linear(8, 1), torch.randn(8, generator=seeded(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(number: int) -> Tensor:
        x = torch.randn(2, 8)
        side = (x @ direction).sign()
        x = x + 0.5 * side[:, None] * direction / direction.norm()
        return F.relu(0.1 - model(x)[:, 0] * (x @ direction).sign()).mean()

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def constant_loss(trial: Trial) -> None:
    """A surrogate whose value is always 1; only its gradient means something."""
    model = make_mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        error = miss_sum(model, torch.randn(32, 8))
        return error - error.detach() + 1.0

    trial.run(model, optimizer, 600, loss)
    trial.expect("error", miss_sum(model, torch.randn(256, 8)).item(), below=1.0)


@scenario
def zero_surrogate(trial: Trial) -> None:
    """A surrogate whose value is exactly 0 with a gradient, as in PPO's first epoch."""
    model = make_mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        error = miss_sum(model, torch.randn(32, 8))
        return error - error.detach()

    trial.run(model, optimizer, 600, loss)
    trial.expect("error", miss_sum(model, torch.randn(256, 8)).item(), below=1.0)


@scenario
def kd_temperature(trial: Trial) -> None:
    """Distillation from a sure teacher at a temperature of 4: large losses with a floor that is not zero."""
    teacher, model = make_mlp(8, 32, 10), make_mlp(8, 16, 10)
    with torch.no_grad():
        teacher[-1].weight.mul_(20)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 8)
        wanted = (teacher(x).detach() / 4).softmax(1)
        return 16 * F.kl_div((model(x) / 4).log_softmax(1), wanted, reduction="batchmean")

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=0.7 * loop.losses[0])


@scenario
def loss_weight_ramp(trial: Trial) -> None:
    """A consistency term ramped from 0 to 10, as in the pi-model: the loss rises by design."""
    model, task = make_mlp(8, 32, 4), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        x, y = task.draw(32)
        unlabelled = torch.randn(64, 8) * 2
        one = model(unlabelled + 0.3 * torch.randn_like(unlabelled))
        other = model(unlabelled + 0.3 * torch.randn_like(unlabelled)).detach()
        weight = 10 * math.exp(-5 * (1 - min(1, number / 500)) ** 2)
        return F.cross_entropy(model(x), y) + weight * (one - other).square().mean()

    loop = trial.run(model, optimizer, 800, loss)
    trial.expect("last loss", loop.final, below=1.0)


@scenario
def aux_loss_on(trial: Trial) -> None:
    """A second objective is switched on when the first has converged."""
    model = make_mlp(8, 64, 2)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 8)
        out = model(x)
        second = (out[:, 1] - 3 * x.prod(1).clamp(-3, 3)).square().mean()
        return (out[:, 0] - x.sum(1)).square().mean() + (number >= 400) * second

    loop = trial.run(model, optimizer, 800, loss)
    trial.expect("last loss", loop.final, below=6.0)


@scenario
def focal_imbalanced(trial: Trial) -> None:
    """Focal loss with one positive in a hundred: almost nothing most of the time, and a rare blow."""
    model = make_mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 8)
        y = (x.sum(1) > 7).float()
        entropy = F.binary_cross_entropy_with_logits(model(x)[:, 0], y, reduction="none")
        return ((1 - (-entropy).exp()) ** 2 * entropy).mean()

    loop = trial.run(model, optimizer, 800, loss)
    trial.expect("last loss", loop.final, below=0.02)
