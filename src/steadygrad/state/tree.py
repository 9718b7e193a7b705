"""Nested containers -> the tensors in them, by path; and the same containers with other tensors.

Opens what batches are made of: mappings, lists, tuples, named tuples, dataclasses, Hugging Face's BatchEncoding.
Modules are never opened, nor is an object whose own code raises when it is looked at: a lazy proxy outside its
context must not end a training that would never have touched it. The caller's containers are not changed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

MAX_DEPTH = 8
"""Containers inside containers that are opened; a batch that contains itself ends there."""


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the arguments of a call, each with its path: 'input_ids', 'images.0'."""
    if len(args) == 1 and not kwargs:
        yield from _walk(args[0], "", MAX_DEPTH)
    else:
        yield from _walk([*args], "", MAX_DEPTH)
        yield from _walk(kwargs, "", MAX_DEPTH)


def spell_tensors(value: Any, name: str, depth: int = MAX_DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `value`, each with the expression that reaches it: "batch['image']", 'batch.pixels[0]'."""
    if is_a(value, Tensor):
        yield name, value
    elif depth:
        for key, item in _open(value):
            is_object = is_instance_of_dataclass(value) or (isinstance(value, tuple) and hasattr(value, "_fields"))
            yield from spell_tensors(item, f"{name}.{key}" if is_object else f"{name}[{key!r}]", depth - 1)


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if is_a(value, Tensor):
        yield path or "0", value
    elif depth:
        for key, item in _open(value):
            yield from _walk(item, f"{path}.{key}" if path else str(key), depth - 1)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether `value` is an instance; by its type alone if asking for its `__class__` raises."""
    try:
        return isinstance(value, kinds)
    except Exception:
        return issubclass(type(value), kinds)


def _open(value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a container with their names; none if its own code raises."""
    try:
        return list(_list_parts(value))
    except Exception:
        return []


def _list_parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a container with their names; nothing for modules, arrays and strings."""
    if isinstance(value, nn.Module):
        return
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value)
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif is_instance_of_dataclass(value):
        for one in dataclasses.fields(value):
            yield one.name, getattr(value, one.name, None)
    elif isinstance(getattr(value, "data", None), Mapping):  # a BatchEncoding of an old transformers
        yield from value.data.items()


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], depth: int = MAX_DEPTH) -> Any:
    """Return `value` with `change(tensor)` for each tensor in it; what cannot be opened stays as it is."""
    if is_a(value, Tensor):
        return change(value)
    if not depth or is_a(value, nn.Module):
        return value
    if is_a(value, (list, tuple)):
        items = [item for _, item in _open(value)]
        return remake(value, [map_tensors(item, change, depth - 1) for item in items]) if items else value
    if is_a(value, Mapping):
        changed = {key: map_tensors(item, change, depth - 1) for key, item in _open(value)}
        return refill(value, changed) if changed else value
    if is_instance_of_dataclass(value):
        return replace_fields(value, lambda item: map_tensors(item, change, depth - 1))
    return value


def is_instance_of_dataclass(value: Any) -> bool:
    """Whether `value` is an object with fields, not the class itself."""
    return hasattr(type(value), "__dataclass_fields__")  # not is_dataclass(), which asks for the `__class__`


def remake(like: Any, items: list[Any]) -> Any:
    """Return a list, tuple, named tuple or deque of the kind of `like`, with these items."""
    if isinstance(like, deque):
        return deque(items, like.maxlen)
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def refill(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the class of `like` with these items; a plain dict if it cannot be copied."""
    if type(like) is dict:
        return items
    try:
        filled: Any = copy.copy(like)
        if isinstance(getattr(filled, "data", None), dict):  # a UserDict shares its dict with the copy
            filled.data = dict(filled.data)
        for key, item in items.items():  # by its own setter: Hugging Face's outputs keep attributes in sync
            filled[key] = item
    except TypeError:  # a read-only mapping
        return items
    return filled


def replace_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dataclass with `change(item)` in each field; the object itself if no field is another one."""
    items = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
    changed = {name: change(item) for name, item in items.items()}
    if all(changed[name] is item for name, item in items.items()):
        return value
    made = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(made, name, item)  # frozen ones too: the copy is ours
    return made
