"""ForwardPass: the forward of one microbatch, the user's or a framework's, watched while it runs.

Records the state that a step starts from before its first forward, and keeps what a diagnosis needs to run it again.
Nothing here waits for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.other_gradients import OtherGradients
from steadygrad.act.precision import DTYPES
from steadygrad.config import GuardConfig
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.investigator import Investigator
from steadygrad.facts import Finding
from steadygrad.guard.moment import Moment
from steadygrad.guard.rollback import Rollback
from steadygrad.guard.watched import Watched
from steadygrad.state.modules import walk_once


class ForwardPass:
    """Runs forwards, or watches those that a framework runs."""

    def __init__(
        self,
        config: GuardConfig,
        *,
        moment: Moment,
        watched: Watched,
        rollback: Rollback,
        buffers: BufferKeeper,
        investigator: Investigator,
        other_gradients: OtherGradients,
    ) -> None:
        self._config, self._moment, self._watched, self._rollback = config, moment, watched, rollback
        self._buffers, self._other_gradients = buffers, other_gradients
        self.investigator = investigator
        self._is_watching = False

    def begin(self, *, is_loss: bool) -> Finding | None:
        """Prepare a step before its first microbatch; `is_loss`: its forward has already run."""
        finding = self._other_gradients.settle(self._moment.next_step, is_loss=is_loss)
        self._begin_step()
        if not is_loss:  # model calls made before this belong to no step
            self._buffers.begin(anew=True)
            self.investigator.take()
        return finding

    def run_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's function and return its result."""
        if self._config.autocast is None:
            return self._run(function, args, kwargs)
        with open_autocast(self._config, self._watched):
            return self._run(function, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._rollback.is_open:
            return self._rollback.run_forward(function, args, kwargs)
        moment, scans = self._moment, self._watched.periodic_scans
        if self._is_watching or scans.looks_at_forward(moment.next_step):
            with self._watch(args, kwargs), self.investigator.watch(function, args, kwargs):
                return function(*args, **kwargs)
        # The same for most steps, whose forward is not looked at, without the four contexts.
        self._is_watching = self._other_gradients.is_inside = True
        is_noted = False
        try:
            scans.begin_forward(moment.next_step, moment.looks, args, kwargs)
            is_noted = self.investigator.begin(function, args, kwargs)
            return function(*args, **kwargs)
        finally:
            if is_noted:
                self.investigator.end()
            scans.end_forward()
            self._is_watching = self._other_gradients.is_inside = False

    @contextlib.contextmanager
    def watch_forward(self, replay: Callable[..., Any] | None, args: Any, kwargs: Any) -> Iterator[None]:
        """Watch a forward that a framework runs inside this context."""
        if self._is_watching:
            yield
            return
        if self._moment.batches.num == 0:
            self._begin_step()
            # Not anew: the model's own hook may have fired before this, and copied them.
            self._buffers.begin()
        note = contextlib.nullcontext() if replay is None else self.investigator.watch(replay, args, kwargs)
        with self._watch(args, kwargs), note:
            yield

    def note_loss(self, loss: Tensor) -> None:
        """A loss was given, and its backward is about to run."""
        self.investigator.note_loss(loss)

    def take_captures(self) -> Sequence[Capture]:
        """Return what a replay of the step's microbatches needs."""
        return self.investigator.take()

    def end_step(self) -> None:
        """Drop what was kept of the finished step's forwards."""
        self.investigator.take()
        self._other_gradients.end_step()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._watched.close()
        self._buffers.close()
        self._other_gradients.close()
        self.investigator.close()

    @contextlib.contextmanager
    def _watch(self, args: Any, kwargs: Any) -> Iterator[None]:
        if self._is_watching:  # a framework's step, inside which the model's hook reports the call
            yield
            return
        self._is_watching = True
        moment = self._moment
        try:
            with self._watched.periodic_scans.around_forward(moment.next_step, moment.looks, args, kwargs):
                yield
        finally:
            self._is_watching = False

    def _begin_step(self) -> None:
        """Record the state that a step starts from, before the first of its forwards that the guard sees."""
        # The state before training. Every later snapshot is taken after a step that was judged healthy.
        if self._moment.next_step == 0:
            with walk_once():
                self._rollback.take_snapshot_if_due(0)
                self._watched.periodic_scans.begin()
        else:
            self._watched.periodic_scans.begin()


def open_autocast(config: GuardConfig, watched: Watched) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of the settings, for the device that the parameters are on now."""
    if config.autocast is None:
        return contextlib.nullcontext()
    # Of the model's: all that are trained may be lazy in the first forward, and not be named yet.
    device = next(watched.trained.model.parameters()).device.type
    dtype = DTYPES[config.autocast]
    # fp32 gives a disabled context, which keeps out an autocast that the caller has open.
    return torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32)
