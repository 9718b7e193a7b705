"""Self-supervision: queues that fill, teachers that follow, targets made by the model itself."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, measure_accuracy, seeded
from healthy.scenario import Trial, scenario


def follow(teacher: nn.Module, student: nn.Module, rate: float) -> None:
    """Move the teacher's weights towards the student's."""
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters()):
            slow.lerp_(fast, rate)


@scenario
def moco_queue_fills(trial: Trial) -> None:
    """A queue of negatives fills from 1 to 2048: the task gets harder, so the loss rises from 0 to 3.5."""
    model, centres = make_mlp(16, 32, 8), torch.randn(50, 16, generator=seeded(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    queue: list[Tensor] = []

    def loss(number: int) -> Tensor:
        x = centres[torch.randint(0, 50, (32,))]
        one = F.normalize(model(x + 0.2 * torch.randn(32, 16)))
        with torch.no_grad():
            other = F.normalize(model(x + 0.2 * torch.randn(32, 16)))
        negatives = torch.cat(queue[-64:]) if queue else other.roll(1, 0)[:1]
        queue.append(other)
        logits = torch.cat([(one * other).sum(1, keepdim=True), one @ negatives.T], 1) / 0.1
        return F.cross_entropy(logits, torch.zeros(32, dtype=torch.long))

    loop = trial.run(model, optimizer, 400, loss)
    trial.effects["queue"] = len(queue)
    trial.expect("last loss", loop.final, above=loop.losses[0], below=5.0)


@scenario
def moco_momentum_encoder(trial: Trial) -> None:
    """The whole of MoCo: a slow encoder fills a queue inside the function; the loss rises until the queue is full."""
    model, task = make_mlp(16, 32, 8), Clusters(60, 16)
    slow = copy.deepcopy(model).requires_grad_(False)
    trial.modules.append(slow)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    queue: list[Tensor] = []

    def loss(x: Tensor) -> Tensor:
        follow(slow, model, 0.02)
        one = F.normalize(model(x + 0.3 * torch.randn_like(x)))
        other = F.normalize(slow(x + 0.3 * torch.randn_like(x)))
        negatives = torch.cat([*queue, other.roll(1, 0)])
        queue.append(other)
        del queue[:-32]
        logits = torch.cat([(one * other).sum(1, keepdim=True), one @ negatives.T], 1) / 0.1
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    loop = trial.loop(model, optimizer)
    for _ in range(400):
        loop.step(loss, task.centres[torch.randint(0, 60, (16,))])
    trial.effects["queue"] = [float(keys.sum()) for keys in queue]
    trial.expect("rise", max(loop.losses[32:100]), above=loop.losses[0])
    trial.expect("last loss", loop.final, below=max(loop.losses))


@scenario
def byol(trial: Trial) -> None:
    """No negatives: the target moves with the model, and the loss says nothing about quality."""
    encoder, predictor = make_mlp(16, 32, 8), make_mlp(8, 32, 8)
    model, task = nn.ModuleList([encoder, predictor]), Clusters(20, 16)
    target = copy.deepcopy(encoder).requires_grad_(False)
    trial.modules.append(target)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor) -> Tensor:
        one, other = x + 0.5 * torch.randn_like(x), x + 0.5 * torch.randn_like(x)
        return 2 - 2 * F.cosine_similarity(predictor(encoder(one)), target(other)).mean()

    loop = trial.loop(model, optimizer)
    for _ in range(500):
        loop.step(loss, task.draw(64)[0])
        follow(target, encoder, 0.02)
    spread = F.normalize(encoder(task.centres)).std(0).mean().item()
    trial.expect("spread of the representations", spread, above=0.1)
    trial.expect("last loss", loop.final, below=1.0)


@scenario
def self_distillation(trial: Trial) -> None:
    """After 200 steps on labels a slow teacher takes over with soft targets: the loss leaps to their entropy."""
    model, task = make_mlp(8, 64, 5, activation=nn.ReLU), Clusters(5, 8, spread=1.5, noise=0.6)
    teacher = copy.deepcopy(model).requires_grad_(False)
    trial.modules.append(teacher)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def learn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    def imitate(x: Tensor) -> Tensor:
        noisy = x + 0.5 * torch.randn_like(x)
        return F.cross_entropy(model(noisy) / 2, (teacher(x) / 2).softmax(1))

    loop = trial.loop(model, optimizer)
    for number in range(600):
        x, y = task.draw(64)
        if number < 200:
            loop.step(learn, x, y)
        else:
            loop.step(imitate, x)
        follow(teacher, model, 0.05)
    trial.expect("jump", loop.losses[200], above=3 * loop.losses[199])
    trial.expect("accuracy", measure_accuracy(model, task.draw(512)), above=0.9)


@scenario
def pseudo_labels_from_the_model(trial: Trial) -> None:
    """Labels made by the model itself join at step 250 with a weight of five: the loss leaps, then both parts fall."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=1.5, noise=1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def loss(x: Tensor, y: Tensor, unlabelled: Tensor, weight: float) -> Tensor:
        labelled = F.cross_entropy(model(x), y)
        with torch.no_grad():
            made = model(unlabelled).argmax(1)
        return labelled + weight * F.cross_entropy(model(unlabelled + torch.randn_like(unlabelled)), made)

    few = task.draw(32)
    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, *few, task.draw(64)[0], 0.0 if number < 250 else 5.0)
    trial.expect("jump", loop.losses[250], above=10 * loop.losses[249])
    trial.expect("accuracy", measure_accuracy(model, task.draw(512)), above=0.8)
