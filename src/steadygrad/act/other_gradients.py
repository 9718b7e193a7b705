"""OtherGradients: decides what happens to gradients that exist before the guard runs a step's first backward.

A generator's loss fills the gradients of its discriminator: those belong to another training and are dropped. An
auxiliary loss of the same model whose backward the program ran itself belongs to the step, as in a plain loop. Two
things tell them apart. In the first case the model is called with another model's output, in the second with data and
while no earlier gradients are present. And gradients that appear during the step of another guard are that guard's, as
where the weights of an architecture and those of its layers are trained in turn.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.call_listener import CallListener
from steadygrad.facts import Finding, Severity
from steadygrad.state.hidden_hooks import hide_hooks
from steadygrad.state.tree import find_tensors

_all: tuple[weakref.ref[OtherGradients], ...] = ()
"""Those of all guards. Replaced, never changed: another thread may be walking it."""
_lock = threading.Lock()


class OtherGradients:
    """Listens to the model's calls from one step to the next."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, watch: bool) -> None:
        self._optimizers = optimizers
        self._is_anothers = self._was_called = self._began_clean = self._told = False
        self._thread = 0
        # While a step is open: other guards whose model had been called and had gradients when it began.
        self._filled_before: list[OtherGradients] | None = None
        self.is_inside = False
        """Whether a function is running whose step has been settled: its calls say nothing about other gradients."""
        hide_hooks(model)
        self._hook = (
            nn.Module.register_forward_pre_hook(model, CallListener(self.hear), prepend=True, with_kwargs=True)
            if watch
            else None
        )
        if watch:
            _join(self)

    def hear(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called when the model is called."""
        if self.is_inside or self._is_anothers or not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad for _, tensor in find_tensors(args, kwargs)):
            self._is_anothers = True
        # Only the first call of a step looks for gradients: that walks all parameters.
        elif not self._was_called:
            self._was_called, self._began_clean = True, not self._has_gradients()
            self._thread = threading.get_ident()

    def settle(self, step: int, *, is_loss: bool) -> Finding | None:
        """Drop gradients of another training, just before the guard runs a step's first backward. Reported once.

        `is_loss`: the caller passed a loss, so its forward has already run; a function's is still to come, and only its
        gradients count.
        """
        self._filled_before = [other for other in self._find_others() if other._has_gradients()]
        found, is_own = self._find(), self._is_own
        if not (is_own and is_loss):
            for parameter in found:
                parameter.grad = None
        if not found or not is_own or self._told:
            return None
        self._told = True
        return _describe_added(step) if is_loss else _describe_dropped(step)

    def end_step(self) -> None:
        """End the step: the next call of the model starts a new one."""
        if self._filled_before is not None:
            for other in self._find_others():
                if other not in self._filled_before and other._has_gradients():
                    other._is_anothers = True
            self._filled_before = None
        self._is_anothers = self._was_called = self._began_clean = False

    def close(self) -> None:
        """Stop listening to the model."""
        if self._hook is not None:
            self._hook.remove()

    @property
    def _is_own(self) -> bool:
        """Whether gradients that are present come from the model's own calls in this step, as far as is known."""
        return self._was_called and self._began_clean and not self._is_anothers

    def _find_others(self) -> Iterator[OtherGradients]:
        """Yield those of other guards that would take gradients for their own; of this thread only."""
        here = threading.get_ident()
        for reference in _all:
            other = reference()
            if other is not None and other is not self and other._is_own and other._thread == here:
                yield other

    def _find(self) -> list[Tensor]:
        """Return the parameters that have a gradient now."""
        return [p for o in self._optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]

    def _has_gradients(self) -> bool:
        groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
        return any(p.grad is not None for parameters in groups for p in parameters)


def _join(one: OtherGradients) -> None:
    """Add one, and forget those of guards that are gone."""
    global _all
    with _lock:
        _all = (*(reference for reference in _all if reference() is not None), weakref.ref(one))


def _describe_added(step: int) -> Finding:
    return Finding(
        kind="added_gradients",
        severity=Severity.INFO,
        step=step,
        message="gradients of another backward were already there, and are part of this step",
    )


def _describe_dropped(step: int) -> Finding:
    return Finding(
        kind="dropped_gradients",
        severity=Severity.WARNING,
        step=step,
        message="gradients of another backward were there, and were dropped: a step of a function begins without any",
        advice="Return the sum of the losses from the function, or run every backward yourself and call guard.step().",
    )
