"""Rollback: the snapshots to go back to, and everything that follows once a run has gone back.

`act/actor.py` carries out the verdict and opens the window of data to leave out. This module does the rest: it clears
what was remembered about the weights and lets the batches of the window (or its steps, in loops without
`guard.batches`) pass without a trace.
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
    """Keeps the snapshots, and completes a rollback."""

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
        """Copy the state before `step` if it is time; its forward may have changed the buffers already."""
        if self.snapshots.due(step):
            with self.buffers.as_saved():
                self.snapshots.take(step, self.rates.list_settings())

    # --- after it -----------------------------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Return whether there was a rollback since the last call; if so, clear what was known about the weights."""
        rolled_back = self.window.take_new()
        if rolled_back:
            # These copies are of the discarded state: the next restore would bring it back.
            self.buffers.forget()
            self._watched.forget()
        return rolled_back

    @property
    def is_fragmented(self) -> bool:
        """Whether an engine keeps the weights, so that nothing can be put back."""
        return self._watched.trained.is_fragmented

    @property
    def is_open(self) -> bool:
        """Whether the next batch or step is to be left out."""
        return self.window.is_open

    def leave_out(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches except those of the window."""
        for batch in batches:
            if self.is_open:
                self.window.pass_one()
                self._moment.num_skipped_batches += 1
                continue
            yield batch

    def run_forward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward in the window, for its result only; a batch that it draws is left out with it.

        Gradients are enabled where possible, since the function may use them; not under DDP, which would wait for a
        backward.
        """
        with torch.set_grad_enabled(not self._ranks.many):
            return function(*args, **kwargs)

    def refuse(self) -> None:
        """Discard a step in the window."""
        self.buffers.restore()
        self._watched.reflex.skip_on_host()
        self.window.pass_one()
