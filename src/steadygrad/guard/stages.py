"""Stages: the order of a step. The one place that spells it out.

forward, backward        the user's, or ours from the user's function (`passes.py`)
step or skip             measured, clipped, and kept from the weights when it is bad (`stepping.py`)
judge                    detect -> decide -> act -> record, when the numbers are on the host (`judging.py`)
save                     when due, and one last time after a signal (`saving.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.guard.judging import Judging
from steadygrad.guard.moment import Moment
from steadygrad.guard.passes import Passes
from steadygrad.guard.saving import Saver
from steadygrad.guard.shutdown import Shutdown
from steadygrad.measure.gradient_access import GradientAccess
from steadygrad.measure.loss import detach

SECOND_BACKWARD = "backward through the graph a second time"
"""In torch's message."""


class Stepping(Protocol):
    """Makes the step: `Stepper`, or `PlainLoop` for a guard that is switched off."""

    def step(self) -> None: ...
    def let_go(self, *, owns_backward: bool) -> None: ...
    def end_step(self) -> None: ...


class Drive(Protocol):
    """A framework that runs the loop: accelerate, or a DeepSpeed engine."""

    @property
    def is_accumulating(self) -> bool: ...
    def weigh(self, loss: Tensor, /) -> Tensor: ...
    def check_saving(self) -> None: ...
    def detach(self) -> None: ...


class Stages:
    """Runs the stages for one guard."""

    def __init__(
        self, passes: Passes, stepper: Stepping, *, moment: Moment, judging: Judging, saver: Saver, shutdown: Shutdown
    ) -> None:
        self.passes = passes
        self._stepper, self._moment, self._judging = stepper, moment, judging
        self._saver, self._shutdown = saver, shutdown
        self.drive: Drive | None = None
        """The framework that decides when all microbatches of a step are complete, if there is one."""

    def step(self, subject: Callable[..., Any] | Tensor | None, args: Any, kwargs: Any) -> Any:
        """Make one step, then answer a signal that arrived meanwhile; return the function's result, detached."""
        # Outside around_step(): inside it the guard is busy, and could not leave.
        is_apart = subject is None or self._moment.batches.num > 0
        self._shutdown.before_step(has_gradients=is_apart)
        with self._shutdown.around_step() as step:
            self._saver.begin()
            if is_apart:
                self._moment.looks.access = GradientAccess.POSSIBLE
            result = None if subject is None else self._run_passes(subject, args, kwargs)
            if self.drive is None or not self.drive.is_accumulating:
                self._step()
                step.is_made = True
        return result

    def backward(self, subject: Callable[..., Any] | Tensor, args: Any, kwargs: Any) -> Any:
        """Run forward and backward of one microbatch; return the function's result, detached."""
        self._shutdown.before_step(has_gradients=self._moment.batches.num > 0)
        with self._shutdown.around_step():
            return self._run_passes(subject, args, kwargs)

    def _run_passes(self, subject: Callable[..., Any] | Tensor, args: Any, kwargs: Any) -> Any:
        self._saver.begin()
        # Before backward: the exchange of losses carries it.
        self._shutdown.send_to_ranks()
        result, loss = self.passes.find_loss(subject, args, kwargs)
        if loss is not None:
            if loss is subject:
                self.passes.forward.note_loss(loss)
            try:
                self.passes.backward.run_backward(loss if self.drive is None else self.drive.weigh(loss))
            except BaseException as error:  # out of memory, a signal: gradients may be incomplete
                self._end_step()
                self._stepper.let_go(owns_backward=True)
                if isinstance(subject, Tensor) and SECOND_BACKWARD in str(error):
                    raise UsageError(
                        "backward has already run through this loss, and a guard runs it itself. Leave out "
                        "loss.backward(), or keep it and call guard.step() without the loss."
                    ) from error
                raise
        return detach(result)

    def _step(self) -> None:
        self._moment.looks.captures = self.passes.forward.take_captures()
        # Before the step: _end_step() resets both.
        owns_backward = self._moment.batches.num > 0 and not self._moment.is_driven
        self._shutdown.is_torn = True
        try:
            self._stepper.step()
        finally:
            self._end_step()
            self._stepper.let_go(owns_backward=owns_backward)
        # Not in the finally: after an error inside the optimizer the weights may be half updated.
        self._shutdown.is_torn = False
        self._judging.judge_if_arrived()  # may halt the run: the weights are whole by now
        self._saver.save_if_due(ends_round=self._shutdown.ends_round)

    def _end_step(self) -> None:
        self._moment.end_step()
        self.passes.forward.end_step()
        self._stepper.end_step()

    def close(self) -> None:
        """Release model, parameters and the framework."""
        if self.drive is not None:
            self.drive.detach()
        self.passes.forward.close()
