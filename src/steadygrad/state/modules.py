"""The modules, parameters and buffers of a model, as torch's own generators have them, in a quarter of their time.

Those are nested as deep as the model is, and each tensor passes through all of them. Scans walk a model several times
each, most of them in the first step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class _Walked(threading.local):
    """What this thread has listed inside `walk_once`; None outside it."""

    models: dict[int, list[tuple[str, nn.Module]]] | None = None


_walked = _Walked()


@contextlib.contextmanager
def walk_once() -> Iterator[None]:
    """Inside, a model is walked once and no more. Only for code of ours, which adds no module and removes none."""
    if _walked.models is not None:
        yield
        return
    _walked.models = {}
    try:
        yield
    finally:
        _walked.models = None


def list_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return name and module of the model and all its parts, each once, parents first; the list is not to be changed.

    >>> [name for name, _ in list_modules(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Tanh()))]
    ['', '0', '0.0', '1']
    """
    if _walked.models is None:
        return _walk(model)
    # By identity: the caller holds the model for as long as it is in here.
    if id(model) not in _walked.models:
        _walked.models[id(model)] = _walk(model)
    return _walked.models[id(model)]


def _walk(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        # When it is taken and not when it is put there: a part that is there twice has the name of its first place.
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        prefix = f"{name}." if name else ""
        parts = [(prefix + key, part) for key, part in module._modules.items() if part is not None]
        waiting += reversed(parts)
    return found


def list_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return name and parameter, each once, as `named_parameters()` does."""
    return list(_each_once((prefix, module._parameters) for prefix, module in list_modules(model)))


def list_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return name and buffer, each once, as `named_buffers()` does."""
    return list(_each_once((prefix, module._buffers) for prefix, module in list_modules(model)))


def _each_once(places: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for prefix, held in places:
        for key, tensor in held.items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{prefix}.{key}" if prefix else key), tensor
