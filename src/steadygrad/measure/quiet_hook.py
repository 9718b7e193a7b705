"""QuietHook: a hook on a module that cannot disturb: it fails silently, and copies of the module do not have it."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from steadygrad.measure.uncompiled import uncompiled
from steadygrad.state.hidden_hooks import is_recorded


class QuietHook:
    """Calls a bound method, whose object it does not keep alive, and returns None; does nothing in a compiled graph."""

    is_quiet = True
    """Read by `state/hidden_hooks.py`, which leaves such hooks out of copies."""

    def __init__(self, hear: Callable[..., None], *, num_arguments: int) -> None:
        self._hear, self._num_arguments = weakref.WeakMethod(hear), num_arguments

    @uncompiled
    def __call__(self, *arguments: Any) -> None:
        if is_recorded():  # first: dynamo cannot trace the weak reference
            return
        hear = self._hear()
        if hear is not None:
            # This runs inside the program's forward: nothing of ours may raise there, or be seen by its function modes.
            with contextlib.suppress(Exception), torch._C.DisableTorchFunction():
                hear(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy logs at debug level, with each argument formatted to zero characters, and needs no steadygrad."""
        return functools.partial, (logging.getLogger("steadygrad").debug, "%.0s" * self._num_arguments)


def remove_hooks(hooks: list[torch.utils.hooks.RemovableHandle]) -> None:
    """Remove them from their modules, and empty the list."""
    for hook in hooks:
        hook.remove()
    hooks.clear()
