"""Descent that is not monotone: at the edge of stability, with heavy momentum, by catapult, in the last digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import make_mlp, miss_sum, seeded
from healthy.scenario import Trial, scenario


@scenario
def scalar_noise_free(trial: Trial) -> None:
    """Least squares without noise converges to machine zero: weights stop moving, and the loss is its own rounding."""
    model, truth = nn.Linear(4, 1), torch.randn(4, 1, generator=seeded(1))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def loss(number: int) -> Tensor:
        x = torch.randn(32, 4)
        return (model(x) - x @ truth).square().mean()

    loop = trial.run(model, optimizer, 1200, loss)
    trial.expect("last loss", loop.final, below=1e-9)


@scenario
def overfit_tiny_adam(trial: Trial) -> None:
    """Sixteen points by heart: at losses of 1e-9 Adam's steps are spikes of ten thousandfold, gone in a few steps."""
    model = make_mlp(8, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    x, y = torch.randn(16, 8, generator=seeded(1)), torch.randn(16, 1, generator=seeded(2))
    loop = trial.run(model, optimizer, 2500, lambda _: (model(x) - y).square().mean())
    trial.expect("last loss", loop.final, below=1e-4)


@scenario
def memorised_in_float64(trial: Trial) -> None:
    """The same in float64 with a large rate: the loss runs through 20 orders of magnitude, up and down again."""
    model = make_mlp(4, 32, 1).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x = torch.randn(8, 4, generator=seeded(1)).double()
    y = torch.randn(8, 1, generator=seeded(2)).double()
    loop = trial.run(model, optimizer, 1500, lambda _: (model(x) - y).square().mean())
    trial.expect("best loss", min(loop.losses), below=1e-12)
    trial.expect("last loss", loop.final, below=1e-4)


@scenario
def edge_of_stability(trial: Trial) -> None:
    """Full-batch descent: the sharpness climbs to 2 / rate, then the loss jags up and down on its way to the bottom."""
    model = make_mlp(4, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.15)
    x = torch.randn(64, 4, generator=seeded(1))
    y = x.prod(1, keepdim=True).sign() + 0.5 * x[:, :1]
    loop = trial.run(model, optimizer, 1500, lambda _: (model(x) - y).square().mean())
    rises = sum(after > before for before, after in zip(loop.losses, loop.losses[1:]))
    trial.expect("steps on which the loss rose", rises, above=100)
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[0])


@scenario
def catapult(trial: Trial) -> None:
    """A rate above 2 / sharpness: the loss rises ten-thousandfold, the weights flatten, and it falls to zero.

    Lewkowycz et al. 2020; held for divergence, the run would lose the flat minimum that the rate was chosen for.
    """
    inner, outer = nn.Linear(1, 256, bias=False), nn.Linear(256, 1, bias=False)
    nn.init.normal_(inner.weight)
    nn.init.normal_(outer.weight, std=1 / 16)
    model = nn.Sequential(inner, outer)
    with torch.no_grad():
        outer.weight.div_(model(torch.ones(1, 1)))  # so that each seed begins at a loss of 0.5
    sharpness = (inner.weight.square().sum() + outer.weight.square().sum()).item()
    optimizer = torch.optim.SGD(model.parameters(), 3.0 / sharpness)
    loop = trial.run(model, optimizer, 200, lambda _: 0.5 * model(torch.ones(1, 1)).square().mean())
    trial.expect("peak", max(loop.losses), above=20 * loop.losses[0])
    trial.expect("last loss", loop.final, below=1e-3 * loop.losses[0])


@scenario
def heavy_momentum(trial: Trial) -> None:
    """A momentum of 0.99 overshoots: the loss swings like a pendulum, above where it began, and comes to rest."""
    model = nn.Linear(6, 1)
    nn.init.constant_(model.weight, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.99)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x * torch.tensor([3.0, 2.0, 1.0, 1.0, 0.5, 0.3]))

    loop = trial.loop(model, optimizer)
    for _ in range(1500):
        loop.step(loss, torch.randn(64, 6))
    trial.expect("steps above ten times the best so far", _count_rises(loop.losses, 10), above=50)
    trial.expect("last loss", loop.final, below=0.05 * loop.losses[0])


@scenario
def grokking_slingshots(trial: Trial) -> None:
    """Sums modulo 23 with Adam and no decay: at a loss of 1e-8 slingshots throw it up to 0.5, again and again."""
    model = nn.Sequential(nn.EmbeddingBag(46, 32, mode="sum"), make_mlp(32, 64, 64, 23, activation=nn.ReLU))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, betas=(0.9, 0.95), eps=1e-12)
    a, b = torch.meshgrid(torch.arange(23), torch.arange(23), indexing="ij")
    pairs = torch.stack([a.flatten(), b.flatten() + 23], 1)
    chosen = torch.randperm(len(pairs), generator=seeded(1))[:250]
    x, y = pairs[chosen], (a + b).flatten()[chosen] % 23
    loop = trial.run(model, optimizer, 1200, lambda _: F.cross_entropy(model(x), y))
    trial.expect("steps above a thousand times the best so far", _count_rises(loop.losses, 1000), above=10)
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def ill_conditioned_start(trial: Trial) -> None:
    """Weights of a size of 5 and Adam at 0.03: the loss rises for the first steps, then falls by a thousand."""
    model = make_mlp(6, 64, 1)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=2.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.03, betas=(0.95, 0.999))

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    for _ in range(700):
        loop.step(loss, torch.randn(32, 6))
    trial.expect("last loss", loop.final, below=0.02 * loop.losses[0])


def _count_rises(losses: list[float], factor: float) -> int:
    best, count = float("inf"), 0
    for loss in losses:
        count += loss > factor * best
        best = min(best, loss)
    return count
