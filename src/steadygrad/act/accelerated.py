"""AcceleratorDrive: lets a Guard work inside a loop that Hugging Face's accelerate drives.

accelerate still divides the loss for accumulation, scales it, runs backward and knows when gradients are complete. Its
optimizers' `step()` goes through the Guard, which receives every loss, sees the batch through a hook on the model and
reports whether the step was skipped. accelerate itself is never imported: its objects are recognized by name.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadygrad.act.forwards import Watching, watch_forwards
from steadygrad.act.patches import Patches
from steadygrad.config import GuardConfig
from steadygrad.errors import ConfigError, UsageError
from steadygrad.facts import StepRecord


class Driven(Watching, Protocol):
    """A Guard, as seen from a framework's loop."""

    config: GuardConfig

    @property
    def last(self) -> StepRecord | None: ...
    @property
    def num_microbatches(self) -> int: ...
    def flush(self) -> None: ...
    def step(self) -> Any: ...
    def watch_backward(self, loss: Tensor) -> None: ...


class WasSkipped:
    """True if the guard's last step was skipped. Waits for the step's numbers only when its truth value is used.

    It replaces the bool that accelerate keeps, so only a loop or scheduler that checks it has to wait.
    """

    def __init__(self, guard: Driven) -> None:
        self._guard = guard

    def __bool__(self) -> bool:
        self._guard.flush()
        return self._guard.last is not None and self._guard.last.skipped


class AcceleratorDrive:
    """The objects inside accelerate's wrappers, and their connection to a Guard."""

    def __init__(self, accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any = None) -> None:
        for name in ("backward", "sync_gradients", "gradient_accumulation_steps"):
            if not hasattr(accelerator, name):
                raise UsageError(
                    f"from_accelerator's first argument must be an accelerate.Accelerator, got "
                    f"{type(accelerator).__name__}, which has no {name}. Pass the Accelerator itself."
                )
        self._accelerator = accelerator
        self._wrapped = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
        self.model = model
        self.optimizers: list[torch.optim.Optimizer] = [_open(one, "optimizer") for one in self._wrapped]
        self.scheduler = _open(scheduler, "scheduler")
        self.scaler: torch.amp.GradScaler | None = getattr(accelerator, "scaler", None)
        self._patches = Patches()
        self._hooks: list[RemovableHandle] = []

    @property
    def is_accumulating(self) -> bool:
        """Whether more microbatches of this step will follow."""
        return not self._accelerator.sync_gradients

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss that `accelerator.backward` would start from, without the loss scale."""
        share = self._accelerator.gradient_accumulation_steps
        return loss if share == 1 else loss / share

    def check_saving(self) -> None:
        """Allow it: a Guard saves what accelerate has wrapped."""

    def attach(self, guard: Driven) -> None:
        """Connect accelerate's objects to `guard` until `detach()`."""
        if guard.config.drop_bad_microbatches:
            refuse_dropping("accelerator.backward")
        run_backward: Callable[..., None] = self._accelerator.backward

        def backward(loss: Tensor, **kwargs: Any) -> None:
            # Before backward: it frees the graph, and its collectives must come after the exchange of losses.
            guard.watch_backward(self.weigh(loss))
            run_backward(loss, **kwargs)

        def step(wrapped: Any, closure: Callable[[], Any] | None = None) -> None:
            wrapped._opt_called = True  # torch's schedulers check this flag and warn without it
            if closure is not None:
                closure()
            if guard.num_microbatches:  # none: guard.step() has already been called for these gradients
                guard.step()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so it is: a scheduler need not warn of it
        self._patches.replace(self._accelerator, "backward", backward)
        for wrapped in self._wrapped:
            if _is_wrapper(wrapped):
                self._patches.replace(wrapped, "step", types.MethodType(step, wrapped))  # schedulers want a method
                # Private to accelerate: what `optimizer.step_was_skipped` returns.
                self._patches.replace(wrapped, "_is_overflow", WasSkipped(guard))
        self._hooks += watch_forwards(self.model, guard)

    def detach(self) -> None:
        """Disconnect, leaving accelerate's objects as they were."""
        self._patches.undo()
        while self._hooks:
            self._hooks.pop().remove()


def refuse_dropping(runner: str) -> None:
    """Raise: a microbatch can be dropped only by the code that runs its backward."""
    raise ConfigError(
        f"GuardConfig.drop_bad_microbatches is True, but {runner} runs backward here, so one microbatch cannot be "
        "taken out of the sum. Leave it False: then the whole step is skipped."
    )


def _is_wrapper(thing: Any) -> bool:
    """Whether this is one of accelerate's own wrappers, recognized by the module that defines its class."""
    return any(base.__module__.partition(".")[0] == "accelerate" for base in type(thing).__mro__)


def _open(thing: Any, attribute: str) -> Any:
    """Return the object inside accelerate's wrapper; return anything else unchanged."""
    return getattr(thing, attribute) if _is_wrapper(thing) else thing
