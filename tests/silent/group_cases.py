"""Options and flags that torch accepts and does not heed, and programs with options and flags of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, case, clusters, mlp
from torch import Tensor, nn

Built = tuple[nn.Module, torch.optim.Optimizer, Train]
Optimizer = torch.optim.Optimizer


def _train(model: nn.Module, optimizer: Optimizer, around: Callable[[int], Any] = int, num: int = 12) -> Built:
    """Train, and call `around` with the number of each step before it."""

    def train(guard: Any) -> None:
        for step, (x, y) in enumerate(clusters(num)):
            around(step)
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, optimizer, train


def _split(model: nn.Sequential, **options: Any) -> list[dict[str, Any]]:
    """Return a group with these options for the first layer, and one for the last."""
    return [{"params": list(model[0].parameters()), **options}, {"params": list(model[-1].parameters())}]


@case("wrong_group", "discuss.pytorch.org: a group with 'learning_rate', where torch has 'lr'")
def rate_by_another_name(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    return _train(model, torch.optim.AdamW(_split(model, **{"learning_rate" if bug else "lr": 1e-5}), 1e-3))


@case("wrong_group", "a group without decay, misspelt")
def decay_misspelt(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    return _train(
        model, torch.optim.SGD(_split(model, **{"weight_deacy" if bug else "weight_decay": 0}), 0.1, 0.9, 0, 0.1)
    )


@case("wrong_group", "pytorch/pytorch#40967: a layer is listed with the model and by itself")
def layer_listed_twice(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    more = list(model[-1].parameters()) if bug else []
    return _train(model, torch.optim.SGD([*model.parameters(), *more], 0.05))


@case("not_frozen", "codertimo/BERT-pytorch#104, udacity/deep-learning-v2-pytorch#12: require_grad without its s")
def flag_misspelt(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    for parameter in model[0].parameters():
        setattr(parameter, "require_grad" if bug else "requires_grad", False)
    return _train(model, torch.optim.AdamW(model.parameters()))


@case("not_frozen", "discuss.pytorch.org: model.backbone.requires_grad = False")
def flag_of_a_module(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    if bug:
        model[0].requires_grad = False
    else:
        model[0].requires_grad_(False)
    return _train(model, torch.optim.AdamW(model.parameters()))


@case(None, "options of the program's own: names, scales, bounds of its schedules")
def own_options(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    own = {
        "name": "body",
        "lr_scale": 0.5,
        "initial_lr": 0.1,
        "min_weight_decay": 0.1,
        "weight_decay_end": 0.4,
        "wd": 1,
    }
    return _train(model, torch.optim.AdamW(_split(model, **own), 1e-3))


@case(None, "a schedule by hand that keeps its base rate in the group")
def base_rate_in_the_group(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(_split(model, learning_rate=1e-2), 1e-3)
    optimizer.param_groups[1]["learning_rate"] = 1e-4

    def schedule(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["learning_rate"] * (step + 1) / 12

    return _train(model, optimizer, schedule)


class OwnRate(torch.optim.SGD):
    """Reads an option of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = group.get("learning_rate", 0.1)
        super().step(closure)


@case(None, "an optimizer of the program's own that reads such an option")
def own_optimizer(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    return _train(model, OwnRate(_split(model, learning_rate=0.05), 0.1))


class Body(nn.Linear):
    """Has a setting that happens to be called as the flag."""

    def __init__(self, requires_grad: bool) -> None:
        super().__init__(8, 16)
        self.requires_grad = requires_grad  # type: ignore[assignment, method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.requires_grad else x.detach())


@case(None, "a module whose own setting is called requires_grad, and is about its input")
def setting_called_as_the_flag(bug: bool) -> Built:
    model = nn.Sequential(Body(requires_grad=False), nn.ReLU(), nn.Linear(16, 4))
    return _train(model, torch.optim.AdamW(model.parameters()))


@case(None, "the flag is misspelt, but the optimizer holds the last layer only: nothing else is trained")
def flag_without_harm(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    for parameter in model[0].parameters():
        parameter.require_grad = False  # type: ignore[attr-defined]
    return _train(model, torch.optim.AdamW(model[-1].parameters()))
