"""Faults for tests: a bad batch, gradient, loss, weight or learning rate, each at the steps you name.

They go in where real ones do (data, autograd, the weights), so that whatever protects against them is really tested.
Counting starts at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from steadygrad.diagnose import is_replaying
from steadygrad.state.tree import refill, remake


def poison_batches(
    batches: Iterable[Any], *, at: Collection[int], value: float = math.nan, sample: int = 0
) -> Iterator[Any]:
    """Yield `batches`; in those numbered in `at` one sample of the first floating-point tensor is all `value`."""
    for number, batch in enumerate(batches):
        yield _poison(batch, value, sample) if number in at else batch


def _poison(batch: Any, value: float, sample: int) -> Any:
    def spoil(tensor: Tensor) -> Tensor:
        # A copy: the dataset hands out the same memory again in the next epoch.
        bad = tensor.clone()
        bad[sample] = value
        return bad

    return _change_first(batch, spoil)


def _change_first(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` with its first floating-point tensor changed; a mapping, list or tuple keeps its type."""
    if isinstance(batch, Tensor):
        if not batch.is_floating_point():
            raise ValueError(f"cannot spoil a batch of dtype {batch.dtype}. Give one with floating-point data.")
        return change(batch)
    if isinstance(batch, Mapping):
        key = next(k for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point())
        return refill(batch, {**batch, key: change(batch[key])})
    index = next(i for i, v in enumerate(batch) if isinstance(v, Tensor) and v.is_floating_point())
    return remake(batch, [change(v) if i == index else v for i, v in enumerate(batch)])


def scale_batches(batches: Iterable[Any], *, at: Collection[int], factor: float) -> Iterator[Any]:
    """Yield `batches`; in those numbered in `at` the first floating-point tensor is `factor` times as large.

    Finite, and far outside what the model has seen: activations overflow in half precision, gradients explode.
    """
    for number, batch in enumerate(batches):
        yield _change_first(batch, lambda tensor: tensor * factor) if number in at else batch


def poison_gradient(
    parameter: Tensor, *, at: Collection[int], value: float = math.nan, index: int = -1
) -> RemovableHandle:
    """Write `value` into one element of `parameter`'s gradient in the backward calls numbered in `at`."""
    calls = _Calls()

    def hook(gradient: Tensor) -> Tensor | None:
        if calls.count() not in at:
            return None
        # A hook must not write to its argument: autograd may use the same tensor elsewhere.
        bad = gradient.clone().contiguous()
        bad.view(-1)[index] = value
        return bad

    handle: RemovableHandle = parameter.register_hook(hook)
    return handle


def poison_loss(fn: Callable[..., Tensor], *, at: Collection[int], value: float = math.nan) -> Callable[..., Tensor]:
    """`fn` with `value` added to its loss in the calls numbered in `at`: the loss is bad, its gradients are not."""
    calls = _Calls()

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        loss = fn(*args, **kwargs)
        # Added and not assigned: a constant has no derivative.
        return loss + value if calls.count() in at else loss

    return poisoned


class _Calls:
    """Numbers calls from 0. A replay of a step is not another call: it has the number of the last one."""

    def __init__(self) -> None:
        self._next = 0

    def count(self) -> int:
        if not is_replaying():
            self._next += 1
        return self._next - 1


@torch.no_grad()
def corrupt_weight(parameter: Tensor, value: float = math.nan, index: int = 0) -> None:
    """Write `value` into one element of a weight, as a bad memory cell or a bad checkpoint does."""
    parameter.view(-1)[index] = value


def jump_lr(optimizer: torch.optim.Optimizer, *, at: int, until: int, factor: float) -> Callable[[int], None]:
    """Return a schedule gone wrong: call what is returned before each step, with its number.

    From step `at` on it assigns `factor` times the learning rate of now, and at step `until` the right one again.
    """
    rates = [group["lr"] for group in optimizer.param_groups]

    def before_step(step: int) -> None:
        if at <= step <= until:
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate * factor if step < until else rate

    return before_step
