"""A Cure: the failure of an entry of the library, as code that fails, and the inputs on which its fixes run.

`broken` and the entry's fixes are expressions, evaluated with the same names: `sick` ones, on which `broken` fails and
each fix must not, and `healthy` ones, on which both must agree unless `differs` says why a fix computes something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import steadygrad
import steadygrad.losses

Names = dict[str, Any]

CONSTANT = "takes a part as a constant, without a gradient"

TOOLS: Names = {"torch": torch, "F": F, "nn": nn, "math": math, "steadygrad": steadygrad, "eps": 1e-6}


def as_is(result: Any, names: Names) -> Any:
    """Inspect the result of the expression itself."""
    return result


@dataclass(frozen=True, kw_only=True)
class Cure:
    broken: str
    sick: Mapping[str, Any]
    also: tuple[str, ...] = ()
    """Other ops, or other spellings, that fail in the same way."""
    healthy: Mapping[str, Any] | None = None
    """Values that replace those in `sick` to make it healthy; None: nothing healthy exists, only fixes are compared."""
    learned: tuple[str, ...] = ("x",)
    """Names that need a finite gradient."""
    derive: Callable[[Names], Names] | None = None
    """More names, created from these: a layer, a gradient, a function to call."""
    apply: Callable[[Any, Names], Any] = as_is
    """Maps the result of an expression to the tensors to inspect: call the layer, take the step."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """Fix -> why its values differ on healthy input."""
    tolerance: float = 1e-3
    """Relative tolerance; the eps of the fixes changes values by about that."""
    unseen: str = ""
    """Why it cannot be a step for `diagnose`; empty if it can."""

    def names(self, *, healthy: bool = False) -> Names:
        """Return new copies, with gradients for the learned ones."""
        given = {**self.sick, **(self.healthy or {})} if healthy else dict(self.sick)
        return {name: copy(value, learned=name in self.learned) for name, value in given.items()}

    def run(self, expression: str, names: Names) -> list[Tensor]:
        """Return the tensors that the expression gives."""
        names = {**names, **(self.derive(names) if self.derive else {})}
        result = self.apply(eval(expression, {**TOOLS, **names}), names)
        return [one for one in (result if isinstance(result, list | tuple) else [result]) if isinstance(one, Tensor)]

    def measure(self, expression: str, *, healthy: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return values and gradients. The sum is weighted so that no two elements' gradients cancel."""
        names = self.names(healthy=healthy)
        values = self.run(expression, names)
        total = sum_up(values, weighted=True)
        if total.requires_grad:
            total.backward()
        leaves = [names[name] for name in self.learned if isinstance(names[name], Tensor)]
        leaves += [p for value in names.values() if isinstance(value, nn.Module) for p in value.parameters()]
        return [value.detach() for value in values], [leaf.grad for leaf in leaves if leaf.grad is not None]


def sum_up(values: list[Tensor], *, weighted: bool = False) -> Tensor:
    """Return one number from all elements, each weighted differently on request."""
    if len(values) == 1 and values[0].dim() == 0:
        return values[0]
    total = torch.zeros(())
    for value in values:
        reals = torch.view_as_real(value) if value.is_complex() else value
        if weighted and reals.is_floating_point():
            reals = reals.float() * torch.linspace(0.5, 1.0, reals.numel()).view(reals.shape)
        total = total + reals.float().sum()
    return total


def copy(value: Any, *, learned: bool) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(learned)
    return deepcopy(value) if isinstance(value, nn.Module) else value


def t(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def half(*numbers: float) -> Tensor:
    return t(*numbers, dtype=torch.float16)
