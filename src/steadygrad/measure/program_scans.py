"""ProgramScans: everything that looks for errors which never crash, attached to a step in one place.

`PeriodicScans` calls it: `begin` before the first step, `before_optimizer` when the gradients are complete,
`after_optimizer` while they are still there, `read` when the step is judged. What is looked at, and its cost, stands in
the files of the parts: calls (`call_order.py`), model and optimizers (`model_scan.py`), ranks (`rank_agreement.py`),
number formats (`precision.py`). A part that fails is left out from then on; the training never notices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from steadygrad.facts import Fact, ModelScan, ParameterScan, Reading
from steadygrad.measure.call_order import CallOrderWatch, PendingCalls
from steadygrad.measure.model_scan import ModelWatch
from steadygrad.measure.precision import PendingPrecision, PrecisionWatch
from steadygrad.measure.rank_agreement import (
    FIRST_STEPS,
    PendingBatch,
    RankAgreement,
    look_at_batch,
    look_at_gradients,
    read_checksums,
)
from steadygrad.measure.rank_board import open_board
from steadygrad.measure.ranks import Ranks
from steadygrad.measure.rows import PendingRows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.modules import walk_once
from steadygrad.state.trained_parameters import TrainedParameters

logger = logging.getLogger("steadygrad")
T = TypeVar("T")
Batch = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(slots=True)
class PendingProgram:
    """What was queued for one step."""

    calls: PendingCalls | None = None
    model: ModelScan | None = None
    batch: PendingBatch | None = None
    precision: PendingPrecision | None = None
    gradients: PendingRows | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say about the step itself."""
        return self.calls is None and self.precision is None and self.model is None


class ProgramScans:
    """The parts, each of which may be missing."""

    def __init__(
        self,
        trained: TrainedParameters,
        *,
        see_loss: Callable[[Tensor], None],
        see_graph: Callable[[Tensor], None],
        ranks: Ranks | None = None,
    ) -> None:
        """`see_loss` and `see_graph` are called with the losses of the first steps, after and before their backward."""
        self._trained = trained
        self._group = None if ranks is None else ranks.group
        self._ddp = None if ranks is None else ranks.ddp
        # As in PeriodicScans: up to four copies a step, and two steps may be in flight.
        self._transfer = Transfer(slots=8)
        self._broken: set[str] = set()
        self._first: list[Fact] = []
        self._has_begun = self._has_seen_model = False
        self._ranks: RankAgreement | None = None
        self._calls = CallOrderWatch(
            [p for _, p in trained.named],
            model=trained.model,
            transfer=self._transfer,
            see_loss=see_loss,
            see_graph=see_graph,
        )
        self._model = ModelWatch(trained, transfer=self._transfer)
        self._precision = PrecisionWatch(trained, transfer=self._transfer)

    def compile(self, device: torch.device) -> None:
        """Load the kernels of the first steps now."""
        self._calls.compile(device)

    def begin(self) -> None:
        """Look at the program before its first step, and listen to it from then on."""
        if self._has_begun:
            return
        self._has_begun = True
        self._ranks = self._try("ranks", self._join_ranks)
        num_averaging = 0 if self._ranks is None else self._ranks.num_averaging
        self._try("calls", lambda: self._calls.begin(num_averaging=num_averaging))
        self._try("precision", self._precision.begin)

    def close(self) -> None:
        """Stop listening, and remove the hooks."""
        self._calls.close()
        self._model.close()
        self._precision.close()

    def _join_ranks(self) -> RankAgreement | None:
        # Boards are numbered: every rank must make its own in the same order.
        board = open_board(self._group)
        return None if board is None else RankAgreement(board, self._trained.model, self._ddp)

    def before_optimizer(self, *, scale_is_known: bool) -> PendingProgram:
        """Note what was called since the last step, now that the gradients are complete."""
        if not self._has_seen_model:
            # Now and not before the forward: on CUDA the device is busy with the backward meanwhile.
            self._has_seen_model = True
            with walk_once():
                scan = self._try("model", self._model.begin)
            self._first += [] if scan is None else [scan]
        calls = self._try("calls", lambda: self._calls.take(scale_is_known=scale_is_known))
        return PendingProgram(calls=calls)

    def after_optimizer(self, step: int, pending: PendingProgram, batch: Batch | None, *, is_due: bool) -> None:
        """Queue the scans after the optimizer step, while the gradients are still there."""
        self._model.count_step()
        if is_due:
            pending.model = self._try("model", lambda: self._model.scan(step))
        pending.precision = self._try("precision", lambda: self._precision.measure(is_due=is_due))
        if self._ranks is not None and batch is not None and (is_due or step in FIRST_STEPS):
            pending.batch = look_at_batch(*batch, self._transfer)
        if self._ranks is not None and is_due and not self._ranks.num_averaging:
            pending.gradients = self._try("gradients", lambda: look_at_gradients(self._trained.named, self._transfer))

    def read(self, reading: Reading, pending: PendingProgram | None, facts: Sequence[Fact]) -> Iterator[Fact]:
        """Yield the facts about a judged step; `facts` are those of the other scans."""
        # This is a generator: nothing here runs unless the caller exhausts it.
        if self._first:
            first, self._first = self._first, []
            yield from first
        if pending is not None and not pending.is_empty:
            yield from self._try("read", lambda: _read_queued(reading, pending)) or ()
        if self._ranks is not None:
            yield from self._try("ranks", lambda: self._compare_ranks(reading, pending, facts)) or ()

    def _compare_ranks(self, reading: Reading, pending: PendingProgram | None, facts: Sequence[Fact]) -> list[Fact]:
        assert self._ranks is not None
        queued = None if pending is None else pending.gradients
        gradients = {} if queued is None else read_checksums(queued)
        for fact in facts:
            if isinstance(fact, ParameterScan) and fact.checksums:
                self._ranks.write_weights(fact.step, fact.checksums, gradients)
        if pending is not None and pending.batch is not None:
            self._ranks.write_batch(reading.step, *pending.batch.read())
        return [*self._ranks.compare()]

    def _try(self, part: str, look: Callable[[], T]) -> T | None:
        """Return what a part has seen; None if it fails now or failed before."""
        if part in self._broken:
            return None
        try:
            return look()
        except Exception as error:
            self._broken.add(part)
            logger.debug("a scan of the program failed and is left out: %s: %r", part, error)
            return None


def _read_queued(reading: Reading, pending: PendingProgram) -> list[Fact]:
    facts: list[Fact | None] = [
        None if one is None else one.read(reading) for one in (pending.calls, pending.precision)
    ]
    return [fact for fact in (*facts, pending.model) if fact is not None]
