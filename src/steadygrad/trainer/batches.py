"""A batch from a loader -> the same batch on the device; a number of batches -> the number of steps they make.

Steps are counted only here, so that the schedule, the loop and a resumed loop agree. Runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from steadygrad.view.progress import count_items


def move_batch(batch: Any, device: torch.device) -> Any:
    """Move every tensor of nested containers to `device`; leave anything else as it is."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_batch(value, device) for value in batch)
    return batch


def count_batches(loader: Iterable[Any]) -> int | None:
    """Return the number of batches in an epoch; None if the loader has no length."""
    return count_items(loader)


def count_steps(num_batches: int | None, *, epochs: int, accumulation: int, limit: int | None) -> int | None:
    """Return the number of optimizer steps in `epochs` epochs, at most `limit`; None if unknown.

    >>> count_steps(5, epochs=3, accumulation=2, limit=None)
    9
    """
    if num_batches is None:
        return limit
    steps = epochs * math.ceil(num_batches / accumulation)
    return steps if limit is None else min(steps, limit)


def size_window(num_done: int, num_batches: int | None, accumulation: int) -> int:
    """Return the number of microbatches in the current step: fewer at the end if they do not divide evenly.

    >>> [size_window(done, 5, 2) for done in range(5)]
    [2, 2, 2, 2, 1]
    """
    if num_batches is None:
        return accumulation
    start = num_done // accumulation * accumulation
    return max(1, min(accumulation, num_batches - start))
