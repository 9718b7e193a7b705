"""Epochs: what a program reports between steps: a validation loss, the end of an epoch."""

from __future__ import annotations

import math

from steadygrad.act.schedule_and_ema import ScheduleAndEma
from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.guard.judging import Judging
from steadygrad.guard.moment import Moment
from steadygrad.guard.training import Training
from steadygrad.measure.ranks import Ranks


class Epochs:
    """Counts epochs and passes on their validation losses."""

    def __init__(
        self,
        training: Training,
        *,
        moment: Moment,
        judging: Judging,
        checkpoints: RunCheckpoints,
        schedule_and_ema: ScheduleAndEma,
        ranks: Ranks,
    ) -> None:
        self._training, self._moment, self._judging = training, moment, judging
        self._checkpoints, self._schedule_and_ema, self._ranks = checkpoints, schedule_and_ema, ranks

    def validate(self, loss: float) -> None:
        """Take a validation loss; with several ranks, use their mean."""
        # First: the step before belongs before this in the record, and may be rolled back.
        self._judging.judge_pending()
        # A collective: every rank must call it, also one whose loss is not finite.
        moment, value = self._moment, self._ranks.take_mean(loss)
        if math.isfinite(value):
            moment.validation_loss, moment.validated_at = value, moment.next_step
            self._checkpoints.note_validation(moment.next_step, value)
        if not self._training.off:
            self._judging.validate(moment.last_step, moment.epoch, value)

    def end(self) -> None:
        """End the epoch: step a scheduler that moves by epoch."""
        self._judging.judge_pending()
        moment = self._moment
        if not self._training.off:
            self._judging.end_epoch(moment.last_step, moment.epoch)
        moment.epoch += 1
        self._checkpoints.end_epoch(moment.next_step)
        self._schedule_and_ema.after_epoch(moment.validation_loss)
