"""The parameter groups of optimizers, and flags that look like freezing -> what was written and has no effect.

torch accepts any key in a group and any attribute of a module or a parameter. So a misspelt option has no effect, and
`layer.requires_grad = False` or `p.require_grad = False` freezes nothing. Names and flags are read on the host.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from steadygrad.facts import Misspelt
from steadygrad.state.modules import list_modules
from steadygrad.state.trained_parameters import TrainedParameters

ALIASES = {"learning_rate": "lr", "learning-rate": "lr", "learningrate": "lr", "LR": "lr", "Lr": "lr"}
FEWEST_LETTERS = 5
"""Of an option that a misspelt one may be recognised by: 'eps' and 'lr' are close to many words."""
CLOSE = 0.85
"""Share of letters in common, in order; names that are longer by a word, as 'min_weight_decay', are others."""
FLAGS = ("require_grad", "require_grads", "requires_grads", "requieres_grad", "required_grad")
"""Attributes of a parameter by which `requires_grad` was meant."""


def find_misspelt(optimizers: list[torch.optim.Optimizer]) -> list[Misspelt]:
    """Return options that torch's own optimizers do not know, while the one that was meant has its default."""
    found = []
    for optimizer in optimizers:
        if not type(optimizer).__module__.startswith("torch.optim."):
            continue  # another may read options of its own
        for number, group in enumerate(optimizer.param_groups):
            found += list(_find_in_group(number, group, optimizer.defaults))
    return found


def _find_in_group(number: int, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Misspelt]:
    for name, value in group.items():
        meant = "" if name == "params" or name in defaults else _find_meant(name, defaults)
        if not meant or not isinstance(value, (int, float)) or not isinstance(group.get(meant), (int, float)):
            continue
        # One that was set to another value is followed by the program itself, and the other name is its own note.
        if group[meant] == defaults[meant] != value:
            yield Misspelt(group=number, name=name, meant=meant, value=float(value), used=float(group[meant]))


def _find_meant(name: str, defaults: Mapping[str, Any]) -> str:
    """Return the option that a name was meant for; empty if it may well be a name of the program's own."""
    if name in ALIASES:
        return ALIASES[name] if ALIASES[name] in defaults else ""
    if not name.replace("_", "").replace("-", "").isalpha():
        return ""
    known = [one for one in defaults if len(one) >= FEWEST_LETTERS and abs(len(one) - len(name)) <= 1]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)), "")


def find_doubled(trained: TrainedParameters) -> list[str]:
    """Return parameters that stand twice in one group: each step updates them twice."""
    names = {id(p): name for name, p in trained.named}
    counts = [Counter(id(p) for p in group["params"]) for one in trained.optimizers for group in one.param_groups]
    return [names.get(key, "a parameter") for count in counts for key, num in count.items() if num > 1]


def find_not_frozen(trained: TrainedParameters) -> Iterator[str]:
    """Yield 'body.requires_grad = False' and the like, where the optimizer trains what was meant to be frozen."""
    held = {id(p) for _, p in trained.named if p.requires_grad}
    for name, parameter in trained.named:
        flag = next((flag for flag in FLAGS if vars(parameter).get(flag) is False), "") if id(parameter) in held else ""
        if flag:
            yield f"{name}.{flag} = False"
    for name, module in list_modules(trained.model):
        if vars(module).get("requires_grad") is not False or _has_own_meaning(type(module)):
            continue
        parameters = list(module.parameters())
        if parameters and all(id(p) in held for p in parameters):
            yield f"{name or 'model'}.requires_grad = False"


def _has_own_meaning(kind: type[nn.Module]) -> bool:
    """Whether code of the class mentions the attribute, which may then be its own setting."""
    kinds = [one for one in kind.__mro__ if one not in nn.Module.__mro__]
    functions = [value for one in kinds for value in vars(one).values() if isinstance(value, FunctionType)]
    return any("requires_grad" in function.__code__.co_names for function in functions)
