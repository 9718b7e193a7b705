"""Passes: one microbatch, from the user's function or from a loss already computed.

`forward.py` and `backward.py` run the passes; for a guard that is switched off, `plain.py` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from steadygrad.diagnose.capture import Capture
from steadygrad.errors import UsageError
from steadygrad.facts import Finding
from steadygrad.guard.inquiry import Inquiry
from steadygrad.guard.moment import Moment
from steadygrad.guard.rollback import Rollback
from steadygrad.judgement import Judgement
from steadygrad.measure.loss import check_loss, find_loss


class Forward(Protocol):
    """Runs forwards: `ForwardPass`, or `PlainLoop` for a guard that is switched off."""

    def begin(self, *, is_loss: bool) -> Finding | None: ...
    def run_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...
    def watch_forward(
        self, replay: Callable[..., Any] | None, args: Any, kwargs: Any
    ) -> contextlib.AbstractContextManager[None]: ...
    def note_loss(self, loss: Tensor) -> None: ...
    def take_captures(self) -> Sequence[Capture]: ...
    def end_step(self) -> None: ...
    def close(self) -> None: ...


class Backward(Protocol):
    """Runs backward: `BackwardPass`, or `PlainLoop`."""

    def run_backward(self, loss: Tensor) -> None: ...
    def watch_backward(self, loss: Tensor) -> None: ...


class Passes:
    """The two passes, and the steps between them."""

    def __init__(
        self,
        forward: Forward,
        backward: Backward,
        *,
        moment: Moment,
        rollback: Rollback,
        judgement: Judgement,
        inquiry: Inquiry | None = None,
    ) -> None:
        """`inquiry`: looks into errors of the user's function; None if the guard is switched off."""
        self._inquiry = inquiry
        self.forward, self.backward = forward, backward
        self._moment, self._rollback, self._judgement = moment, rollback, judgement

    def find_loss(self, subject: Callable[..., Any] | Tensor, args: Any, kwargs: Any) -> tuple[Any, Tensor | None]:
        """Return the function's result, or the loss that was passed; and the loss to run backward from.

        The latter is None in the window after a rollback: the microbatch is only counted.
        """
        function = None if isinstance(subject, Tensor) or not callable(subject) else subject
        if self._moment.batches.num == 0:
            finding = self.forward.begin(is_loss=function is None)
            if finding is not None:
                self._judgement.note(finding)
        if function is None and (args or kwargs):
            raise UsageError("arguments were passed with a loss. Pass a function and its arguments, or only a loss.")
        result = subject if function is None else self._run_forward(function, args, kwargs)
        if self._rollback.is_open:
            self._moment.batches.num += 1
            return result, None
        return result, find_loss(result) if result is not subject else check_loss(result)

    def _run_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return self.forward.run_forward(function, args, kwargs)
        except Exception as error:  # not BaseException: an interrupt must not start a replay
            if self._inquiry is not None and not self._rollback.is_open:
                self._inquiry.explain(error, self.forward.take_captures(), self._moment.next_step)
            raise
