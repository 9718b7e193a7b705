"""OwnScale: an optimizer that deals with non-finite gradients itself: it lowers its scale, or cleans them.

A guard that skips the steps of the first kind would keep the scale where it is, and every later step would overflow
like the first. One of the second kind has the program's word that such steps are to be taken. So an optimizer whose
code, or whose hooks, look for such numbers is given the step under a copy. If it changes nothing and lowers a number
that it keeps, it has left the step out; if gradients, weights and state are finite afterwards, it has taken it; else
everything is put back. Costs nothing while steps are good, and a copy of weights, gradients and state at a bad one.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.state.code_names import list_names
from steadygrad.state.tree import find_tensors

ASKS = ("finite", "isnan", "isinf", "overflow", "found_inf", "nan_to_num")
"""Parts of the names in code that looks for numbers that are not finite."""
DEPTH = 3
"""Calls from `step()` within which it asks."""
LOWERED = 0.75
"""A scale is at most this share of what it was, after an overflow."""


class OwnScale:
    """The loss scale of one optimizer, as a Guard asks for a GradScaler's; the optimizer itself uses and updates it."""

    unscales = False  # the optimizer divides its gradients by the scale itself

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.may_be_there = True
        """Whether the optimizer may deal with such gradients: its code looks for them, or hooks run before it."""
        self.has_taken = False
        """Whether the last call of `leave_out` was a step with clean gradients instead."""
        self._owner: Any = None
        self._name = ""

    @property
    def now(self) -> Tensor | None:
        """The scale; None until the optimizer has shown that it has one."""
        scale = None if self._owner is None else _read(vars(self._owner).get(self._name))
        return None if scale is None else torch.tensor(scale, device="cpu")

    @property
    def factor(self) -> Tensor | None:
        """The scale that the gradients carry."""
        return self.now

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss as it is: the program scales it."""
        return loss

    def end_step(self) -> None:
        """End the step."""

    def update(self, *, bad_gradient: Tensor, bad_loss: Tensor | None) -> None:
        """Leave that to the optimizer."""

    def _may_ask(self) -> bool:
        # A wrapper of an optimizer may be one without having been initialised as one.
        return bool(getattr(self._optimizer, "_optimizer_step_pre_hooks", None)) or _looks(type(self._optimizer))

    @torch.no_grad()
    def leave_out(self, step: Callable[[], Any]) -> float | None:
        """Have the optimizer leave out an overflowed step by `step`; return the step's scale, None if it did not."""
        self.has_taken = False
        if not self.may_be_there or not self._may_ask():
            return None
        try:
            before, kept = _list_numbers(self._optimizer), _Kept(self._optimizer)
        except Exception:  # no memory for a copy, or parameters that cannot be copied
            return None
        try:
            step()
            lowered = [one for one in before if _is_lower(_read(vars(one[0]).get(one[1])), one[2])]
            if lowered and kept.is_unchanged():
                self._owner, self._name, scale = max(lowered, key=lambda one: one[2])
                return scale
            self.has_taken = kept.has_finite_step()
            if self.has_taken:
                return None
        except BaseException:  # a scale that got too low, for example
            if not kept.is_unchanged():
                kept.put_back()
            raise
        kept.put_back()
        self.may_be_there = False
        return None


class _Kept:
    """A copy of what an optimizer's step can change."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers = [one for one in _list_owners(optimizer) if isinstance(one, torch.optim.Optimizer)]
        parameters = {id(p): p for o in self._optimizers for group in o.param_groups for p in group["params"]}
        self._gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters.values()]
        states = [(o, key, value) for o in self._optimizers for key, value in o.state.items()]
        self._states = [(o, key, value, dict(value) if isinstance(value, dict) else None) for o, key, value in states]
        held = [*parameters.values(), *(tensor for _, _, value in states for _, tensor in find_tensors((value,), {}))]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in held]
        self._numbers = [
            (owner, {name: value for name, value in vars(owner).items() if type(value) in (bool, int, float)})
            for owner in _list_owners(optimizer)
        ]

    def is_unchanged(self) -> bool:
        """Return whether weights and state are as they were, bit for bit."""
        num_states = sum(len(o.state) for o in self._optimizers)
        return num_states == len(self._states) and all(_are_same(tensor, copy) for tensor, copy in self._tensors)

    def has_finite_step(self) -> bool:
        """Return whether gradients, weights and state are finite after the step: those gradients were cleaned."""
        gradients = [p.grad for p, _, _ in self._gradients if p.grad is not None]
        states = [t for o in self._optimizers for _, t in find_tensors(([*o.state.values()],), {})]
        return all(bool(t.isfinite().all()) for t in (*gradients, *states, *(p for p, _, _ in self._gradients)))

    def put_back(self) -> None:
        """Undo the step."""
        for tensor, copy in self._tensors:
            tensor.detach().copy_(copy)
        for parameter, gradient, copied in self._gradients:
            if gradient is not None and copied is not None:
                gradient.copy_(copied)
            parameter.grad = gradient
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for optimizer, key, value, items in self._states:
            if items is not None:
                value.clear()
                value.update(items)
            optimizer.state[key] = value
        for owner, numbers in self._numbers:
            vars(owner).update(numbers)


def _list_owners(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield the optimizer and the objects that it holds, such as one that it wraps, or a scaler."""
    yield optimizer
    for value in vars(optimizer).values():
        is_data = isinstance(value, Tensor | nn.Module | type | types.ModuleType) or callable(value)
        if not is_data and hasattr(value, "__dict__") and value is not optimizer.state:
            yield value


def _list_numbers(optimizer: torch.optim.Optimizer) -> list[tuple[Any, str, float]]:
    """Return the numbers that the optimizer and the objects in it hold: owner, name, value."""
    found = [(owner, name, _read(value)) for owner in _list_owners(optimizer) for name, value in vars(owner).items()]
    return [(owner, name, number) for owner, name, number in found if number is not None]


def _read(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.is_floating_point() else None
    return float(value) if type(value) in (int, float) else None


def _is_lower(now: float | None, before: float) -> bool:
    return now is not None and before > 1 and 0 < now <= LOWERED * before


def _are_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _looks(kind: type) -> bool:
    """Return whether the code of `step()`, or what it calls, looks for such numbers; torch's does not."""
    if kind.step.__module__.startswith("torch."):  # type: ignore[attr-defined]
        return False
    waiting, seen = [_unwrap(kind.step)], set()  # type: ignore[attr-defined]
    for _ in range(DEPTH):
        names = {name for function in waiting for name in list_names(function)}
        if any(part in name for name in names for part in ASKS):
            return True
        seen |= {id(function) for function in waiting}
        scopes = [vars(base) for base in kind.__mro__] + [getattr(f, "__globals__", {}) for f in waiting]
        called = [_unwrap(scope[name]) for scope in scopes for name in names if name in scope]
        waiting = [one for one in called if isinstance(one, types.FunctionType) and id(one) not in seen]
    return False


def _unwrap(function: Any) -> Any:
    """Return the function inside decorators, such as torch's profiling of `step`."""
    function = getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
