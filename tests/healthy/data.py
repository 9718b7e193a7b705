"""Data whose losses differ by nature: rare heads, rare blows, heavy tails, batches and horizons of any size."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, miss_sum, seeded
from healthy.scenario import Trial, scenario


@scenario
def multitask_rare_heads(trial: Trial) -> None:
    """Five of six heads are trained once in 200 steps each: a loss spike every 40 steps, of the same size each time."""
    trunk, heads = make_mlp(8, 32, 16), nn.ModuleList(nn.Linear(16, 1) for _ in range(6))
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        head = 0 if number % 40 else 1 + (number // 40) % 5
        x = torch.randn(32, 8)
        return (heads[head](trunk(x)) - x[:, head : head + 1] * (1 if head == 0 else 3)).square().mean()

    loop = trial.run(model, optimizer, 800, loss)
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def multitask_phases(trial: Trial) -> None:
    """Thirty steps of one task, thirty of another, with losses 100 apart."""
    trunk, heads = make_mlp(8, 32, 16), nn.ModuleList(nn.Linear(16, 1) for _ in range(2))
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        head = (number // 30) % 2
        x = torch.randn(32, 8)
        return (heads[head](trunk(x)) - x[:, head : head + 1] * (1, 10)[head]).square().mean()

    loop = trial.run(model, optimizer, 900, loss)
    trial.expect("last loss", loop.final, below=5.0)


@scenario
def moe_collapse_start(trial: Trial) -> None:
    """Eight experts, two for each sample: some get no gradient for a while."""
    experts, gate = nn.ModuleList(make_mlp(8, 16, 1) for _ in range(8)), nn.Linear(8, 8)
    model = nn.ModuleList([experts, gate])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 8)
        best = gate(x).topk(2, 1)
        weights = torch.zeros(64, 8).scatter(1, best.indices, best.values.softmax(1))
        out = sum(weights[:, at : at + 1] * expert(x) for at, expert in enumerate(experts))
        return (out - x.sin().sum(1, keepdim=True)).square().mean()

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=0.6)


@scenario
def loss_1e6(trial: Trial) -> None:
    """A sum of squares in the millions, falling slowly."""
    model = make_mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(number: int) -> Tensor:
        x = torch.randn(64, 8)
        return (model(x) - 100 * x.sum(1, keepdim=True)).square().sum()

    loop = trial.run(model, optimizer, 600, loss)
    trial.expect("last loss", loop.final, below=0.7 * loop.losses[0])


@scenario
def label_noise_bs1(trial: Trial) -> None:
    """Single samples, one label in five wrong: the loss is near 0 or near 5."""
    model, task = make_mlp(8, 32, 4), Clusters(4, 8, noise=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def loss(number: int) -> Tensor:
        x, y = task.draw(1)
        return F.cross_entropy(model(x), y if random.random() > 0.2 else torch.randint(0, 4, (1,)))

    loop = trial.run(model, optimizer, 2000, loss)
    trial.expect("last loss", loop.final, below=0.6)


@scenario
def cauchy_targets_huber(trial: Trial) -> None:
    """Targets with Cauchy noise: the loss has no mean."""
    model, noise = make_mlp(8, 32, 1), torch.distributions.Cauchy(0.0, 1.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(8, 8)
        return F.huber_loss(model(x), x[:, :1] + noise.sample((8, 1)))

    trial.run(model, optimizer, 2000, loss)
    x = torch.randn(256, 8)
    trial.expect("error without the noise", (model(x) - x[:, :1]).abs().mean().item(), below=0.7)


@scenario
def variable_batch_sum(trial: Trial) -> None:
    """A sum over batches of 1 to 1024 samples: losses a thousandfold apart, side by side."""
    model = make_mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(number: int) -> Tensor:
        count = random.choice([1, 4, 16, 256, 1024])
        return miss_sum(model, torch.randn(count, 8)) * count

    trial.run(model, optimizer, 800, loss)
    trial.expect("error", miss_sum(model, torch.randn(256, 8)).item(), below=0.3)


@scenario
def diffusion_snr_weighted(trial: Trial) -> None:
    """Denoising with heavy weights at small noise levels."""
    model = make_mlp(3, 64, 64, 2, activation=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(16, 2).sign()
        level, noise = torch.rand(16, 1) * 0.999 + 0.001, torch.randn(16, 2)
        seen = torch.cat([(1 - level).sqrt() * x + level.sqrt() * noise, level], 1)
        return ((model(seen) - x).square() / level).mean()

    loop = trial.run(model, optimizer, 1500, loss)
    trial.expect("last loss", loop.final, below=2.0)


@scenario
def snn_surrogate_rare_spike(trial: Trial) -> None:
    """Every 97th batch counts thirtyfold."""
    model = make_mlp(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 5e-2)

    def loss(number: int) -> Tensor:
        return miss_sum(model, torch.randn(32, 8)) * (30 if number % 97 == 96 else 1)

    loop = trial.run(model, optimizer, 900, loss)
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def curriculum_horizon(trial: Trial) -> None:
    """The loss is summed over a horizon that grows from 1 to 20 in five stages."""
    model, turn = make_mlp(3, 32, 3), torch.linalg.qr(torch.randn(3, 3, generator=seeded(1)))[0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(number: int) -> Tensor:
        x = torch.randn(32, 3)
        y, total = x, torch.zeros(())
        for _ in range((1, 2, 5, 10, 20)[number // 200]):
            x, y = x + model(x), y @ turn.T
            total = total + (x - y).square().sum(1).mean()
        return total

    loop = trial.run(model, optimizer, 1000, loss)
    trial.expect("last loss", loop.final, below=12.0)


@scenario
def random_horizon(trial: Trial) -> None:
    """A horizon of 1 to 32, drawn anew for each step: losses a hundredfold apart, and gradients with them."""
    model, turn = make_mlp(3, 32, 3), torch.linalg.qr(torch.randn(3, 3, generator=seeded(1)))[0]
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, horizon: int) -> Tensor:
        y, total = x, torch.zeros(())
        for _ in range(horizon):
            x, y = x + model(x), y @ turn.T
            total = total + (x - y).square().sum(1).mean()
        return total

    loop = trial.loop(model, optimizer)
    for _ in range(400):
        loop.step(loss, torch.randn(32, 3), random.choice([1, 1, 2, 4, 32]))
    trial.expect("largest of the last losses", max(loop.losses[-50:]), below=0.1 * max(loop.losses[:50]))


@scenario
def rare_class(trial: Trial) -> None:
    """One sample in a thousand is of a class of its own, and weighs a thousand: nothing for 30 steps, then a blow."""
    model = make_mlp(8, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 1000.0]), reduction="none").mean()

    loop = trial.loop(model, optimizer)
    for _ in range(900):
        y = (torch.rand(32) < 1e-3).long()
        loop.step(loss, torch.randn(32, 8) + 3 * y[:, None], y)
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def rare_huge_targets(trial: Trial) -> None:
    """One batch in a hundred has targets thirty times as large: a spike of a thousandfold that does no harm."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, scale: float) -> Tensor:
        return (model(x) - scale * x.sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(950):
        loop.step(loss, torch.randn(32, 8), 30.0 if number % 100 == 99 else 1.0)
    trial.expect("last loss", loop.final, below=2.0)


@scenario
def tasks_a_thousand_apart(trial: Trial) -> None:
    """One of three tasks is drawn for each step, with losses of 1e-3, 1 and 1e3."""
    trunk, heads = make_mlp(8, 48, 16), nn.ModuleList(nn.Linear(16, 1) for _ in range(3))
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)

    def loss(x: Tensor, task: int) -> Tensor:
        size = (0.03, 1.0, 30.0)[task]
        return (heads[task](trunk(x)) - size * x[:, task : task + 2].sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for _ in range(900):
        loop.step(loss, torch.randn(32, 8), random.randrange(3))
    trial.expect("largest of the last losses", max(loop.losses[-50:]), below=0.5 * max(loop.losses[:50]))


@scenario
def students_t_squared(trial: Trial) -> None:
    """Squared error on noise whose variance is barely finite: now and then one sample is half of all loss."""
    model, noise = make_mlp(8, 32, 1), torch.distributions.StudentT(2.1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    loop = trial.loop(model, optimizer)
    for _ in range(900):
        x = torch.randn(16, 8)
        loop.step(loss, x, x.sum(1, keepdim=True) + noise.sample((16, 1)))
    x = torch.randn(256, 8)
    trial.expect("error without the noise", miss_sum(model, x).item(), below=1.5)
