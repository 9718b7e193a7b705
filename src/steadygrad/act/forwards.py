"""watch_forwards: lets a Guard see the training forwards of a model that a framework calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Watching(Protocol):
    """A Guard, as seen from a model's forward."""

    def watch_forward(
        self, replay: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
    ) -> contextlib.AbstractContextManager[None]: ...


def watch_forwards(model: nn.Module, guard: Watching) -> list[RemovableHandle]:
    """Let `guard` see each training forward of `model`: its batch, and the buffers before it. Returns the hooks."""
    inside: list[contextlib.AbstractContextManager[None]] = []

    def before(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # A forward inside this one (a model that calls itself) belongs to the same batch.
        if module.training and torch.is_grad_enabled() and not inside:
            watch = guard.watch_forward(None, *args, **kwargs)
            # Entered here and left in `after`: no `with` can span two hooks.
            watch.__enter__()
            inside.append(watch)

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if inside:
            inside.pop().__exit__(None, None, None)  # torch gives a hook no error, even if forward raised one

    return [
        nn.Module.register_forward_pre_hook(model, before, with_kwargs=True),
        # always_call: a forward that raises must close the watch too, or the next one would go unseen.
        nn.Module.register_forward_hook(model, after, always_call=True),
    ]
