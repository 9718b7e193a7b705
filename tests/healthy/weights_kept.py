"""Weights that the program keeps in hand: clamped, normalised or slowed at each step, grown, averaged, frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, miss_sines, miss_sum
from healthy.scenario import Trial, scenario


@scenario
def gradual_unfreeze(trial: Trial) -> None:
    """Layers are thawed from the top at steps 100, 200 and 300; all are in the optimizer from the start."""
    model = make_mlp(8, 32, 32, 32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    model[:6].requires_grad_(False)

    def loss(number: int) -> Tensor:
        if number in (100, 200, 300):
            model[6 - number // 50 :].requires_grad_(True)
        return miss_sines(model, torch.randn(32, 8))

    loop = trial.run(model, optimizer, 500, loss)
    trial.expect("last loss", loop.final, below=0.8)


@scenario
def frozen_bn(trial: Trial) -> None:
    """A BatchNorm in eval mode inside a model in training, as in fine-tuning: its statistics never change."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    model[1].eval().requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.02, momentum=0.9)
    loop = trial.run(model, optimizer, 400, lambda _: miss_sum(model, torch.randn(32, 8)))
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def weights_clamped(trial: Trial) -> None:
    """Every weight is clamped to 0.15 after each step, and to 0.09 from step 300 on: the fit gives way."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        loop.step(loss, torch.randn(64, 8))
        with torch.no_grad():
            for weight in model.parameters():
                weight.clamp_(*((-0.15, 0.15) if number < 300 else (-0.09, 0.09)))
    trial.expect("loss under the tight clamp", loop.final, above=2 * loop.losses[299])
    trial.expect("largest weight", max(float(w.detach().abs().max()) for w in model.parameters()), below=0.0901)


@scenario
def weights_normalised_by_hand(trial: Trial) -> None:
    """Each row of each matrix is scaled to a length of 1 through `.data` after every step."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    loop = trial.loop(model, optimizer)
    for _ in range(500):
        x, y = task.draw(64)
        loop.step(F.cross_entropy(3 * model(x), y))
        for layer in model[::2]:
            layer.weight.data.div_(layer.weight.data.norm(dim=1, keepdim=True))
    trial.expect("last loss", loop.final, below=0.8)


@scenario
def lookahead(trial: Trial) -> None:
    """Fast weights run six steps at a high rate, then are pulled half the way back: a sawtooth."""
    model, slow = make_mlp(8, 64, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.08, momentum=0.9)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    slow += [weight.detach().clone() for weight in model.parameters()]
    for number in range(600):
        loop.step(loss, torch.randn(64, 8))
        if number % 6 == 5:
            with torch.no_grad():
                for weight, anchor in zip(model.parameters(), slow):
                    weight.copy_(anchor.lerp_(weight, 0.5))
    trial.expect("last loss", loop.final, below=0.3)


@scenario
def progressive_growing(trial: Trial) -> None:
    """A new block joins the network and the optimizer at steps 200 and 400: each starts at random and in the middle."""
    blocks = nn.ModuleList([nn.Linear(8, 32)])
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(32, 1)})
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor) -> Tensor:
        hidden = x
        for block in blocks:
            hidden = block(hidden).tanh()
        return (model["head"](hidden) - x.sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number in (200, 400):
            blocks.append(nn.Linear(32, 32))
            optimizer.add_param_group({"params": list(blocks[-1].parameters()), "lr": 1e-2})
        loop.step(loss, torch.randn(64, 8))
    trial.expect("jump", loop.losses[200], above=5 * loop.losses[199])
    trial.expect("last loss", loop.final, below=0.5)


@scenario
def moments_thrown_away(trial: Trial) -> None:
    """Adam's moments are thrown away for each of three tasks, so its first steps are large again."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(x: Tensor, task: int) -> Tensor:
        return (model(x) - 3 * x[:, task : task + 3].sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(750):
        if number % 250 == 0:
            optimizer.state.clear()
        loop.step(loss, torch.randn(64, 8), 2 * (number // 250))
    trial.expect("jump", loop.losses[250], above=50 * loop.losses[249])
    trial.expect("last loss", loop.final, below=1.0)


@scenario
def dropout_on_midrun(trial: Trial) -> None:
    """Dropout of one half begins at step 300, on a network that fitted without: the loss leaps and stays up."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.0), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number == 300:
            model[2].p = 0.5
        loop.step(loss, torch.randn(64, 8))
    trial.expect("jump", loop.losses[300], above=3 * loop.losses[299])
    model.eval()
    trial.expect("loss without dropout", miss_sum(model, torch.randn(512, 8)).item(), below=0.5)


@scenario
def batchnorm_modes(trial: Trial) -> None:
    """BatchNorm goes to eval at 300 with old statistics, back at 450, and forgets at once (momentum 1) from 600 on."""
    norm = nn.BatchNorm1d(32, momentum=0.001)
    model = nn.Sequential(nn.Linear(8, 32), norm, nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 5e-3, momentum=0.9)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(750):
        norm.train(not 300 <= number < 450)
        norm.momentum = 1.0 if number >= 600 else 0.001
        loop.step(loss, 2 * torch.randn(32, 8))
    trial.expect("loss on old statistics", loop.losses[300], above=1.3 * loop.losses[299])
    trial.expect("last loss", loop.final, below=0.2 * loop.losses[0])
