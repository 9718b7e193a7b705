"""Steps of unusual form: accumulation of any length, a sharpness-aware step, noise or surgery on the gradients."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, miss_sines, miss_sum
from healthy.scenario import Trial, scenario


@scenario
def accumulation_variable(trial: Trial) -> None:
    """One to sixteen microbatches a step, not divided: gradients sixteen times as large from one step to the next."""
    model, source = make_mlp(8, 64, 1), random.Random(3)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    loop = trial.loop(model, optimizer)
    for _ in range(500):
        for _ in range(source.choice([1, 1, 2, 5, 9, 16])):
            loop.backward(lambda: miss_sum(model, torch.randn(8, 8)))
        loop.step()
    trial.expect("last loss", loop.final, below=0.4)


@scenario
def accumulation_begins_midrun(trial: Trial) -> None:
    """From one microbatch to eight at step 200, with the rate raised to match, and another task at step 350."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loss(x: Tensor, y: Tensor, share: float) -> Tensor:
        return share * F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(500):
        count = 1 if number < 200 else 8
        optimizer.param_groups[0]["lr"] = 0.1 if number < 200 else 0.3
        for _ in range(count):
            x, y = task.draw(16)
            loop.backward(loss, x, y if number < 350 else 3 - y, 1 / count)
        loop.step()
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def accumulation_of_unlike_tasks(trial: Trial) -> None:
    """Each step adds up three losses of 0.01, 1 and 100 as microbatches, through `guard.backward(loss)`."""
    trunk, heads = make_mlp(8, 48, 16), nn.ModuleList(nn.Linear(16, 1) for _ in range(3))
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    loop = trial.loop(model, optimizer)
    for number in range(350):
        x = torch.randn(32, 8) * (1 if number < 200 else 2)
        for task, head in enumerate(heads):
            wanted = 10.0 ** (task - 1) * x[:, task : task + 2].sum(1, keepdim=True)
            loop.backward(F.mse_loss(head(trunk(x)), wanted))
        loop.step()
    trial.expect("largest of the last losses", max(loop.losses[-50:]), below=max(loop.losses))


@scenario
def sam_on_midrun(trial: Trial) -> None:
    """Sharpness-aware steps from 250 on: two backward passes and an ascent of the weights in between, then back."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loop = trial.loop(model, optimizer)
    for number in range(500):
        x, y = task.draw(64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if number >= 250:
            moves = ascend(model, 0.5)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves):
                    weight.sub_(move)
        loop.step()
        loop.losses.append(loss.item())
    trial.expect("rise", loop.final, above=1.1 * loop.losses[249])
    trial.expect("last loss", loop.final, below=1.0)


def ascend(model: nn.Module, radius: float) -> list[Tensor]:
    """Move the weights uphill along their gradients by `radius` in all, and return the moves."""
    with torch.no_grad():
        slopes = [weight.grad.clone() for weight in model.parameters()]
        norm = torch.stack([slope.norm() for slope in slopes]).norm()
        moves = [radius / (norm + 1e-12) * slope for slope in slopes]
        for weight, move in zip(model.parameters(), moves):
            weight.add_(move)
    return moves


@scenario
def sam_in_the_function(trial: Trial) -> None:
    """The same inside the function, without touching a weight: the loss returned is that of a worse neighbour."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loss(x: Tensor, y: Tensor, radius: float) -> Tensor:
        weights = dict(model.named_parameters())
        slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(weights.values()))
        norm = torch.stack([slope.norm() for slope in slopes]).norm() + 1e-12
        moved = {name: weight + radius / norm * slope for (name, weight), slope in zip(weights.items(), slopes)}
        return F.cross_entropy(functional_call(model, moved, (x,)), y)

    loop = trial.loop(model, optimizer)
    for number in range(500):
        loop.step(loss, *task.draw(64), 0.0 if number < 250 else 1.0)
    trial.expect("rise", max(loop.losses[250:260]), above=1.3 * max(loop.losses[240:250]))
    trial.expect("last loss", loop.final, below=1.2)


@scenario
def gradient_noise_on(trial: Trial) -> None:
    """From step 250 on noise of twenty times the gradient is added to it, as private training does: the loss rises."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=1.5, noise=0.7)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loop = trial.loop(model, optimizer)
    for number in range(600):
        x, y = task.draw(64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if number >= 250:
            for weight in model.parameters():
                weight.grad.add_(0.2 * torch.randn_like(weight))
        loop.step()
        loop.losses.append(loss.item())
    trial.expect("last loss", loop.final, below=0.5)


@scenario
def weight_noise_in_the_forward(trial: Trial) -> None:
    """Weights with noise that grows from step 250 on: the loss rises, and each forward draws another network."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, noise: float) -> Tensor:
        drawn = {name: weight + noise * torch.randn_like(weight) for name, weight in model.named_parameters()}
        return (functional_call(model, drawn, (x,)) - x.sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, torch.randn(64, 8), 0.0 if number < 250 else min(0.1, (number - 250) / 1000))
    trial.expect("rise", loop.final, above=3 * loop.losses[249])
    trial.expect("last loss", loop.final, below=4.0)


@scenario
def maml_inner_steps(trial: Trial) -> None:
    """Meta-learning: the loss is that after an inner step on a new task, and the number of inner steps grows."""
    model = make_mlp(1, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def adapt_and_miss(phase: float, size: float, num_inner: int) -> Tensor:
        weights = dict(model.named_parameters())
        for _ in range(num_inner):
            x = 4 * torch.rand(16, 1) - 2
            error = (functional_call(model, weights, (x,)) - size * (x + phase).sin()).square().mean()
            slopes = torch.autograd.grad(error, list(weights.values()), create_graph=True)
            weights = {name: weight - 0.05 * slope for (name, weight), slope in zip(weights.items(), slopes)}
        x = 4 * torch.rand(16, 1) - 2
        return (functional_call(model, weights, (x,)) - size * (x + phase).sin()).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(350):
        size = 1.0 if number < 200 else 5.0
        loop.step(adapt_and_miss, random.uniform(0, 3), size, 1 if number < 100 else 3)
    trial.expect("last loss", loop.final, below=8.0)


@scenario
def closure_returns_only_a_part(trial: Trial) -> None:
    """`guard.step(loss)` on one of two objectives in turn: the second begins at step 200 with a loss of thousands."""
    model = make_mlp(8, 64, 2)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    loop = trial.loop(model, optimizer)
    for number in range(600):
        x = torch.randn(32, 8)
        if number < 200 or number % 2:
            loop.step((model(x)[:, 0] - x.sum(1)).square().mean())
        else:
            loop.step((50 * model(x)[:, 1] - 50 * x.sin().sum(1)).square().mean())
    trial.expect("first loss of the second", loop.losses[200], above=1000.0)
    trial.expect("last loss", loop.final, below=500.0)


@scenario
def fine_tuned_on_one_batch(trial: Trial) -> None:
    """The same batch for 300 steps, then fresh ones: from nothing to the loss of a network that knows one batch."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    first = torch.randn(16, 8)

    def loss(x: Tensor) -> Tensor:
        return miss_sines(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        loop.step(loss, first if number < 300 else torch.randn(32, 8))
    trial.expect("jump", loop.losses[300], above=100 * loop.losses[299])
    trial.expect("last loss", loop.final, below=0.3)
