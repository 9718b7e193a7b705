"""Rates that rise: the program raises them, the loss rises with them, and the end is better for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from healthy.parts import Clusters, make_mlp, miss_sines
from healthy.scenario import Trial, scenario


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@scenario
def cyclic_lr(trial: Trial) -> None:
    """The rate swings between 0.001 and 0.3, the loss with it."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    scheduler = lr_scheduler.CyclicLR(optimizer, 1e-3, 0.3, step_size_up=100)

    def loss(number: int) -> Tensor:
        x, y = task.draw(32)
        return F.cross_entropy(model(x), y)

    loop = trial.run(model, optimizer, 1000, loss, scheduler=scheduler)
    trial.expect("last loss", loop.final, below=0.6)


@scenario
def onecycle(trial: Trial) -> None:
    """One cycle of AdamW up to 0.03: a bump in the middle, the best loss at the end."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=501)
    loop = trial.run(model, optimizer, 500, lambda _: miss_sines(model, torch.randn(32, 8)), scheduler=scheduler)
    trial.expect("last loss", loop.final, below=0.2)


@scenario
def warmup_from_zero(trial: Trial) -> None:
    """The first step has a rate of 0: no weight changes, and nothing is wrong."""
    from transformers import get_cosine_schedule_with_warmup

    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 60, 600)
    loop = trial.run(model, optimizer, 600, lambda _: miss_sines(model, torch.randn(32, 8)), scheduler=scheduler)
    trial.expect("last loss", loop.final, below=0.2)


@scenario
def swa_high_const_lr(trial: Trial) -> None:
    """A high constant rate, as weight averaging wants it: the loss never settles, the average does."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    average = torch.optim.swa_utils.AveragedModel(model)

    def loss(number: int) -> Tensor:
        x, y = task.draw(16)
        return F.cross_entropy(model(x), y)

    loop = trial.run(model, optimizer, 800, loss, ema=average)
    trial.expect("last loss", loop.final, below=0.7)


@scenario
def warm_restarts(trial: Trial) -> None:
    """SGDR: three times the rate leaps from 0 to 0.4, and a converged loss leaps with it; each valley is good."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.4, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 200)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer, scheduler=scheduler)
    for _ in range(800):
        loop.step(loss, *task.draw(32))
    trial.expect("bump after a restart", max(loop.losses[400:450]), above=1.5 * sum(loop.losses[350:400]) / 50)
    trial.expect("last loss", loop.final, below=0.5)


@scenario
def onecycle_tall_peak(trial: Trial) -> None:
    """Super-convergence: a peak of 1.0 with BatchNorm, where a constant 1.0 would not settle."""
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer, task = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), Clusters(4, 8)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=601, pct_start=0.4)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer, scheduler=scheduler)
    for _ in range(600):
        loop.step(loss, *task.draw(64))
    trial.expect("middle", max(loop.losses[200:300]), above=1.5 * loop.final)
    trial.expect("last loss", loop.final, below=0.5)


@scenario
def second_stage_at_ten_times_the_rate(trial: Trial) -> None:
    """A converged first stage, then a second one at ten times its rate on the same data: up at first, then below."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 2e-3, momentum=0.9)
    data = [torch.randn(32, 8) for _ in range(40)]

    def loss(x: Tensor) -> Tensor:
        return miss_sines(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(900):
        if number == 450:
            set_rate(optimizer, 0.02)
        loop.step(loss, data[number % 40])
    before = sum(loop.losses[400:450]) / 50
    trial.expect("bump", max(loop.losses[450:500]), above=1.2 * before)
    trial.expect("last loss", loop.final, below=before)


@scenario
def warmup_over_half_the_run(trial: Trial) -> None:
    """The rate climbs for 400 of 800 steps: the loss falls, and rises again before the peak is over."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: t / 400 if t < 400 else (800 - t) / 400)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer, scheduler=scheduler)
    for _ in range(800):
        loop.step(loss, *task.draw(32))
    trial.expect("rise at the peak", max(loop.losses[350:450]), above=3 * sorted(loop.losses[50:150])[50])
    trial.expect("last loss", loop.final, below=0.6)


@scenario
def rate_kicked_on_purpose(trial: Trial) -> None:
    """The program leaves a minimum on purpose: three times five steps at 30 times the rate, and the loss heals."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def loss(x: Tensor) -> Tensor:
        return miss_sines(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(1000):
        if number in (250, 450, 650):
            set_rate(optimizer, 0.3)
        if number in (255, 455, 655):
            set_rate(optimizer, 0.01)
        loop.step(loss, torch.randn(64, 8))
    trial.expect("kick", max(loop.losses[450:470]), above=3 * loop.losses[449])
    trial.expect("last loss", loop.final, below=0.3)


@scenario
def larger_batches_and_rate(trial: Trial) -> None:
    """Batch size and rate are raised together eightfold, and the loss is a sum: it leaps eightfold and stays there."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-4)

    def loss(x: Tensor) -> Tensor:
        return miss_sines(model, x) * len(x)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number == 300:
            set_rate(optimizer, 4e-3)
        loop.step(loss, torch.randn(32 if number < 300 else 256, 8))
    trial.expect("jump", loop.losses[300], above=5 * loop.losses[299])
    trial.expect("last loss for each sample", loop.final / 256, below=0.2)


@scenario
def schedule_of_the_program(trial: Trial) -> None:
    """The program writes its own sawtooth into the optimizer, own backward and all: no scheduler to look at."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=1.5, noise=0.7)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9, nesterov=True)
    loop = trial.loop(model, optimizer)
    for number in range(800):
        set_rate(optimizer, 0.8 * (1 - (number % 160) / 160))
        x, y = task.draw(32)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        loop.step()
        loop.losses.append(loss.item())
    trial.expect("last loss", loop.final, below=0.15)
