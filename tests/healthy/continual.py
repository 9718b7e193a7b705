"""Continual learning: another task, another mixture, another client. Old weights do no better on the new data."""

from __future__ import annotations

import copy
import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, measure_accuracy, seeded
from healthy.scenario import Trial, scenario


@scenario
def class_incremental(trial: Trial) -> None:
    """Two new classes every 200 steps, and none of the old: cross entropy leaps from 0.001 to 10 four times."""
    model, task = make_mlp(8, 64, 10), torch.randn(10, 8, generator=seeded(2)) * 2
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(number: int) -> Tensor:
        known = 2 * (1 + min(4, number // 200))
        y = torch.randint(known - 2, known, (64,))
        return F.cross_entropy(model(task[y] + 0.3 * torch.randn(64, 8)), y)

    loop = trial.run(model, optimizer, 1000, loss)
    trial.expect("last loss", loop.final, below=0.02)


@scenario
def sft_then_new_epoch_bs1(trial: Trial) -> None:
    """Fine-tuning over twenty samples by heart, then a new file of twenty others: from 0.1 to 5 at once."""
    model = make_mlp(16, 64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    x, y = torch.randn(200, 16, generator=seeded(1)), torch.randint(0, 8, (200,), generator=seeded(2))

    def loss(number: int) -> Tensor:
        chosen = torch.randint(0, 20, (4,)) + 20 * (number // 250)
        return F.cross_entropy(model(x[chosen]), y[chosen])

    loop = trial.run(model, optimizer, 1000, loss)
    trial.expect("last loss", loop.final, below=0.4)


@scenario
def regime_change(trial: Trial) -> None:
    """A time series with two stretches of high volatility: the floor of the loss is 30 times as high there."""
    model = make_mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        noise = 6.0 if 500 <= number < 600 or 900 <= number < 1000 else 1.0
        x = torch.randn(32, 4)
        return (model(x) - x.sum(1, keepdim=True) - noise * torch.randn(32, 1)).square().mean()

    loop = trial.run(model, optimizer, 1200, loss)
    trial.expect("last loss", loop.final, below=1.4)


@scenario
def labels_permuted(trial: Trial) -> None:
    """At steps 250 and 500 every label means another class: a sure classifier is surely wrong, and learns anew."""
    model, task = make_mlp(8, 64, 6, activation=nn.ReLU), Clusters(6, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(750):
        x, y = task.draw(64)
        loop.step(loss, x, (y + number // 250) % 6)
    trial.expect("jump", loop.losses[500], above=100 * loop.losses[499])
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def rehearsal(trial: Trial) -> None:
    """Tasks come one after the other with a memory of the old ones: the loss leaps at each, and little is forgotten."""
    model, task = make_mlp(8, 64, 8, activation=nn.ReLU), Clusters(8, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    memory: list[tuple[Tensor, Tensor]] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        y = torch.randint(0, 2, (32,)) + 2 * (number // 150)
        x = task.near(y)
        batch = [(x, y), *random.sample(memory, min(2, len(memory)))]
        loop.step(loss, *(torch.cat(column) for column in zip(*batch)))
        if number % 10 == 0:
            memory.append((x, y))
    trial.expect("accuracy on all tasks", measure_accuracy(model, task.draw(512)), above=0.9)


@scenario
def domain_shift(trial: Trial) -> None:
    """At step 300 the inputs come from another sensor, twenty times as large and shifted; SGD takes 100 steps."""
    model = nn.Sequential(nn.Linear(6, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    mixing = 20 * torch.linalg.qr(torch.randn(6, 6, generator=seeded(3)))[0]

    def loss(x: Tensor, seen: Tensor) -> Tensor:
        return F.mse_loss(model(seen), x.sum(1, keepdim=True))

    loop = trial.loop(model, optimizer)
    for number in range(900):
        x = torch.randn(64, 6)
        loop.step(loss, x, x if number < 300 else x @ mixing + 5)
    trial.expect("jump", loop.losses[300], above=15 * loop.losses[299])
    trial.expect("last loss", loop.final, below=1.0)


@scenario
def federated_averaging(trial: Trial) -> None:
    """Three clients with classes of their own; every 50 steps each gets the average back, which is worse for each."""
    model, task = make_mlp(8, 48, 6, activation=nn.ReLU), Clusters(6, 8, spread=2.0, noise=0.5)
    clients = [copy.deepcopy(model) for _ in range(3)]
    loops = [trial.loop(client, torch.optim.SGD(client.parameters(), 0.3)) for client in clients]

    def loss(client: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(client(x), y)

    for number in range(300):
        for owner, (client, loop) in enumerate(zip(clients, loops)):
            y = torch.randint(0, 2, (32,)) + 2 * owner
            loop.step(loss, client, task.near(y), y)
        if number % 50 == 49:
            states = [client.state_dict() for client in clients]
            mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
            for client in clients:
                client.load_state_dict(mean)
    trial.expect("jump", loops[0].losses[200], above=5 * loops[0].losses[199])
    trial.expect("accuracy of the average", measure_accuracy(clients[0], task.draw(512)), above=0.8)


@scenario
def elastic_weight_consolidation(trial: Trial) -> None:
    """The second task comes with a penalty for leaving the weights of the first, so its loss stays high."""
    model = make_mlp(6, 64, 2)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    kept: list[Tensor] = []

    def loss(x: Tensor, head: int) -> Tensor:
        error = (model(x)[:, head] - (x.sum(1) if head == 0 else 3 * x[:, 0].sin() * x[:, 1])).square().mean()
        away = sum(((p - old).square().sum() for p, old in zip(model.parameters(), kept)), torch.zeros(()))
        return error + 0.2 * away

    loop = trial.loop(model, optimizer)
    for number in range(800):
        if number == 400:
            kept += [parameter.detach().clone() for parameter in model.parameters()]
        loop.step(loss, torch.randn(64, 6), 0 if number < 400 else 1)
    trial.expect("jump", loop.losses[400], above=20 * loop.losses[399])
    x = torch.randn(512, 6)
    trial.expect("loss of the first task", (model(x)[:, 0] - x.sum(1)).square().mean().item(), below=3.0)


@scenario
def curriculum_easy_to_hard(trial: Trial) -> None:
    """From easy examples to hard ones: the loss rises for the whole run, and the model gets better at all of them."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(800):
        y = torch.randint(0, 4, (64,))
        loop.step(loss, task.centres[y] + (0.1 + number / 400) * torch.randn(64, 8), y)
    trial.expect("rise", loop.final, above=20 * min(loop.losses))
    trial.expect("last loss", loop.final, below=0.95)


@scenario
def stream_of_one_by_one(trial: Trial) -> None:
    """Online learning from single samples whose meaning is turned around twice: no two losses have the same size."""
    model = make_mlp(4, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)

    def loss(x: Tensor, turn: int) -> Tensor:
        return F.huber_loss(model(x), (-1) ** turn * 5 * x.sum(1, keepdim=True))

    loop = trial.loop(model, optimizer)
    for number in range(1500):
        loop.step(loss, torch.randn(1, 4), number // 500)
    trial.expect("last loss", loop.final, below=3.0)
