"""Judging: the numbers of a step, once on the host -> judgement, and what follows from it.

On CUDA with fused optimizers a step is judged when its numbers have arrived: at once if the device keeps up with the
host, otherwise one step late, after forward and backward of the next step are queued and before its optimizer step
is. So the weights that produced a failure are still there. Afterwards a snapshot is taken or a rollback completed.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from steadygrad.act.buffers import BufferKeeper
from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.facts import Reading
from steadygrad.guard.inquiry import Inquiry
from steadygrad.guard.rollback import Rollback
from steadygrad.guard.watched import Watched
from steadygrad.judgement import Judgement
from steadygrad.measure import Measurement, Ticket
from steadygrad.measure.measurement import FOUND, StepContext
from steadygrad.measure.periodic_scans import Looks
from steadygrad.measure.ranks import FromRanks, Ranks


@dataclass(slots=True)
class Pending:
    """A step whose optimizer step is queued and whose numbers are still being copied."""

    measurement: Measurement
    ticket: Ticket
    context: StepContext
    looks: Looks
    updates: Ticket | None = None


class Judging:
    """Judges each step once, in order; at most one is pending."""

    def __init__(
        self,
        judgement: Judgement,
        *,
        watched: Watched,
        rollback: Rollback,
        buffers: BufferKeeper,
        ranks: Ranks,
        inquiry: Inquiry,
        checkpoints: RunCheckpoints,
    ) -> None:
        self._judgement, self._watched, self._rollback, self._buffers = judgement, watched, rollback, buffers
        self._ranks, self.inquiry, self._checkpoints = ranks, inquiry, checkpoints
        self.pending: Pending | None = None
        self.is_asked_to_stop = False
        """Whether some rank has received a signal to stop and all ranks know it."""

    # --- a step -------------------------------------------------------------------------------------------------------

    def judge_pending(self) -> None:
        """Wait for the numbers of the pending step, then judge it."""
        pending, self.pending = self.pending, None  # first: a Verdict to halt raises, and nothing is judged twice
        if pending is None:
            return
        # Waits for the copy of that step, never for the forward and backward that were queued since.
        numbers = pending.ticket.wait()
        self._watched.meter.check_gradients(pending.measurement, numbers)
        reading = pending.measurement.read(numbers, pending.context, skipped=numbers[FOUND] > 0)
        if pending.updates is not None:
            reading = self.add_updates(reading, pending.updates)
        self.judge(reading, pending.looks, self._watched.meter.read_from_ranks(pending.measurement, numbers))

    def judge_if_arrived(self) -> None:
        """Judge the step just queued if its numbers have arrived, while its optimizer step runs on the device.

        Never with several ranks: they must judge at the same point of their program, but numbers arrive at any time.
        """
        pending = None if self._ranks.many else self.pending
        # What was measured after the optimizer is queued behind it: reading it now would wait for the step.
        if pending is None or pending.updates is not None or pending.looks.under_way:
            return
        if pending.ticket.ready:
            self.judge_pending()

    def catch_up(self) -> None:
        """Judge the pending step for a caller that reads results; not with several ranks, where one may call alone."""
        if not self._ranks.many:
            self.judge_pending()

    def drop_pending(self) -> None:
        """Drop the pending step when an error propagates: the other ranks would not answer this one."""
        if self._ranks.many:
            self.pending = None

    def judge(self, reading: Reading, looks: Looks, from_ranks: FromRanks) -> None:
        """Hand a step to judgement, then do what follows from it: take a snapshot, or complete a rollback."""
        self._watched.hear(reading)
        if looks.rms is not None and not reading.skipped:
            reading = dataclasses.replace(reading, adam_rms=looks.rms.read())
        if reading.is_nonfinite:
            with self._buffers.as_saved():  # a late judgement runs after the next forward
                facts = self._watched.periodic_scans.read(reading, looks)
        else:
            facts = self._watched.periodic_scans.read(reading, looks)
        logged = {} if looks.logged is None else looks.logged.read()
        if logged and not self._ranks.many:  # ranks must judge the same facts, and each logs its own
            reading = dataclasses.replace(reading, extra=logged)
        origin = None
        if self._ranks.many:
            self.is_asked_to_stop |= from_ranks.asks_to_stop
            facts, origin = self.inquiry.consult_ranks(reading, facts, looks, from_ranks)
        healthy = self._judgement.judge(
            reading,
            facts,
            find_cause=functools.partial(self.inquiry.find_cause, looks, origin),
            origin=origin,
            extra=logged,
            captures=looks.captures,
        )
        if not (reading.skipped or reading.is_nonfinite):
            self.inquiry.note_good(reading.step)
        if healthy is not None:
            self._checkpoints.note_step(reading.step, healthy=healthy, skipped=reading.skipped)
        # follow() stands first, so that it is called after every judgement, healthy or not.
        if not self._rollback.follow() and healthy:
            self._rollback.take_snapshot_if_due(reading.step + 1)

    def add_updates(self, reading: Reading, ticket: Ticket) -> Reading:
        """Return the reading with the size of the optimizer's updates added."""
        numbers = ticket.wait()
        norms, ratios = self._watched.updates.read(numbers)
        norm = self._watched.updates.read_norm(numbers)
        return dataclasses.replace(reading, parameter_norms=norms, update_ratios=ratios, update_norm=norm)

    def write_refused(self, step: int, learning_rates: tuple[float, ...]) -> None:
        """Record a step that was not made, in the window after a rollback."""
        self._judgement.refuse(step, learning_rates)

    def note_steps_of_others(self, num: int) -> None:
        """Count steps that only other ranks have made, whose weights this one has now."""
        self._watched.periodic_scans.num_since += num

    # --- between steps ------------------------------------------------------------------------------------------------

    def validate(self, step: int, epoch: int, loss: float) -> None:
        """Judge a validation loss that was reported after `step`."""
        self._watched.program.note_validation(step)
        self._judgement.validate(step, epoch, loss)
        self._rollback.follow()

    def end_epoch(self, step: int, epoch: int) -> None:
        """Record that an epoch ended with `step`."""
        self._judgement.end_epoch(step, epoch)
        self._rollback.follow()

    def flush(self, step: int) -> None:
        """Judge the pending step, then what the run shows as a whole."""
        self.judge_pending()
        self._judgement.flush(step)
