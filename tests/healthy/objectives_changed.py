"""Objectives that the program changes in mid-run: another scale, another sign, another term, another temperature."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, measure_accuracy, miss_sines, miss_sum
from healthy.scenario import Trial, scenario


@scenario
def loss_times_a_thousand(trial: Trial) -> None:
    """From step 300 on the loss is counted a thousandfold. Adam does not mind; whoever compares levels does."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, scale: float) -> Tensor:
        return scale * miss_sines(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, torch.randn(32, 8), 1.0 if number < 300 else 1000.0)
    trial.expect("last loss", loop.final, below=1000 * 0.3)


@scenario
def sum_for_mean(trial: Trial) -> None:
    """The reduction changes from mean to sum at step 300, and the rate is divided by the batch size to match."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loss(x: Tensor, y: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(model(x), y, reduction=reduction)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        if number == 300:
            optimizer.param_groups[0]["lr"] = 0.1 / 128
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(128)
        loop.step(loss, *task.draw(128), "mean" if number < 300 else "sum")
    trial.expect("last loss", loop.final, above=10.0, below=128 * 0.6)


@scenario
def longer_sequences(trial: Trial) -> None:
    """The sequences grow from 8 to 64 at step 250, and the loss is summed over them: a leap of a hundredfold."""
    model, head = nn.GRU(3, 16, batch_first=True), nn.Linear(16, 3)
    both = nn.ModuleList([model, head])
    optimizer = torch.optim.Adam(both.parameters(), 1e-2)

    def loss(x: Tensor) -> Tensor:
        hidden, _ = model(x)
        return (head(hidden) - x.cumsum(1)).square().sum(1).mean()

    loop = trial.loop(both, optimizer)
    for number in range(450):
        loop.step(loss, 0.3 * torch.randn(8, 8 if number < 250 else 64, 3))
    trial.expect("jump", loop.losses[250], above=30 * loop.losses[249])
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[250])


@scenario
def label_smoothing_on(trial: Trial) -> None:
    """Label smoothing is switched on at step 300: a loss of 0.001 becomes 0.5 at once, and cannot come back."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, y: Tensor, smoothing: float) -> Tensor:
        return F.cross_entropy(model(x), y, label_smoothing=smoothing)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, *task.draw(64), 0.0 if number < 300 else 0.1)
    trial.expect("jump", loop.losses[300], above=100 * loop.losses[299])
    trial.expect("accuracy", measure_accuracy(model, task.draw(512)), above=0.95)


@scenario
def contrastive_temperature_lowered(trial: Trial) -> None:
    """The temperature of a contrastive loss falls from 0.5 to 0.02 in one go: every mistake costs 25 times as much."""
    model, task = make_mlp(16, 32, 8), Clusters(50, 16)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, temperature: float) -> Tensor:
        one, other = (F.normalize(model(x + 0.7 * torch.randn_like(x))) for _ in range(2))
        return F.cross_entropy(one @ other.T / temperature, torch.arange(len(x)))

    loop = trial.loop(model, optimizer)
    for number in range(600):
        x = task.centres[torch.randperm(50)[:32]]
        loop.step(loss, x, 0.5 if number < 250 else 0.02)
    trial.expect("jump", max(loop.losses[250:255]), above=1.2 * loop.losses[249])
    trial.expect("last loss", loop.final, below=max(loop.losses[250:255]))


@scenario
def unlearning(trial: Trial) -> None:
    """At step 400 the objective is turned around for one class: its loss is to rise, and the others are to stay."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, y: Tensor, forget: bool) -> Tensor:
        each = F.cross_entropy(model(x), y, reduction="none")
        if not forget:
            return each.mean()
        gone = y == 3
        return each[~gone].mean() - each[gone].clamp(max=8.0).mean()

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, *task.draw(64), number >= 400)
    kept, gone = torch.randint(0, 3, (256,)), torch.full((256,), 3)
    trial.expect("accuracy on what is kept", measure_accuracy(model, (task.near(kept), kept)), above=0.95)
    trial.expect("accuracy on what is forgotten", measure_accuracy(model, (task.near(gone), gone)), below=0.05)


@scenario
def gradient_ascent_for_good(trial: Trial) -> None:
    """The step function returns a score and the optimizer has `maximize=True`: rising is what is asked for."""
    model, task = make_mlp(8, 32, 4), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, maximize=True)

    def score(x: Tensor, y: Tensor) -> Tensor:
        return 100 * (1 + model(x).log_softmax(1).gather(1, y[:, None]).mean())

    loop = trial.loop(model, optimizer)
    for _ in range(400):
        loop.step(score, *task.draw(64))
    trial.expect("first score", loop.losses[0], below=0.0)
    trial.expect("last score", loop.final, above=90.0)


@scenario
def likelihood_crosses_zero(trial: Trial) -> None:
    """The negative log-likelihood of a density falls through zero to -4; near zero a change of 1 is any multiple."""
    model = make_mlp(2, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(x: Tensor) -> Tensor:
        mean, log_scale = model(x).chunk(2, 1)
        y = x.prod(1, keepdim=True).tanh() + 0.003 * torch.randn(len(x), 1)
        return (0.5 * ((y - mean) / log_scale.exp()).square() + log_scale).mean() + 0.5 * math.log(2 * math.pi)

    loop = trial.loop(model, optimizer)
    for _ in range(800):
        loop.step(loss, torch.randn(64, 2))
    trial.expect("first loss", loop.losses[0], above=0.5)
    trial.expect("last loss", loop.final, below=-1.0)


@scenario
def offset_drifts(trial: Trial) -> None:
    """A normaliser that no weight enters is added to the loss and grows: up for ever, while the error falls."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, offset: float) -> Tensor:
        return miss_sum(model, x) + offset

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, torch.randn(32, 8), 1e-4 * number**2)
    trial.expect("rise", loop.final, above=3 * min(loop.losses))
    trial.expect("error", miss_sum(model, torch.randn(256, 8)).item(), below=0.3)


@scenario
def penalty_raised(trial: Trial) -> None:
    """A sparsity penalty is raised three-hundredfold at step 300: the loss leaps, the weights shrink, the fit gives."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, weight: float) -> Tensor:
        return miss_sum(model, x) + weight * sum(p.abs().sum() for p in model.parameters())

    loop = trial.loop(model, optimizer)
    for number in range(700):
        loop.step(loss, torch.randn(32, 8), 1e-4 if number < 300 else 3e-2)
    trial.expect("jump", loop.losses[300], above=10 * loop.losses[299])
    trial.expect("error", miss_sum(model, torch.randn(256, 8)).item(), below=4.0)


@scenario
def weight_decay_raised(trial: Trial) -> None:
    """Weight decay goes from 0 to 10 at step 300: the weights shrink by half in a hundred steps, and the loss rises."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number == 300:
            optimizer.param_groups[0]["weight_decay"] = 10.0
        loop.step(loss, *task.draw(64))
    trial.expect("rise", loop.final, above=5 * loop.losses[299])
    trial.expect("accuracy", measure_accuracy(model, task.draw(512)), above=0.9)


@scenario
def lagrangian_multiplier(trial: Trial) -> None:
    """A constraint is priced by a multiplier that rises until it holds: the loss rises with the price, then settles."""
    model, price = make_mlp(6, 32, 1), torch.zeros(())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, price: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        excess = out.square().mean() - 1.0  # the outputs must be small; the target's are not
        return (out - 3 * x.sum(1, keepdim=True)).square().mean() + price * excess, excess.detach()

    loop = trial.loop(model, optimizer)
    for _ in range(900):
        _, excess = loop.step(loss, torch.randn(64, 6), price)
        price = (price + 0.05 * excess).clamp(min=0.0)
    trial.effects["price"] = price.item()
    trial.expect("excess", (model(torch.randn(512, 6)).square().mean() - 1).item(), below=1.0)
    trial.expect("price", price.item(), above=1.0)
