"""Ear: a forward hook that reports when a model is called, and that no copy or pickle of the model takes along."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

_num_deaf = 0


@contextlib.contextmanager
def all_deaf() -> Iterator[None]:
    """Inside, no Ear of any guard hears: the model is called by a replay."""
    global _num_deaf
    _num_deaf += 1
    try:
        yield
    finally:
        _num_deaf -= 1


class Ear:
    """Calls `hear(model, args, kwargs)` of an object that it does not keep alive.

    A copy of the model, or one that was pickled, gets a deaf one that needs nothing of this package: it formats three
    arguments with no characters each, at a level that nobody listens to. While torch compiles it vanishes.
    """

    def __init__(self, hear: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]) -> None:
        self._hear = weakref.WeakMethod(hear)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or _num_deaf:
            return
        hear = self._hear()
        if hear is not None:
            hear(model, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (logging.getLogger("steadygrad").debug, "%.0s%.0s%.0s")
