"""Torch's own functions replaced by ours for this process, and how ours recognise who has called them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

NUM_FRAMES = 10
"""Most frames between a Guard and the optimizer's own step: ours, the scheduler's, torch's wrappers."""
REFLEX = "steadygrad.act.reflex"
"""The module from which a Guard calls the optimizer."""


def replace(place: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `place.name(...)` by `around(original, ...)`, except inside a graph that is being compiled."""
    original = getattr(place, name)

    # wraps() also copies torch's mark `hooked`, without which the next optimizer would wrap the step once more.
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    if inspect.ismodule(place):
        replaced.__module__ = place.__name__  # where pickle looks for it: torch defines some of these elsewhere
    setattr(place, name, replaced)


def is_called_by_guard() -> bool:
    """Whether the script has its own Guard, which takes this very step. A few wrappers are between the two."""
    if REFLEX not in sys.modules:  # nor is there a Guard then, as in nearly every script
        return False
    frame = inspect.currentframe()
    for _ in range(NUM_FRAMES):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == REFLEX:
            return True
        frame = frame.f_back
    return False
