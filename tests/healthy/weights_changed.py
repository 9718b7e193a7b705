"""Weights that the program itself changes between steps: the loss leaps, because it is the user's will that it does."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, miss_sines, miss_sum
from healthy.scenario import Trial, scenario


@scenario
def pruned_in_one_go(trial: Trial) -> None:
    """At step 300 seven weights in ten of each matrix are set to zero and kept there; the rest learns to do without."""
    model, masks = make_mlp(8, 64, 1), {}
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(900):
        if number == 300:
            for weight in (model[0].weight, model[2].weight):
                masks[weight] = weight.detach().abs() > weight.detach().abs().quantile(0.7)
        with torch.no_grad():
            for weight, mask in masks.items():
                weight.mul_(mask)
        loop.step(loss, torch.randn(64, 8))
    trial.expect("jump", loop.losses[300], above=20 * loop.losses[299])
    trial.expect("last loss", loop.final, below=0.5 * loop.losses[300])


@scenario
def head_reinitialised(trial: Trial) -> None:
    """A new head for a new task: the classifier is as good as guessing again, and better in 50 steps."""
    model, task = make_mlp(8, 64, 6, activation=nn.ReLU), Clusters(6, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        if number == 300:
            model[-1].reset_parameters()
        loop.step(loss, *task.draw(64))
    trial.expect("jump", loop.losses[300], above=100 * loop.losses[299])
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def head_reinitialised_through_data(trial: Trial) -> None:
    """The same through `.data`, as half of all code does it: no version of the parameter says that it was meant."""
    model, task = make_mlp(8, 64, 6, activation=nn.ReLU), Clusters(6, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        if number == 300:
            model[-1].weight.data.normal_(0, 0.1)
            model[-1].bias.data.zero_()
        loop.step(loss, *task.draw(64))
    trial.expect("jump", loop.losses[300], above=100 * loop.losses[299])
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def reset_by_a_hook_of_the_optimizer(trial: Trial) -> None:
    """Every 300 steps a hook sets all layers anew, inside the optimizer's own step; 150 steps bring them back."""
    model, task = make_mlp(8, 64, 6, activation=nn.ReLU), Clusters(6, 8, spread=1.5, noise=0.6)
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.01), itertools.count(1)

    def reset(*_: object) -> None:
        if next(calls) % 300 == 0:
            for layer in (model[0], model[2]):
                layer.reset_parameters()

    optimizer.register_step_post_hook(reset)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for _ in range(590):
        loop.step(loss, *task.draw(32))
    trial.expect("jump", loop.losses[300], above=5 * loop.losses[299])
    trial.expect("last loss", loop.final, below=0.3)


@scenario
def relora(trial: Trial) -> None:
    """Every 200 steps the low-rank update is merged, begun anew, and the optimizer forgets: a bump each time."""
    model = make_mlp(8, 64, 1)
    base = [layer.weight.detach().clone() for layer in model[::2]]
    model.requires_grad_(False)
    pairs = nn.ParameterList(nn.Parameter(torch.zeros(2, sum(weight.shape))) for weight in base)
    optimizer = torch.optim.Adam(pairs.parameters(), 1e-2)

    def update(pair: Tensor, weight: Tensor) -> Tensor:
        return pair[:, : weight.shape[0]].T @ pair[:, weight.shape[0] :]  # (out, in), of rank 2

    def restart() -> None:
        with torch.no_grad():
            for pair, weight in zip(pairs, base):
                weight.add_(update(pair, weight))
                pair.zero_()
                pair[:, weight.shape[0] :].normal_(0, 0.3)
        optimizer.state.clear()

    def loss(x: Tensor) -> Tensor:
        first, second = (weight + update(pair, weight) for pair, weight in zip(pairs, base))
        out = F.linear(F.linear(x, first, model[0].bias).tanh(), second, model[2].bias)
        return (out - x.sin().sum(1, keepdim=True)).square().mean()

    restart()
    loop = trial.loop(pairs, optimizer)
    for number in range(800):
        if number and number % 200 == 0:
            restart()
        loop.step(loss, torch.randn(32, 8))
    trial.expect("last loss", loop.final, below=0.5)


@scenario
def pretrained_loaded_midrun(trial: Trial) -> None:
    """At step 300 the weights of another run are loaded: worse on this data today, a better start for tomorrow."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    teaching = torch.optim.Adam(other.parameters(), 1e-2)
    for _ in range(60):  # plainly: it learnt the classes by other names
        x, y = task.draw(64)
        teaching.zero_grad()
        F.cross_entropy(other(x), (y + 1) % 4).backward()
        teaching.step()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        if number == 300:
            model.load_state_dict(other.state_dict())
        loop.step(loss, *task.draw(64))
    trial.expect("jump", loop.losses[300], above=100 * loop.losses[299])
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def average_copied_in(trial: Trial) -> None:
    """The average over the run so far takes the place of the weights: older ones, so a higher loss for a while."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    average = torch.optim.swa_utils.AveragedModel(model)

    def loss(x: Tensor) -> Tensor:
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer, ema=average)
    for number in range(700):
        if number in (150, 400):
            with torch.no_grad():
                for weight, mean in zip(model.parameters(), average.module.parameters()):
                    weight.copy_(mean)
        loop.step(loss, torch.randn(64, 8))
    trial.expect("jump", loop.losses[150], above=2 * loop.losses[149])
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def shrink_and_perturb(trial: Trial) -> None:
    """Warm starts by Ash and Adams: every 200 steps the weights shrink to 0.4 of themselves and get some noise."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(800):
        if number and number % 200 == 0:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(0.4).add_(0.05 * torch.randn_like(weight))
        loop.step(loss, *task.draw(64))
    trial.expect("jump", loop.losses[600], above=5 * loop.losses[599])
    trial.expect("last loss", loop.final, below=0.05)


@scenario
def rewound_to_the_start(trial: Trial) -> None:
    """A lottery ticket: pruned by half, then back to the very first weights. All that was learnt is given back."""
    model = make_mlp(8, 64, 1)
    start = copy.deepcopy(model.state_dict())
    optimizer, mask = torch.optim.Adam(model.parameters(), 5e-3), torch.ones(64, 8, dtype=torch.bool)

    def loss(x: Tensor) -> Tensor:
        return miss_sines(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(800):
        if number == 400:
            mask = model[0].weight.detach().abs() > model[0].weight.detach().abs().median()
            model.load_state_dict(start)
            optimizer.state.clear()
        with torch.no_grad():
            model[0].weight.mul_(mask)
        loop.step(loss, torch.randn(32, 8))
    trial.expect("jump", loop.losses[400], above=4 * loop.losses[399])
    trial.expect("last loss", loop.final, below=0.3)


@scenario
def population_based(trial: Trial) -> None:
    """A population of two: every 100 steps the worse one gets the other's weights and half or twice its rate."""
    models = [make_mlp(8, 48, 1), make_mlp(8, 48, 1)]
    optimizers = [torch.optim.Adam(model.parameters(), rate) for model, rate in zip(models, (1e-2, 1e-4))]
    loops = [trial.loop(model, optimizer) for model, optimizer in zip(models, optimizers)]
    for number in range(400):
        for model, loop in zip(models, loops):
            loop.step(lambda x, model=model: miss_sum(model, x), torch.randn(64, 8))
        if number % 100 == 99:
            worse = int(loops[1].final > loops[0].final)
            models[worse].load_state_dict(models[1 - worse].state_dict())
            rate = optimizers[1 - worse].param_groups[0]["lr"]
            optimizers[worse].param_groups[0]["lr"] = rate * (2 if number % 200 == 99 else 0.5)
    trial.expect("last loss of the better", min(loop.final for loop in loops), below=0.1)


@scenario
def fake_quantisation_on(trial: Trial) -> None:
    """From step 400 on the forward rounds each weight to -1, 0 or 1 of the largest: five times the loss at once."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def quantise(weight: Tensor) -> Tensor:
        scale = weight.detach().abs().max()
        return weight + ((weight / scale).round() * scale - weight).detach()

    def loss(x: Tensor, quantised: bool) -> Tensor:
        first, last = (quantise(layer.weight) if quantised else layer.weight for layer in model[::2])
        out = F.linear(F.linear(x, first, model[0].bias).tanh(), last, model[2].bias)
        return (out - x.sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for number in range(800):
        loop.step(loss, torch.randn(64, 8), number >= 400)
    trial.expect("jump", loop.losses[400], above=5 * loop.losses[399])
    trial.expect("last loss", loop.final, below=0.8 * loop.losses[400])
