"""Steps that do not go down the loss: upwards, out of the optimizer's own head, or in turn on one graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from healthy.parts import make_mlp, miss_sines, miss_sum
from healthy.scenario import Trial, scenario


@scenario
def ascent_by_maximize(trial: Trial) -> None:
    """An input is moved away from where a frozen network is sure, by `maximize=True`: the loss rises a millionfold."""
    network, x = make_mlp(12, 64, 4), torch.randn(64, 12)
    network.requires_grad_(False)
    model, usual = nn.ParameterDict({"shift": torch.full((12,), 0.01)}), network(x)
    optimizer = torch.optim.Adam(model.parameters(), 0.02, maximize=True)

    def loss(number: int) -> Tensor:
        return (network(x + model["shift"]) - usual).square().mean()

    loop = trial.run(model, optimizer, 300, loss)
    trial.expect("last loss", loop.final, above=100 * loop.losses[0])


@scenario
def ascent_by_a_negative_rate(trial: Trial) -> None:
    """The same with a rate below 0, which torch accepts once the optimizer is there."""
    network, x = make_mlp(12, 64, 4), torch.randn(64, 12)
    network.requires_grad_(False)
    model, usual = nn.ParameterDict({"shift": torch.full((12,), 0.01)}), network(x)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] = -3.0

    def loss(number: int) -> Tensor:
        return (network(x + model["shift"]) - usual).square().mean()

    loop = trial.run(model, optimizer, 300, loss)
    trial.expect("last loss", loop.final, above=100 * loop.losses[0])


@scenario
def prices_that_climb(trial: Trial) -> None:
    """A multiplier in a group of its own with `maximize=True`: it climbs until a constraint holds, the loss with it."""
    model = nn.ModuleDict({"network": make_mlp(4, 32, 1), "price": nn.ParameterList([torch.zeros(1)])})
    groups = [
        {"params": list(model["network"].parameters()), "lr": 0.02},
        {"params": list(model["price"].parameters()), "lr": 0.3, "maximize": True},
    ]
    optimizer = torch.optim.SGD(groups)

    def loss(number: int) -> Tensor:
        y = model["network"](torch.randn(64, 4))
        return (y - 4).square().mean() + model["price"][0].sum() * (y.square().mean() - 1)

    loop = trial.run(model, optimizer, 700, loss)
    trial.expect("last loss", loop.final, above=8.0, below=10.0)


@scenario
def searched_in_turn(trial: Trial) -> None:
    """An architecture search: its weights and those of its layers are trained in turn, on one graph of data."""
    layers, mixture = make_mlp(4, 32, 3), nn.ParameterDict({"logits": torch.zeros(3)})
    optimizers = torch.optim.Adam(mixture.parameters(), 3e-2), torch.optim.SGD(layers.parameters(), 0.05, momentum=0.9)
    loops = trial.loop(mixture, optimizers[0]), trial.loop(layers, optimizers[1])
    for _ in range(300):
        for loop in loops:
            x = torch.randn(64, 4)
            mixed = (layers(x) * mixture["logits"].softmax(0)).sum(1)
            loop.step((3 * mixed - x.sin().sum(1)).square().mean())
    trial.expect("last loss", loops[1].final, below=0.2 * loops[1].losses[0])


class OwnStep(torch.optim.Optimizer):
    """An optimizer that is a function of a parameter, its state and its group."""

    def __init__(self, parameters: Any, move: Callable[[Tensor, dict[str, Any], dict[str, Any]], None], **group: Any):
        super().__init__(parameters, group)
        self._move = move

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, self.state[parameter], group)


@scenario
def frank_wolfe(trial: Trial) -> None:
    """Steps to the corners of a ball, of a size of 1, 2/3, 1/2, ...: the first ones forget where the weights were."""

    def move(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        share = 2 / (state["count"] + 1)
        p.mul_(1 - share).add_(p.grad / (p.grad.norm() + 1e-12), alpha=-0.8 * share * math.sqrt(p.numel()))

    model = make_mlp(4, 32, 1)
    loop = trial.run(
        model, OwnStep(model.parameters(), move), 600, lambda number: miss_sines(model, torch.randn(64, 4))
    )
    trial.expect("highest loss", max(loop.losses), above=10 * loop.losses[0])
    trial.expect("last loss", loop.final, below=0.2 * loop.losses[0])


@scenario
def reheated_sampler(trial: Trial) -> None:
    """Langevin dynamics inside the optimizer: at step 333 and 666 it is heated, and leaves a loss of 0.001 at once."""

    def move(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        noise = math.sqrt(2 * group["lr"] * group["heat"])
        p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=noise)

    model = make_mlp(4, 64, 1)
    optimizer = OwnStep(model.parameters(), move, lr=0.05, heat=0.0)

    def loss(number: int) -> Tensor:
        optimizer.param_groups[0]["heat"] = 0.03 * (1 - number % 333 / 333) if number >= 333 else 0.0
        return miss_sum(model, torch.randn(64, 4))

    loop = trial.run(model, optimizer, 1000, loss)
    trial.expect("loss when hot", max(loop.losses[340:400]), above=20 * min(loop.losses[300:333]))


@scenario
def rate_that_grows_from_nothing(trial: Trial) -> None:
    """D-adaptation and its like: the rate begins at 1e-6 and grows by 15 % a step, so nothing happens for 50 steps."""
    model = make_mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-6)

    def loss(number: int) -> Tensor:
        optimizer.param_groups[0]["lr"] = min(5e-3, 1e-6 * 1.15**number)
        return miss_sines(model, torch.randn(64, 4))

    loop = trial.run(model, optimizer, 400, loss)
    trial.expect("last loss", loop.final, below=0.2 * loop.losses[0])
