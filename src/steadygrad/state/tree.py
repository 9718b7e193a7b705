"""Nested containers -> the tensors in them, by path; and a container made again from other items.

Opens what batches are made of: mappings, lists, tuples, named tuples, dataclasses, Hugging Face's BatchEncoding.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

MAX_DEPTH = 8
"""Containers inside containers that are opened; a batch that contains itself ends there."""


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if len(args) == 1 and not kwargs:
        yield from _walk(args[0], "", MAX_DEPTH)
    else:
        yield from _walk([*args], "", MAX_DEPTH)
        yield from _walk(kwargs, "", MAX_DEPTH)


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path or "0", value
    elif depth:
        for key, item in _open(value):
            yield from _walk(item, f"{path}.{key}" if path else str(key), depth - 1)


def _open(value: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a container, named. Modules, arrays and strings are none."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value)
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for one in dataclasses.fields(value):
            yield one.name, getattr(value, one.name, None)
    elif isinstance(getattr(value, "data", None), Mapping):  # transformers' BatchEncoding is a UserDict
        yield from value.data.items()


def remake(like: Any, items: list[Any]) -> Any:
    """A list, tuple, named tuple or deque of the kind of `like`."""
    if isinstance(like, deque):
        return deque(items, like.maxlen)
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
