"""The arguments of a step -> how many samples they hold, and the same arguments with only some of them.

Tensors, and lists of one item a sample, are cut along their first dimension, whatever they are nested in: dicts, lists,
tuples, named tuples, dataclasses, Hugging Face's BatchEncoding. What has another first dimension is left whole, as are
modules. The caller's objects are not touched.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 8
"""Containers inside containers that are opened."""


def count_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the first dimension that most tensors share; None if the batch does not consist of samples."""
    sizes: collections.Counter[int] = collections.Counter()
    for tensor in find_tensors([*args, *kwargs.values()], MAX_DEPTH):
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
        if len(value) == size and not any(_is_batched(item, size) for item in value):
            return _rebuild(value, [value[index] for index in indices])
        return _rebuild(value, [take_samples(item, indices, size, depth - 1) for item in value])
    if isinstance(value, Mapping):
        taken = {key: take_samples(item, indices, size, depth - 1) for key, item in value.items()}
        return taken if type(value) is dict else _refill(value, taken)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _replace_fields(value, indices, size, depth)
    return value


def _take_rows(tensor: Tensor, indices: Sequence[int], size: int) -> Tensor:
    if not tensor.dim() or tensor.shape[0] != size:
        return tensor
    rows = torch.tensor(indices, device=tensor.device)
    taken = tensor.detach().index_select(0, rows)
    return taken.requires_grad_() if tensor.requires_grad else taken


def _is_batched(item: Any, size: int) -> bool:
    return isinstance(item, Tensor) and item.dim() > 0 and item.shape[0] == size


def _rebuild(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields") and len(items) == len(value):
        return type(value)(*items)
    return items if isinstance(value, list) else tuple(items)


def _refill(value: Any, taken: dict[Any, Any]) -> Any:
    """Return a mapping of the same class, with other items."""
    filled = copy.copy(value)
    if isinstance(getattr(filled, "data", None), dict):  # a UserDict shares its dict with the copy
        filled.data = dict(filled.data)
    for key, item in taken.items():
        filled[key] = item
    return filled


def _replace_fields(value: Any, indices: Sequence[int], size: int, depth: int) -> Any:
    changed = copy.copy(value)
    for one in dataclasses.fields(value):
        item = take_samples(getattr(value, one.name), indices, size, depth - 1)
        object.__setattr__(changed, one.name, item)  # frozen ones too: the copy is ours
    return changed


def find_tensors(value: Any, depth: int) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module) or not depth:
        return []
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, one.name) for one in dataclasses.fields(value)]
    else:
        return []
    return [tensor for item in items for tensor in find_tensors(item, depth - 1)]
