"""The arguments of a step -> how many samples they hold, and the same arguments with only some of them.

Tensors, and lists of one item a sample, are cut along their first dimension, whatever they are nested in: dicts, lists,
tuples, named tuples, dataclasses, Hugging Face's BatchEncoding. What has another first dimension is left whole, as are
modules. The caller's objects are not touched.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.state.tree import MAX_DEPTH, find_tensors, is_instance_of_dataclass, refill, replace_fields


def count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the first dimension that most tensors share; None if the batch does not consist of samples."""
    sizes: collections.Counter[int] = collections.Counter()
    for _, tensor in find_tensors(args, kwargs):
        if tensor.dim():
            sizes[tensor.shape[0]] += 1
    if not sizes:
        return None
    size, _ = max(sizes.items(), key=lambda item: (item[1], item[0]))
    return size or None


def take_samples(value: Any, indices: Sequence[int], size: int, depth: int = MAX_DEPTH) -> Any:
    """Return `value` with only the samples `indices`."""
    if isinstance(value, Tensor):
        return _take_rows(value, indices, size)
    if isinstance(value, nn.Module) or not depth:
        return value
    if isinstance(value, list | tuple):
        # A list of `size` batched tensors holds features, not samples: each of them is cut instead.
        if len(value) == size and not any(_is_batched(item, size) for item in value):
            return _rebuild(value, [value[index] for index in indices])
        return _rebuild(value, [take_samples(item, indices, size, depth - 1) for item in value])
    if isinstance(value, Mapping):
        return refill(value, {key: take_samples(item, indices, size, depth - 1) for key, item in value.items()})
    if is_instance_of_dataclass(value):
        return replace_fields(value, lambda item: take_samples(item, indices, size, depth - 1))
    return value


def _take_rows(tensor: Tensor, indices: Sequence[int], size: int) -> Tensor:
    if not tensor.dim() or tensor.shape[0] != size:
        return tensor
    # A copy, not a view: an op that writes to the part must not reach the batch.
    rows = torch.tensor(indices, device=tensor.device)
    taken = tensor.detach().index_select(0, rows)
    # Its own leaf: gradients of a part must not be added to the batch's.
    return taken.requires_grad_() if tensor.requires_grad else taken


def _is_batched(item: Any, size: int) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == size


def _rebuild(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields") and len(items) == len(value):
        return type(value)(*items)
    return items if isinstance(value, list) else tuple(items)
