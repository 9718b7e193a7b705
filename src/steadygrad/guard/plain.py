"""PlainLoop: forward, backward and step of a guard that is switched off. Nothing is watched, clipped or skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from steadygrad.act.other_gradients import OtherGradients
from steadygrad.diagnose.capture import Capture
from steadygrad.facts import Finding
from steadygrad.guard.forward import open_autocast
from steadygrad.guard.moment import Moment
from steadygrad.guard.optimizers import Optimizers
from steadygrad.guard.training import Training
from steadygrad.guard.watched import Watched
from steadygrad.measure.ranks import Ranks


class PlainLoop:
    """Takes the place of ForwardPass, BackwardPass and Stepper."""

    def __init__(
        self,
        training: Training,
        *,
        moment: Moment,
        watched: Watched,
        optimizers: Optimizers,
        ranks: Ranks,
        other_gradients: OtherGradients,
    ) -> None:
        self._training, self._moment, self._watched = training, moment, watched
        self._optimizers, self._ranks, self._other_gradients = optimizers, ranks, other_gradients

    def begin(self, *, is_loss: bool) -> Finding | None:
        """Drop gradients that belong to another training."""
        return self._other_gradients.settle(self._moment.next_step, is_loss=is_loss)

    def run_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's function and return its result."""
        with open_autocast(self._training.config, self._watched):
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def watch_forward(self, _replay: Callable[..., Any] | None, _args: Any, _kwargs: Any) -> Iterator[None]:
        """Watch nothing."""
        yield

    def note_loss(self, loss: Tensor) -> None:
        """Do nothing: no call of the model is captured."""

    def take_captures(self) -> Sequence[Capture]:
        """Return nothing: no microbatch is captured."""
        return ()

    def run_backward(self, loss: Tensor) -> None:
        """Run backward for one microbatch."""
        batches = self._moment.batches
        batches.num += 1
        self._optimizers.scaler.scale(loss).backward()
        batches.losses.append(loss.detach())
        # Inside guard.join() the ranks without data shadow this exchange, whether the guard is switched off or not.
        self._ranks.finish_backward(batches.losses)

    def watch_backward(self, _loss: Tensor) -> None:
        """Do nothing: the framework runs backward."""
        self._moment.is_driven = True
        self._moment.batches.num += 1

    def step(self) -> None:
        """Step the optimizers, whatever the gradients are."""
        scaler = self._training.scaler
        for optimizer in self._optimizers.given:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        self._moment.take_step_number()
        self._optimizers.schedule_and_ema.after_applied()

    def let_go(self, *, owns_backward: bool) -> None:
        """Clear the gradients of the finished step, unless that is left to the caller."""
        if owns_backward:
            self._optimizers.zero_grad()
        else:
            self._watched.used.note(self._watched.trained.named)

    def end_step(self) -> None:
        """End the step: the next gradients will be scaled again."""
        self._optimizers.scaler.end_step()
        self._other_gradients.end_step()

    def close(self) -> None:
        """Drop the references to the parameters."""
        self._watched.close()
