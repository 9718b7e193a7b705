"""CallListener: a forward hook that reports when a model is called, and is not carried into copies or pickles of it.

torch traces the hooks of a compiled module into its graph, where a CallListener does nothing. So `CallListeners` also
listens outside the graph: on the wrapper that `torch.compile(model)` returned, if it was passed in, and before the call
that `model.compile()` substitutes for the module's own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from steadygrad.measure.torch_calls import calls_muted
from steadygrad.measure.uncompiled import uncompiled
from steadygrad.state.hidden_hooks import hide_hooks, is_recorded

# Counted, not a flag: a replay may run inside another. The same for all threads.
_num_muted = 0


@contextlib.contextmanager
def listeners_muted() -> Iterator[None]:
    """Mute the CallListeners of all guards while a replay calls the model."""
    global _num_muted
    _num_muted += 1
    try:
        with calls_muted():
            yield
    finally:
        _num_muted -= 1


class CallListener:
    """Calls `hear` of an object, which it does not keep alive, with the hook's arguments: a model, and more.

    A copied or pickled model gets a silent stand-in that does not need this package: it logs at debug level, with each
    argument formatted to zero characters. While torch compiles, it does nothing.
    """

    is_quiet = True
    """Read by `state/hidden_hooks.py`: the stand-in is for models with hooks of the program's own."""

    def __init__(self, hear: Callable[..., None], *, num_arguments: int = 3) -> None:
        # Not a WeakMethod, which makes the bound method anew at each call.
        self._owner, self._function = weakref.ref(hear.__self__), hear.__func__  # type: ignore[attr-defined]
        self._num_arguments = num_arguments

    @uncompiled
    def __call__(self, model: nn.Module, *more: Any) -> None:
        if is_recorded() or _num_muted:
            return
        owner = self._owner()
        if owner is not None:
            # Function modes of the program, and of our own looks, are not to see this.
            with torch._C.DisableTorchFunction():
                self._function(owner, model, *more)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (logging.getLogger("steadygrad").debug, "%.0s" * self._num_arguments)


class _Before:
    """Calls CallListeners and then the compiled call of a module, whose own hooks are inside the graph."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self.model, self.call = model, call
        self.listeners: list[CallListener] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(self.listeners):  # one may leave now
            listener(self.model, args, kwargs)
        return self.call(*args, **kwargs)


class CallListeners:
    """One CallListener on a model and on every wrapper that it is called through."""

    def __init__(self, models: Sequence[nn.Module], hear: Callable[..., None]) -> None:
        self._listener, self._models = CallListener(hear), models
        for model in models:
            hide_hooks(model)
        self._hooks = [
            nn.Module.register_forward_pre_hook(m, self._listener, prepend=True, with_kwargs=True) for m in models
        ]
        self.follow()

    def follow(self) -> None:
        """Listen to calls that were compiled since the last `follow()`."""
        for model in self._models:
            # Private to torch: what model.compile() sets. nn.Module leaves it out of copies and pickles.
            call = model._compiled_call_impl
            if call is None:
                continue
            if not isinstance(call, _Before):
                model._compiled_call_impl = call = _Before(model, call)
            if self._listener not in call.listeners:  # one wrapper for all guards: this runs at every step
                call.listeners.insert(0, self._listener)

    def close(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        for model in self._models:
            call = model._compiled_call_impl
            if isinstance(call, _Before) and self._listener in call.listeners:
                call.listeners.remove(self._listener)
                if not call.listeners:
                    model._compiled_call_impl = call.call
