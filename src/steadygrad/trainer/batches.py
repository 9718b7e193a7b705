"""A batch from a loader -> the same batch on the device; a number of batches -> the number of steps they make.

Steps are counted only here, so that the schedule, the loop and a resumed loop agree. Runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from steadygrad.state.tree import map_tensors
from steadygrad.view.progress import count_items


def move_batch(batch: Any, device: torch.device) -> Any:
    """Move every tensor of nested containers to `device`; leave anything else as it is."""
    # Asynchronous from pinned memory only; the forward is queued on the same stream, behind the copy
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


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
