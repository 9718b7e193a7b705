"""Passes: forward and backward of one microbatch, the user's or a framework's, watched while they run.

What must be known of the state before a step is noted before its first forward; what a diagnosis needs to run it again
is kept; nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from steadygrad.act.precision import DTYPES
from steadygrad.errors import UsageError
from steadygrad.guard.judging import Judging
from steadygrad.guard.parts import Moment, Parts
from steadygrad.guard.stepping import Stepper


class Passes:
    """Runs the two passes, or watches those that somebody else runs."""

    def __init__(self, parts: Parts, moment: Moment, judging: Judging, stepper: Stepper) -> None:
        self._parts, self._moment, self._judging, self._stepper = parts, moment, judging, stepper
        self._is_watching = False

    def forward(self, subject: Callable[..., Any] | Tensor, args: Any, kwargs: Any) -> Any:
        """What the user's function returns, or the loss that was given."""
        parts = self._parts
        has_forward = callable(subject) and not isinstance(subject, Tensor)
        if self._moment.batches.num == 0:
            self._settle_gradients(is_loss=not has_forward)
            if not parts.off:
                self._begin_step()
                if has_forward:  # what was called before is no part of this step
                    parts.buffers.begin(anew=True)
        if not has_forward:
            if args or kwargs:
                raise UsageError(
                    "arguments were given beside a loss. Give a function and its arguments, or a loss alone."
                )
            return subject
        assert callable(subject)
        with self._autocast():
            if parts.off:
                return subject(*args, **kwargs)
            if parts.actor.num_to_refuse:  # a result for the caller; a batch that it draws is left out with it
                # With gradients where that can be: the function may ask for some. DDP would wait for a backward.
                with torch.set_grad_enabled(not parts.ranks.many):
                    return subject(*args, **kwargs)
            with self._watch(args, kwargs), parts.investigator.watch(subject, args, kwargs):
                return subject(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Backward of one microbatch, which is left out when it is bad and the user wants that."""
        parts, batches = self._parts, self._moment.batches
        drops_bad = parts.config.drop_bad_microbatches and not parts.off
        batches.num += 1
        if not parts.off:
            parts.periodic_scans.look_at_graph(self._moment.next_step, self._moment.looks, loss)
            parts.ranks.start([loss] if drops_bad else [*batches.losses, loss])
        if drops_bad:
            parts.ranks.check_synchronised()
            dropped = parts.gate.backward(loss, batches)
            if dropped is not None:
                self._stepper.tell_dropped(*dropped)
        else:
            parts.scaler.scale(loss).backward()
            batches.losses.append(loss.detach())
            parts.ranks.finish_backward(batches.losses)

    @contextlib.contextmanager
    def watch_forward(self, replay: Callable[..., Any] | None, args: Any, kwargs: Any) -> Iterator[None]:
        """Around a forward that a framework runs."""
        if self._parts.off or self._is_watching:
            yield
            return
        if self._moment.batches.num == 0:
            self._begin_step()
            self._parts.buffers.begin()
        investigator = self._parts.investigator
        note = contextlib.nullcontext() if replay is None else investigator.watch(replay, args, kwargs)
        with self._watch(args, kwargs), note:
            yield

    def watch_backward(self, loss: Tensor) -> None:
        """Before a backward that a framework runs."""
        parts, batches = self._parts, self._moment.batches
        self._moment.is_driven = True
        batches.num += 1
        if parts.off or parts.actor.num_to_refuse:
            return
        parts.periodic_scans.look_at_graph(self._moment.next_step, self._moment.looks, loss)
        batches.losses.append(loss.detach())
        parts.ranks.start(batches.losses)

    @contextlib.contextmanager
    def _watch(self, args: Any, kwargs: Any) -> Iterator[None]:
        if self._is_watching:  # a framework's step inside of which the model says that it is called
            yield
            return
        self._is_watching = True
        try:
            with self._parts.periodic_scans.around_forward(self._moment.next_step, self._moment.looks, args, kwargs):
                yield
        finally:
            self._is_watching = False

    def _settle_gradients(self, *, is_loss: bool) -> None:
        finding = self._parts.other_gradients.settle(self._moment.next_step, is_loss=is_loss)
        if finding is not None:
            self._parts.judgement.note(finding)

    def _begin_step(self) -> None:
        """Before the first forward of a step, as far as it is ours: what must be known of the state before it."""
        parts, step = self._parts, self._moment.next_step
        if step == 0 and parts.snapshots.due(0):
            with parts.buffers.as_saved():  # the forward of a loss that is given has moved them
                parts.snapshots.take(0, parts.list_settings())
        parts.periodic_scans.begin()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._parts.config.autocast is None:
            return contextlib.nullcontext()
        device = self._parts.trained.named[0][1].device.type
        dtype = DTYPES[self._parts.config.autocast]
        return torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32)
