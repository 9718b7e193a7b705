"""Rollback: the snapshots to go back to, and all that follows once a run has gone back.

A verdict is carried out in `act/actor.py`, which opens the window of data that is left out. From then on it is here:
what was remembered of the weights is forgotten, and the batches of the window, or the steps where the loop does not use
`guard.batches`, pass without a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.act.window import Window
from steadygrad.guard.moment import Moment
from steadygrad.guard.watched import Watched
from steadygrad.measure.ranks import Ranks

T = TypeVar("T")


class Rollback:
    """Keeps the way back, and sees to what comes after it."""

    def __init__(
        self,
        window: Window,
        *,
        snapshots: Snapshots,
        moment: Moment,
        watched: Watched,
        rates: Rates,
        buffers: BufferKeeper,
        ranks: Ranks,
    ) -> None:
        self.window, self.snapshots, self.rates, self.buffers = window, snapshots, rates, buffers
        self._moment, self._watched, self._ranks = moment, watched, ranks

    # --- before it ----------------------------------------------------------------------------------------------------

    def take_snapshot_if_due(self, step: int) -> None:
        """The state before `step`, whose forward may have moved the buffers already."""
        if self.snapshots.due(step):
            with self.buffers.as_saved():
                self.snapshots.take(step, self.rates.list_settings())

    # --- after it -----------------------------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Whether there was a rollback since this was last asked: what was known of the weights is forgotten."""
        rolled_back = self.window.take_new()
        if rolled_back:
            self.buffers.forget()
            self._watched.forget()
        return rolled_back

    @property
    def is_open(self) -> bool:
        """Whether what comes now is left out."""
        return self.window.is_open

    def leave_out(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches without those of the window."""
        for batch in batches:
            if self.is_open:
                self.window.pass_one()
                self._moment.num_skipped_batches += 1
                continue
            yield batch

    def run_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A forward in the window: a result for the caller; a batch that it draws is left out with it.

        With gradients where that can be: the function may ask for some. DDP would wait for a backward.
        """
        with torch.set_grad_enabled(not self._ranks.many):
            return function(*args, **kwargs)

    def refuse(self) -> None:
        """A step in the window: nothing of it stays."""
        self.buffers.restore()
        self._watched.reflex.skip_on_host()
        self.window.pass_one()
