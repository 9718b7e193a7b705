"""Faults for tests: a bad batch, a bad gradient, a bad loss, a bad weight, each at the steps you name.

They go in where real ones do (data, autograd, the weights), so that whatever protects against them is really tested.
Counting starts at 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


def poison_batches(
    batches: Iterable[Any], *, at: Collection[int], value: float = math.nan, sample: int = 0
) -> Iterator[Any]:
    """Yield `batches`; in those numbered in `at` one sample of the first floating-point tensor is all `value`."""
    for number, batch in enumerate(batches):
        yield _poison(batch, value, sample) if number in at else batch


def _poison(batch: Any, value: float, sample: int) -> Any:
    if isinstance(batch, Tensor):
        if not batch.is_floating_point():
            raise ValueError(f"cannot poison a batch of dtype {batch.dtype}. Give one with floating-point data.")
        bad = batch.clone()
        bad[sample] = value
        return bad
    if isinstance(batch, dict):
        key = next(k for k, v in batch.items() if isinstance(v, Tensor) and v.is_floating_point())
        return {**batch, key: _poison(batch[key], value, sample)}
    index = next(i for i, v in enumerate(batch) if isinstance(v, Tensor) and v.is_floating_point())
    return type(batch)(_poison(v, value, sample) if i == index else v for i, v in enumerate(batch))


def poison_gradient(
    parameter: Tensor, *, at: Collection[int], value: float = math.nan, index: int = -1
) -> RemovableHandle:
    """Write `value` into one element of `parameter`'s gradient in the backward calls numbered in `at`."""
    calls = iter(range(1 << 62))

    def hook(gradient: Tensor) -> Tensor | None:
        if next(calls) not in at:
            return None
        bad = gradient.clone().contiguous()
        bad.view(-1)[index] = value
        return bad

    handle: RemovableHandle = parameter.register_hook(hook)
    return handle


def poison_loss(fn: Callable[..., Tensor], *, at: Collection[int], value: float = math.nan) -> Callable[..., Tensor]:
    """`fn` with `value` added to its loss in the calls numbered in `at`: the loss is bad, its gradients are not."""
    calls = iter(range(1 << 62))

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        loss = fn(*args, **kwargs)
        return loss + value if next(calls) in at else loss

    return poisoned


@torch.no_grad()
def corrupt_weight(parameter: Tensor, value: float = math.nan, index: int = 0) -> None:
    """Write `value` into one element of a weight, as a bad memory cell or a bad checkpoint does."""
    parameter.view(-1)[index] = value
