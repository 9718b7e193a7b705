"""Steps that compute their gradients inside: `optimizer.step(closure)`.

First-order optimizers call the closure once; after a bad result the gradients are removed until the step is over, which
makes torch's optimizers do nothing. LBFGS calls it many times and changes the weights in between, so there everything
is copied first and restored if any evaluation was bad.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


def step_with_closure(
    make: Callable[..., Any],
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_bad: Callable[[], bool],
    conclude: Callable[[bool], None],
) -> Any:
    """Take the step; `is_bad` is called after the first evaluation, with LBFGS after each."""

    def make_with(around: Callable[[Callable[[], Any]], Any]) -> Any:
        if "closure" in kwargs:
            return make(*args, **{**kwargs, "closure": lambda: around(kwargs["closure"])})
        return make(lambda: around(args[0]), *args[1:], **kwargs)

    step = _step_many_times if isinstance(optimizer, torch.optim.LBFGS) else _step_once
    result, was_bad = step(make_with, optimizer, is_bad)
    conclude(was_bad)
    return result


def _step_once(make_with: Callable[..., Any], optimizer: Optimizer, is_bad: Callable[[], bool]) -> tuple[Any, bool]:
    taken: list[tuple[Tensor, Tensor | None]] = []
    bad: list[bool] = []

    def watch(closure: Callable[[], Any]) -> Any:
        result = closure()
        if not bad:
            bad.append(is_bad())
            if bad[0]:
                taken.extend(_take_gradients(optimizer))
        return result

    try:
        return make_with(watch), any(bad)
    finally:
        # The script may look at its gradients after the step, bad ones included.
        for parameter, gradient in taken:
            parameter.grad = gradient


def _take_gradients(optimizer: Optimizer) -> list[tuple[Tensor, Tensor | None]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    taken = [(p, p.grad) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return taken


def _step_many_times(
    make_with: Callable[..., Any], optimizer: Optimizer, is_bad: Callable[[], bool]
) -> tuple[Any, bool]:
    # Costs a copy of the weights and of LBFGS's history at every step: nothing less can undo its line search.
    before = _Copy(optimizer)
    bad: list[bool] = []

    def watch(closure: Callable[[], Any]) -> Any:
        result = closure()
        if not any(bad):  # report the first bad evaluation's numbers, else the last one's
            bad.append(is_bad())
        return result

    result = make_with(watch)
    if any(bad):
        before.restore()
    return result, any(bad)


class _Copy:
    """Weights and state of an optimizer as they are now."""

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(p, p.clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; the optimizer keeps its own dict, which other code may refer to."""
        for parameter, weight in self._weights:
            # In place: compiled graphs, tied layers and other optimizers hold this very tensor.
            parameter.copy_(weight)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
