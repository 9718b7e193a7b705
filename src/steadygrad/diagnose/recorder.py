"""StepRecorder: the microbatches of the step that is being made -> Captures, to be replayed if the step is bad.

Noting costs references and the generators' states: nothing is copied, nothing is waited for. A step that is given as a
function is noted whole; of one that is given as a loss, the calls of the model are noted by a hook on the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from steadygrad.diagnose.capture import Capture

MAX_CALLS = 8
"""Calls of the model that are kept of one step; an RNN in a loop makes many, and holds its inputs anyway."""


class StepRecorder:
    """Notes what runs; `take()` hands it over when the step is made."""

    def __init__(self, model: nn.Module, devices: Sequence[torch.device] = ()) -> None:
        self._model, self._devices = model, tuple(devices)
        self._steps: list[Capture] = []
        self._calls: list[Capture] = []
        self._inside = False
        self._hook: RemovableHandle | None = None

    def watch_calls(self) -> None:
        """Note the calls of the model too, for steps whose loss is computed elsewhere."""
        if self._hook is None:
            self._hook = self._model.register_forward_pre_hook(self._note_call, with_kwargs=True)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Note a step that is given as a function, under the autocast that is open, and run it."""
        self._steps.append(Capture.take(fn, args, kwargs, model=self._model, devices=self._devices))
        before, self._inside = self._inside, True
        try:
            return fn(*args, **kwargs)
        finally:
            self._inside = before

    def take(self) -> tuple[Capture, ...]:
        """What was noted since the last time."""
        found = tuple(self._steps or self._calls)
        self._steps, self._calls = [], []
        return found

    def close(self) -> None:
        """Take the hook away."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _note_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._inside or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        capture = Capture.take(model, args, kwargs, model=model, devices=self._devices, is_model_call=True)
        self._calls = [*self._calls[1 - MAX_CALLS :], capture]
