"""Progress: the position of a training, in plain numbers that are saved with every checkpoint.

Records of judged steps go in, averages and maxima of the epoch come out. Loading an earlier state and continuing gives
the same numbers as never having stopped. It holds no tensor and decides nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from steadygrad.facts import StepRecord
from steadygrad.record import Sink
from steadygrad.trainer.guessing import FIRST_STEPS


class Progress(Sink):
    """State of a Trainer; also a sink, so that it receives each step once the guard has judged it."""

    def __init__(self) -> None:
        self.stage = 0
        self.first_epoch = 0
        """The guard's epoch when the stage began."""
        self.num_batches = 0
        """Number of batches so far in this epoch."""
        self.evaluated: int | None = None
        """The step before which the last evaluation was made."""
        self.saved: int | None = None
        """The step before which the last checkpoint was requested."""
        self.last_metrics: dict[str, float] = {}
        """Metrics of the last evaluation."""
        self.train_history: list[dict[str, Any]] = []
        """One entry per epoch."""
        self.val_history: list[dict[str, Any]] = []
        """One entry per epoch."""
        self.step_history: list[dict[str, Any]] = []
        """One entry per evaluation by steps."""
        self.num_skipped = 0
        """Number of judged steps that were skipped."""
        self.first_loss: float | None = None
        """The first loss, before any step."""
        self.peak: tuple[int, float] | None = None
        """Step and value of the largest loss at the start of the run."""
        self._sums = _empty_sums()
        self._heard: list[StepRecord] = []

    # --- heard from the guard ---------------------------------------------------------------------------------------

    def write_step(self, record: StepRecord) -> None:
        """Take the record of one judged step."""
        self._heard.append(record)
        self._look_at_start(record)
        self.add(record.loss, record.grad_norm, skipped=record.skipped)

    def _look_at_start(self, record: StepRecord) -> None:
        self.num_skipped += record.skipped
        if record.loss is None or not math.isfinite(record.loss) or record.step >= FIRST_STEPS:
            return
        if self.first_loss is None:
            self.first_loss = record.loss
        if self.peak is None or record.loss > self.peak[1]:
            self.peak = record.step, record.loss

    def take_heard(self) -> list[StepRecord]:
        """Return the steps judged since the last call."""
        heard, self._heard = self._heard, []
        return heard

    # --- the epoch --------------------------------------------------------------------------------------------------

    def add(self, loss: float | None, grad_norm: float | None, *, skipped: bool = False) -> None:
        """Add one step; a skipped step is counted, but its numbers are not."""
        sums = self._sums
        sums["num_steps"] += 1
        sums["num_skipped"] += skipped
        if skipped:
            return
        if loss is not None:
            sums["loss"], sums["num_losses"] = sums["loss"] + loss, sums["num_losses"] + 1
        if grad_norm is not None:
            sums["norm"], sums["num_norms"] = sums["norm"] + grad_norm, sums["num_norms"] + 1
            sums["max_norm"] = max(sums["max_norm"], grad_norm)

    def begin_epoch(self) -> None:
        """Count batches and average steps from here on."""
        self.num_batches, self._sums = 0, _empty_sums()

    def average_epoch(self) -> dict[str, float]:
        """Return averages and maxima of the epoch so far; the loss is NaN if no step was usable."""
        sums = self._sums
        return {
            "loss": sums["loss"] / sums["num_losses"] if sums["num_losses"] else math.nan,
            "grad_norm_mean": sums["norm"] / sums["num_norms"] if sums["num_norms"] else math.nan,
            "grad_norm_max": sums["max_norm"] if sums["num_norms"] else math.nan,
            "num_steps": sums["num_steps"],
            "num_skipped": sums["num_skipped"],
        }

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        # A copy: a checkpoint is written while the training goes on
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_heard"})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict()`."""
        for name in self.state_dict().keys() & state.keys():  # earlier versions knew fewer
            setattr(self, name, state[name])
        self._heard = []  # not what was judged before the resume


def note_epoch(history: list[dict[str, Any]], line: dict[str, Any]) -> None:
    """Append the line of an epoch, in place of an earlier one: a step limit may have cut it, and been raised."""
    if history and history[-1]["epoch"] == line["epoch"]:
        history.pop()
    history.append(line)


def _empty_sums() -> dict[str, float]:
    return {
        "loss": 0.0,
        "num_losses": 0,
        "norm": 0.0,
        "num_norms": 0,
        "max_norm": 0.0,
        "num_steps": 0,
        "num_skipped": 0,
    }
