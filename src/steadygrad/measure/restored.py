"""RestoredWatch: forwards around two steps -> does each run with the weights from before the first step?

The steps move the weights, so this means that the program puts old ones back. After the steps of `LOOKS`, a sample of
the weights is compared with the first one at each call of the model until the next step. One call with other weights
acquits: an adapted model that is evaluated before it is reset (test-time training, one-step tasks) is used. Costs a
comparison of at most 512 elements at the calls of two steps, and no host wait. Reads only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steadygrad.facts.program import Restored
from steadygrad.measure.loads import find_later_load
from steadygrad.measure.rows import PendingRows, is_readable, send_rows
from steadygrad.measure.transfer import Transfer
from steadygrad.state.trained_parameters import TrainedParameters

LOOKS = (16, 128)
"""Steps after which calls are compared. Apart, because clients of a federated round, or tasks of a meta-batch, may each
take one step from the same weights."""
SAMPLE, NUM_SAMPLED = 64, 8
"""Elements of a parameter, and parameters, that are compared."""
MOST_CALLS = 16
"""Calls between two steps that are compared: more of them are not those of a plain loop."""


class PendingRestored:
    """A comparison whose numbers are still being copied."""

    def __init__(self, rows: PendingRows, where: str) -> None:
        self._rows, self._where = rows, where

    def read(self, step: int) -> Restored:
        """Return what it showed, as seen when `step` was made."""
        rows = self._rows.read()
        is_restored = bool(rows) and all(value > 0 for row in rows.values() for value in row)
        return Restored(step=step, is_restored=is_restored, where=self._where)


class RestoredWatch:
    """Call `note_call` before each forward, and `end_step` after each step; the latter returns what was seen."""

    def __init__(self, trained: TrainedParameters, transfer: Transfer) -> None:
        self._model, self._transfer = trained.model, transfer
        named = () if trained.is_fragmented else trained.named
        self._parameters = [p for _, p in named if p.is_floating_point() and is_readable(p) and p.numel()]
        self._first: Tensor | None = None
        self._sampled: Sequence[Tensor] = ()
        self._seen: list[Tensor] = []
        self._has_trained = False
        self.is_watching = bool(self._parameters)
        """Whether calls matter at present."""

    @torch.no_grad()
    def compile(self) -> None:
        """Load the kernels of a comparison now."""
        if self._parameters:
            self._sampled = _choose(self._parameters)
            sample = self._take_sample()
            torch.stack([(sample == sample).all(), (sample != sample).any()]).double()

    @torch.no_grad()
    def note_call(self, step: int, *, is_training: bool) -> None:
        """Note a call of the model after `step`, -1 before the first one; `is_training`: with gradients."""
        # Our operations would become part of the graph that is captured.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        if step < 0:
            # Again at each call before the first step: weights may still be loaded.
            self._sampled = _choose(self._parameters)
            self._first = self._take_sample()
        elif self._first is not None and len(self._seen) <= MOST_CALLS:
            self._has_trained |= is_training
            self._seen.append((self._take_sample() == self._first).all())

    @torch.no_grad()
    def end_step(self, step: int) -> PendingRestored | None:
        """The optimizer has made its step; return what the calls before it showed, if they were compared."""
        seen, has_trained = self._seen, self._has_trained
        is_compared = self.is_watching and len(seen) > 1 and step - 1 in LOOKS and len(seen) <= MOST_CALLS
        self._seen, self._has_trained = [], False
        self.is_watching = step in LOOKS and self._first is not None
        if self.is_watching:
            assert self._first is not None
            self._seen = [(self._take_sample() != self._first).any()]  # whether steps move them at all
        if not is_compared or not has_trained:
            return None
        rows = {"restored": torch.stack(seen).double()}
        return PendingRestored(send_rows(rows, self._transfer), find_later_load(self._model))

    def _take_sample(self) -> Tensor:
        return torch.cat([_sample(parameter) for parameter in self._sampled])


def _choose(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return some parameters of one device, spread over the model."""
    here = [p for p in parameters if p.device == parameters[0].device]
    return here[:: max(1, len(here) // NUM_SAMPLED)][:NUM_SAMPLED]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].float()
