"""OtherGradients: gradients that are there before a step whose backward is the guard's, and whose they are.

A generator's loss fills the gradients of its discriminator: those belong to another training, and are dropped. An
auxiliary loss of the same model that the program has run backward by itself belongs to the step, as in a plain loop.
What tells them apart is seen at the model's calls: the first kind is called with what another model has made, the
second with data and without gradients lying there from before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.call_listener import CallListener
from steadygrad.facts import Finding, Severity
from steadygrad.state.tree import find_tensors


class OtherGradients:
    """Hears the model being called from one step to the next."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, watch: bool) -> None:
        self._optimizers = optimizers
        self._is_anothers = self._was_called = self._began_clean = self._told = False
        self._hook = (
            model.register_forward_pre_hook(CallListener(self.hear), prepend=True, with_kwargs=True) if watch else None
        )

    def hear(self, _model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model is called, by whomever."""
        if self._is_anothers or not torch.is_grad_enabled():
            return
        if any(tensor.requires_grad for _, tensor in find_tensors(args, kwargs)):
            self._is_anothers = True
        elif not self._was_called:
            self._was_called, self._began_clean = True, not self._find()

    def settle(self, step: int, *, is_loss: bool) -> Finding | None:
        """The guard is about to run the first backward of a step: drop what is another's. Reported once.

        `is_loss`: a loss was given, whose forward is over; a function's is to come, and its gradients are all there is.
        """
        found = self._find()
        is_own = self._was_called and self._began_clean and not self._is_anothers
        if not (is_own and is_loss):
            for parameter in found:
                parameter.grad = None
        if not found or not is_own or self._told:
            return None
        self._told = True
        return _describe_added(step) if is_loss else _describe_dropped(step)

    def end_step(self) -> None:
        """The step is over: the next call begins anew."""
        self._is_anothers = self._was_called = self._began_clean = False

    def close(self) -> None:
        """Let go of the model."""
        if self._hook is not None:
            self._hook.remove()

    def _find(self) -> list[Tensor]:
        """The parameters that have a gradient now."""
        return [p for o in self._optimizers for group in o.param_groups for p in group["params"] if p.grad is not None]


def _describe_added(step: int) -> Finding:
    return Finding(
        kind="added_gradients",
        severity=Severity.INFO,
        step=step,
        message="gradients of another backward were there already, and are a part of this step",
    )


def _describe_dropped(step: int) -> Finding:
    return Finding(
        kind="dropped_gradients",
        severity=Severity.WARNING,
        step=step,
        message="gradients of another backward were there, and were dropped: a step of a function begins without any",
        advice="Return the sum of the losses from the function, or run every backward yourself and call guard.step().",
    )
