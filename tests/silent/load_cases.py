"""Loads of a module's own weights, which change nothing, and programs that load them on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]
State = dict[str, Tensor]


def _train(model: nn.Module, after: Callable[[int], Any], num: int = 24) -> Built:
    """Train, and call `after` with the number of each step."""

    def train(guard: Any) -> None:
        for step, (x, y) in enumerate(clusters(num)):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            after(step)

    return model, adam(model), train


@case("idle_load", "discuss.pytorch.org: best = model.state_dict() without a copy; loaded after the last step")
def best_weights_kept_as_a_reference(bug: bool) -> Built:
    model, best = mlp(8, 16, 4), {}

    def keep(step: int) -> None:
        if step == 8:
            best.update(model.state_dict() if bug else copy.deepcopy(model.state_dict()))
        if step == 23:
            model.load_state_dict(best)

    return _train(model, keep)


@case("idle_load", "weights are set aside for an evaluation of their average, as a reference")
def set_aside_as_a_reference(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    average = copy.deepcopy(model)

    @torch.no_grad()
    def swap(step: int) -> None:
        for kept, parameter in zip(average.parameters(), model.parameters()):
            kept.lerp_(parameter, 0.1)
        if step % 10 == 9:
            backup = model.state_dict() if bug else {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(average.state_dict())
            model.load_state_dict(backup)

    return _train(model, swap)


@case("idle_load", "thesouther/MARL#8: target.load_state_dict(target.state_dict())")
def target_loads_itself(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    target = copy.deepcopy(model)

    def follow(step: int) -> None:
        if step % 5 == 4:
            target.load_state_dict((target if bug else model).state_dict())

    return _train(model, follow)


@case(None, "an average whose state is changed in place, and then loaded, which is superfluous")
def average_changed_in_place(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    average = copy.deepcopy(model)
    state = average.state_dict()

    def follow(step: int) -> None:
        for name, value in model.state_dict().items():
            state[name].mul_(0.9).add_(value, alpha=0.1)
        average.load_state_dict(state)

    return _train(model, follow)


@case(None, "slow weights are written into a state that is kept, and then loaded: by copy_ and by .data")
def slow_weights_written_into_a_kept_state(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    slow, state = copy.deepcopy(model.state_dict()), model.state_dict()

    def synchronize(step: int) -> None:
        if step % 5 == 4:
            for name, value in slow.items():
                value.lerp_(state[name], 0.5)
                (state[name].data if step % 2 else state[name]).copy_(value)
            model.load_state_dict(state)

    return _train(model, synchronize)


@case(None, "some layers of a state are replaced before it is loaded, during training")
def part_of_a_state_replaced(bug: bool) -> Built:
    model, other = mlp(8, 16, 4), mlp(8, 16, 4)

    def graft(step: int) -> None:
        if step % 6 == 5:
            state = model.state_dict()
            state.update({name: value for name, value in other.state_dict().items() if name.startswith("0.")})
            model.load_state_dict(state)

    return _train(model, graft)


@case(None, "a model that stands for its own average, where none is wanted, and is loaded with its own weights")
def model_in_place_of_its_average(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    average = model

    return _train(model, lambda _step: average.load_state_dict(model.state_dict()))


@case(None, "a target that is moved by other means, and is loaded with its own weights as well")
def target_moved_by_data(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    target = copy.deepcopy(model)

    def follow(step: int) -> None:
        for kept, parameter in zip(target.parameters(), model.parameters()):
            kept.data.copy_(0.9 * kept.data + 0.1 * parameter.data)
        target.load_state_dict(target.state_dict())

    return _train(model, follow)
