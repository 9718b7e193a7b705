"""Judging: the numbers of a step that are on the host -> judgement, and what follows from it.

On CUDA with fused optimizers a step is judged when its numbers have arrived: at once where the device has kept up with
the host, else one step late, after forward and backward of the next step are queued and before that step's optimizer
is. So the weights that produced a failure are still there. Here a snapshot is due or a rollback is followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from steadygrad.clip.outliers import OutlierClipper
from steadygrad.detect.rank_rules import split_facts
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.investigator import tell_since_when
from steadygrad.facts import Cause, Fact, Finding, Reading
from steadygrad.guard.parts import Moment, Parts
from steadygrad.measure import Measurement, Ticket
from steadygrad.measure.meter import FOUND, StepContext
from steadygrad.measure.origin import Origin
from steadygrad.measure.periodic_scans import Looks
from steadygrad.measure.ranks import Told


@dataclass(slots=True)
class Pending:
    """A step whose optimizer is queued and whose numbers are on their way."""

    measurement: Measurement
    ticket: Ticket
    context: StepContext
    looks: Looks
    updates: Ticket | None = None


class Judging:
    """Judges each step once, in order; at most one is on its way."""

    def __init__(self, parts: Parts, moment: Moment) -> None:
        self._parts, self._moment = parts, moment
        self.pending: Pending | None = None
        self.is_asked_to_stop = False
        """Whether a rank has got a signal to stop, and all ranks know."""

    def judge_pending(self) -> None:
        """Wait for the step that is on its way, and judge it."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        numbers = pending.ticket.wait()
        reading = pending.measurement.read(numbers, pending.context, skipped=numbers[FOUND] > 0)
        if pending.updates is not None:
            reading = self.add_updates(reading, pending.updates)
        self.judge(reading, pending.looks, self._parts.meter.read_told(pending.measurement, numbers))

    def judge_if_arrived(self) -> None:
        """Judge the step that was just queued if its numbers are here: the optimizer runs on the device meanwhile.

        On many ranks never: they must judge at the same point of their program, and numbers arrive when they do.
        """
        pending = None if self._parts.ranks.many else self.pending
        if pending is None or pending.updates is not None or pending.looks.under_way:
            return
        if pending.ticket.ready:
            self.judge_pending()

    def judge(self, reading: Reading, looks: Looks, told: Told) -> None:
        """Hand a step to judgement, then see to what follows from it: snapshots, or a rollback."""
        parts = self._parts
        parts.reflex.expects_clipping = reading.clipped
        if isinstance(parts.clipper, OutlierClipper) and not reading.is_nonfinite and not reading.skipped:
            parts.clipper.hear(reading.step, reading.finite_grad_norm)
        if looks.rms is not None and not reading.skipped:
            reading = dataclasses.replace(reading, adam_rms=looks.rms.read())
        with parts.buffers.as_saved() if reading.is_nonfinite else contextlib.nullcontext():
            facts = parts.periodic_scans.read(reading, looks)  # a late judgement comes after the next forward
        origin = None
        if parts.ranks.many:
            facts, origin = self._consult_ranks(reading, facts, looks, told)
        healthy = parts.judgement.judge(
            reading,
            facts,
            find_cause=functools.partial(self._find_cause, looks.captures, origin),
            origin=origin,
            extra={} if looks.logged is None else looks.logged.read(),
            captures=looks.captures,
        )
        if healthy is not None:
            parts.checkpoints.note_step(reading.step, healthy=healthy, skipped=reading.skipped)
        if not self.follow_rollback() and healthy and parts.snapshots.due(reading.step + 1):
            self._take_snapshot(reading.step + 1)

    def add_updates(self, reading: Reading, ticket: Ticket) -> Reading:
        """The reading with what the optimizer did to the weights."""
        numbers = ticket.wait()
        norms, ratios = self._parts.updates.read(numbers)
        norm = self._parts.updates.read_norm(numbers)
        return dataclasses.replace(reading, parameter_norms=norms, update_ratios=ratios, update_norm=norm)

    def follow_rollback(self) -> bool:
        """After a rollback, what was remembered of weights and buffers is no more."""
        rolled_back = self._parts.actor.take_rolled_back()
        if rolled_back:
            self._parts.buffers.forget()
            self._parts.periodic_scans.forget()
            self._parts.edits.forget()
        return rolled_back

    def _consult_ranks(
        self, reading: Reading, facts: list[Fact], looks: Looks, told: Told
    ) -> tuple[list[Fact], Origin]:
        """Tell what this rank alone has seen, and learn where a bad step began. The facts that are everybody's."""
        parts = self._parts
        self.is_asked_to_stop |= told.asks_to_stop
        if parts.rank_file is not None and reading.step % parts.config.record.steps_every == 0:
            parts.rank_file.write_own(reading.step, told.own_loss)
        facts, own_facts = split_facts(facts)
        signs = [finding.message for finding in parts.judgement.tell_own(reading, own_facts)]
        return facts, parts.own_gradients.find_origin(reading, told, looks.own_finite, signs)

    def _find_cause(
        self, captures: Sequence[Capture], origin: Origin | None, reading: Reading, findings: Sequence[Finding]
    ) -> Cause | None:
        """The cause of a bad step; on many ranks that on which it began finds it, and tells all."""
        parts, ranks = self._parts, self._parts.ranks
        if ranks.many and (origin is None or not origin.ranks or ranks.is_joining):
            return None
        if not parts.investigator.claim(reading, findings):
            return None
        if origin is None:
            return self._replay(captures, reading, findings)
        chosen = origin.ranks[0]
        cause = self._replay(captures, reading, findings) if ranks.rank == chosen else None
        if cause is not None:
            cause = dataclasses.replace(cause, note=f"Replayed on {ranks.name(chosen)}. {cause.note}".strip())
        told: Cause | None = ranks.gather(cause)[chosen]
        return told

    def _replay(self, captures: Sequence[Capture], reading: Reading, findings: Sequence[Finding]) -> Cause | None:
        """Replay the step, from the buffers that it began with."""
        buffers = self._parts.buffers
        with buffers.as_saved(), buffers.unchanged(), self._parts.own_gradients.looking_away():
            cause = self._parts.investigator.investigate(captures, reading, findings)
        given = self._parts.periodic_scans.given_nonfinite
        return cause if cause is None or given is None else tell_since_when(cause, given)

    def _take_snapshot(self, step: int) -> None:
        """The state before `step`; judged late, that step's forward has already moved the buffers."""
        with self._parts.buffers.as_saved():
            self._parts.snapshots.take(step, self._parts.list_settings())
