"""Judgement: the host's loop. Facts in; detect -> decide -> act -> record, in that order, once for each fact.

It holds what users look at afterwards: findings, incidents, the last step, the totals. It never touches a gradient,
and its own failure never ends or alters a training: a rule, sink or callback that breaks is reported once. Only a
Verdict to halt leaves it as an exception.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steadygrad.act.actor import UNTOUCHED, Actor, describe_reflex
from steadygrad.act.schedule_and_ema import ScheduleAndEma
from steadygrad.config import GuardConfig
from steadygrad.decide import EarlyStopping, Judge
from steadygrad.decide.health import assess_health
from steadygrad.decide.reflex import decide
from steadygrad.detect import Detector
from steadygrad.errors import NonFiniteError, TrainingHalted
from steadygrad.facts import (
    Action,
    ActionTaken,
    Cause,
    EpochEnd,
    Fact,
    Finding,
    Flush,
    Incident,
    Outcome,
    Reading,
    Severity,
    StepRecord,
    Validation,
    Verdict,
)
from steadygrad.facts.carried import Carried
from steadygrad.facts.kinds import find_kind
from steadygrad.judgement.event import BY_REFLEX, Event, make_incidents
from steadygrad.judgement.raised import make_unfinished
from steadygrad.judgement.speaker import Speaker
from steadygrad.measure.origin import Origin
from steadygrad.prove import Prover
from steadygrad.record import Recorder
from steadygrad.record.tally import Tally

logger = logging.getLogger("steadygrad")
NO_ACTION = Verdict(action=Action.NONE, reason="reported, not acted on")
FindCause = Callable[[Reading, Sequence[Finding]], "Cause | None"]


class Judgement:
    """Judges each step after its optimizer step was queued, while the weights are still those that it left."""

    def __init__(
        self,
        config: GuardConfig,
        *,
        detector: Detector,
        schedule_and_ema: ScheduleAndEma,
        actor: Actor,
        recorder: Recorder,
        own: Detector | None = None,
        prover: Prover | None = None,
        speaker: Speaker | None = None,
        is_first: bool = True,
    ) -> None:
        """`own`: with several ranks, the rules about what this rank alone has seen, which only report.

        `is_first`: whether this rank warns of what all of them find; the others log it at the level INFO.

        `prover`: tests findings on finite numbers before they are acted on; with None they are only reported.
        `speaker`: says which guard a line is about.
        """
        self._prover, self._speaker = prover, speaker
        self._shared_level = logging.WARNING if is_first else logging.INFO
        self._logged_causes: dict[tuple[object, ...], int | None] = {}
        """Causes that were logged in full, by their identity: the step of each."""
        self._config, self._schedule_and_ema, self._actor, self._recorder = config, schedule_and_ema, actor, recorder
        self._detector, self._own = detector, own
        self._judge = Judge(config.policy, on_nonfinite=config.on_nonfinite)
        self._started = time.monotonic()
        self._complained: set[str] = set()
        self._last_action: ActionTaken | None = None
        self._next_ratios = 0
        self._epoch_losses = _Mean()
        policy = config.policy
        # 1 << 62: without a patience it records the best loss and never asks to stop.
        self.stopping = EarlyStopping(
            patience=policy.early_stopping_patience or 1 << 62, min_delta=policy.early_stopping_min_delta
        )
        self.tally = Tally()
        self.findings: list[Finding] = []
        self.incidents: list[Incident] = []
        self.last: StepRecord | None = None
        self.last_reading: Reading | None = None

    @property
    def proves(self) -> bool:
        """Whether findings on finite numbers are tested, for which steps must be captured."""
        return self._prover is not None

    # --- facts ------------------------------------------------------------------------------------------------------

    def judge(
        self,
        reading: Reading,
        facts: Sequence[Fact] = (),
        *,
        find_cause: FindCause | None = None,
        origin: Origin | None = None,
        extra: Mapping[str, float] | None = None,
        captures: Sequence[Any] = (),
    ) -> bool | None:
        """Judge one step, from its numbers to the record; return whether the weights look healthy, None if unknown.

        `find_cause` is called once, before any action, if something above info was found. `origin` names the ranks on
        which a bad step began, `extra` holds the numbers that the user's program logged beside the loss.
        """
        if not reading.skipped:
            # Before any action: the average takes the weights that this step left, and a rollback puts both back.
            self._schedule_and_ema.after_applied()
            if self._schedule_and_ema.is_doubled:
                self.note(self._schedule_and_ema.report_doubled(reading.step))
        # A NaN loss whose gradients were sanitized is not skipped, but it must not make the epoch's mean NaN.
        self._epoch_losses.add(None if reading.skipped or reading.loss_is_nonfinite else reading.loss)
        self.tally.add(reading)
        self.last_reading = reading
        self.last = StepRecord.of(reading, time_seconds=time.monotonic() - self._started, extra=extra)
        findings = [finding for fact in facts for finding in self._detector.observe(fact)]
        findings += self._detector.observe(reading)
        if findings:
            findings = [_note_when(finding, reading.step) for finding in findings]
        if self._prover is not None:
            # Before the step is recorded and answered: what the prover holds back is neither yet.
            findings = self._prover.answer(reading, findings, captures)
        if origin is not None:
            findings = [_name_origin(finding, origin) for finding in findings]
        self._record_step(self.last, reading, findings)
        if findings:
            notable = any(finding.severity is not Severity.INFO for finding in findings)
            # Before _answer(): a rollback would replace the weights that produced the failure.
            cause = find_cause(reading, findings) if notable and find_cause is not None else None
            if cause is not None:
                self._log_cause(cause, level=self._shared_level)
            self._answer(findings, reading, cause)
        healthy = assess_health(reading, findings)
        is_tested = self._prover is not None and self._prover.is_open
        if healthy is None or (healthy and is_tested):
            return None
        for reason in self._actor.after_step(reading.step, healthy=healthy):
            logger.warning(reason)
        return healthy

    def report_own(self, reading: Reading, facts: Sequence[Fact]) -> list[Finding]:
        """Report what this rank alone has seen, without changing anything that training depends on."""
        if self._own is None:
            return []
        findings = [finding for fact in (*facts, reading) for finding in self._own.observe(fact)]
        findings = [_note_when(finding, reading.step) for finding in findings]
        verdicts = [decide(finding, reading, self._config.on_nonfinite) for finding in findings]
        self.conclude([Event(f, v, describe_reflex(v.action, reading)) for f, v in zip(findings, verdicts)])
        return findings

    def validate(self, step: int, epoch: int, loss: float) -> None:
        """Judge a validation loss."""
        self.stopping.observe(step, loss)
        self._recorder.write_validation(step, epoch, loss)
        self._consider(Validation(step=step, epoch=epoch, loss=loss))

    def end_epoch(self, step: int, epoch: int) -> None:
        """Record the end of an epoch."""
        self._consider(EpochEnd(step=step, epoch=epoch, train_loss=self._epoch_losses.take()))

    def flush(self, step: int) -> None:
        """Judge what the run shows as a whole, up to `step`."""
        self._consider(Flush(step=step))

    def hear(self, fact: Fact) -> None:
        """Judge a fact that came between two steps."""
        self._consider(fact)

    def refuse(self, step: int, learning_rates: tuple[float, ...]) -> None:
        """Record a step that was not made, in the window after a rollback; no rule sees it."""
        reading = make_unfinished(step, learning_rates)
        self.tally.num_steps += 1
        self.tally.num_skipped += 1
        self.last = StepRecord.of(reading, time_seconds=time.monotonic() - self._started)
        self._recorder.write_step(self.last)

    def note(self, finding: Finding, cause: Cause | None = None, *, write: bool = False) -> None:
        """Take a finding that needs no action; `write`: record it even if it is only an info."""
        if cause is not None:
            self._log_cause(cause)
        self.conclude([Event(finding, NO_ACTION, UNTOUCHED)], cause)
        if write and finding.severity is Severity.INFO:
            self._recorder.write_incident(
                Incident(step=finding.step, finding=finding, verdict=NO_ACTION, outcome=UNTOUCHED)
            )

    def _consider(self, fact: Fact) -> None:
        if self._own is not None:
            own = [_note_when(finding, fact.step) for finding in self._own.observe(fact)]
            self.conclude([Event(finding, NO_ACTION, UNTOUCHED) for finding in own])
        findings = [_note_when(finding, fact.step) for finding in self._detector.observe(fact)]
        self._answer(findings if self._prover is None else self._prover.sift(findings, fact.step), None)

    # --- detect, decide, act, record --------------------------------------------------------------------------------

    def _answer(self, findings: Sequence[Finding], reading: Reading | None, cause: Cause | None = None) -> None:
        """Decide about all findings, then act on each; before a halt, record everything and change nothing."""
        verdicts = [self._judge.decide(finding, reading=reading) for finding in findings]
        if any(verdict.action is Action.HALT for verdict in verdicts):
            verdicts = [_leave(verdict) for verdict in verdicts]
        events = [self._carry_out(finding, verdict, reading) for finding, verdict in zip(findings, verdicts)]
        incidents = self.conclude(events, cause, level=self._shared_level)
        halting = next((one for one in incidents if one.verdict.action is Action.HALT), None)
        if halting is not None:
            # Before the raise: nothing is judged after it.
            self._report_open("the run was halted before it could be tested")
            raise _as_error(halting, tuple(self.incidents))
        if any(event.outcome.action is Action.ROLLBACK for event in events):
            self._report_open("the run was rolled back before it could be tested")  # the suspected weights are gone
        for event in events:
            if event.outcome.action not in BY_REFLEX and event.finding.severity is not Severity.INFO:
                self._report_action(ActionTaken(step=event.when, action=event.outcome.action))

    def _carry_out(self, finding: Finding, verdict: Verdict, reading: Reading | None) -> Event:
        """Act on one finding."""
        now = finding.step if reading is None else reading.step
        outcome = self._actor.carry_out(verdict, reading, step=now)
        if verdict.action is Action.ROLLBACK and outcome.action is Action.NONE and find_kind(finding.kind).fatal:
            verdict = Verdict(action=Action.HALT, reason=f"{verdict.reason}, and there is nothing to go back to")
            outcome = Outcome(action=Action.HALT, message=outcome.message)
        if outcome.action not in BY_REFLEX:
            finding = dataclasses.replace(finding, acted_at=now)
        return Event(finding, verdict, outcome)

    def _report_action(self, taken: ActionTaken) -> None:
        """Report an action once: loss, gradient and batch of one bad step are three findings but one skip."""
        if taken != self._last_action:
            # Set first: _consider() may lead back here with the same action.
            self._last_action = taken
            self._consider(taken)

    def conclude(
        self, events: Sequence[Event], cause: Cause | None = None, *, level: int = logging.WARNING
    ) -> list[Incident]:
        """Record the findings of one step. Those above info or acted on form one incident with one headline.

        Two actions in one step are two incidents: each has its own numbers before and after. `level`: the one that
        findings above info are logged at.
        """
        self.findings += [event.finding for event in events]
        notable = [event for event in events if event.is_notable]
        for event in events:
            if event not in notable:
                self.tally.add_outcome(event.outcome)
                self._log(event, level=level)
        incidents = make_incidents(notable, cause)
        for incident in incidents:
            self.tally.add_outcome(incident.outcome)
            self._log(Event(incident.finding, incident.verdict, incident.outcome), incident.also, level=level)
            self.incidents.append(incident)
            self._recorder.write_incident(incident)
            self._call_back(incident)  # after it was recorded: the callback may end the program
        return incidents

    @property
    def _whose(self) -> str:
        return "" if self._speaker is None else self._speaker.whose

    def _log_cause(self, cause: Cause, *, level: int = logging.WARNING) -> None:
        """Log a cause in full the first time; the record has it in full each time."""
        is_new = cause.identity not in self._logged_causes
        first = self._logged_causes.setdefault(cause.identity, cause.step)
        text = str(cause) if is_new or first is None else cause.refer_to(first)
        logger.log(level, "%s%s", self._whose, text)

    def _log(self, event: Event, also: Sequence[Finding] = (), *, level: int) -> None:
        finding, more = event.finding, "".join(f"; also {other.kind}: {other.message}" for other in also)
        is_quiet = finding.severity is Severity.INFO and not find_kind(finding.kind).is_shown
        logger.log(
            logging.INFO if is_quiet else level,
            "%s%s: %s%s (%s). %s",
            self._whose,
            finding.when,
            finding.message,
            more,
            event.outcome.message,
            finding.advice,
            extra={
                "finding": Carried(finding.kind, finding),
                "outcome": Carried(event.outcome.action.value, event.outcome),
                "whose": self._whose,
            },
        )

    def _record_step(self, record: StepRecord, reading: Reading, findings: list[Finding]) -> None:
        config, step = self._config.record, reading.step
        if step % config.steps_every == 0 or reading.skipped:
            self._recorder.write_step(record)
        notable = any(f.severity is not Severity.INFO for f in findings)
        has_ratios = self._ratios_are_due(reading)
        if config.layers_every and (step % config.layers_every == 0 or notable or has_ratios):
            self._recorder.write_layers(step, reading.gradients, reading.update_ratios)

    def _ratios_are_due(self, reading: Reading) -> bool:
        """Return whether to record the update ratios: their steps may never coincide with those of the layers."""
        if reading.update_ratios is None or reading.step < self._next_ratios:
            return False
        self._next_ratios = reading.step + self._config.record.layers_every
        return True

    def _call_back(self, incident: Incident) -> None:
        if self._config.on_incident is None:
            return
        try:
            self._config.on_incident(incident)
        except Exception as error:  # the user's own code
            self._complain("on_incident", f"on_incident failed, training continues: {error!r}")

    def _complain(self, what: str, message: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.error(message)

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return histories, budgets and totals, and write the record so far to disk."""
        # It goes into a checkpoint: killed after that, a run whose record is behind would resume with a gap in it
        self.flush_record()
        return {
            # Under one key: with another number of ranks, rules go from the one to the other
            "detect": self._detector.state_dict() | ({} if self._own is None else self._own.state_dict()),
            "judge": self._judge.state_dict(),
            "stopping": self.stopping.state_dict(),
            "tally": self.tally.state_dict(),
            "epoch": self._epoch_losses.state_dict(),
            "prover": {} if self._prover is None else self._prover.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict()`."""
        for detector in (self._detector, self._own):
            if detector is not None:
                detector.load_state_dict(state["detect"])
        self._judge.load_state_dict(state["judge"])
        self.stopping.load_state_dict(state["stopping"])
        self.tally.load_state_dict(state["tally"])
        self._epoch_losses.load_state_dict(state["epoch"])
        if self._prover is not None:
            self._prover.load_state_dict(state.get("prover", {}))

    def add_sink(self, sink: Any) -> None:
        """Send what is recorded to one more sink from now on."""
        self._recorder.add(sink)

    def flush_record(self) -> None:
        """Write the record so far to disk: a checkpoint must never be ahead of it."""
        self._recorder.flush()

    def close(self) -> None:
        """Report a suspicion that is still open, then close the record."""
        self._report_open("the guard was closed before it could be tested")
        self._recorder.close()
        if self._speaker is not None:
            self._speaker.close()

    def _report_open(self, reason: str) -> None:
        finding = None if self._prover is None else self._prover.close(reason)
        if finding is not None:
            self.conclude([Event(finding, NO_ACTION, UNTOUCHED)])


class _Mean:
    """Mean loss of the steps applied since it was last taken."""

    def __init__(self) -> None:
        self._sum, self._count, self._attempts = 0.0, 0, 0

    def add(self, loss: float | None) -> None:
        self._attempts += 1
        if loss is not None:
            self._sum, self._count = self._sum + loss, self._count + 1

    def take(self) -> float | None:
        """Return the mean; NaN if steps were made but none was applied, None if none was made."""
        mean = self._sum / self._count if self._count else math.nan if self._attempts else None
        self._sum, self._count, self._attempts = 0.0, 0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum, "count": self._count, "attempts": self._attempts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sum, self._count, self._attempts = state["sum"], state["count"], state["attempts"]


def _name_origin(finding: Finding, origin: Origin) -> Finding:
    """Return the finding of a bad step with the ranks on which it began."""
    if not find_kind(finding.kind).about_step or not origin.text:
        return finding
    evidence = {**finding.evidence, "ranks": list(origin.ranks)}
    return dataclasses.replace(finding, message=f"{finding.message}; {origin.text}", evidence=evidence)


def _leave(verdict: Verdict) -> Verdict:
    """Return what still holds when another finding halts the run: only what the reflex already did."""
    if verdict.action in (Action.HALT, Action.SKIP, Action.SANITIZE, *BY_REFLEX):
        return verdict
    return Verdict(action=Action.NONE, reason=f"{verdict.reason}, but the run is halted")


def _as_error(incident: Incident, story: tuple[Incident, ...]) -> TrainingHalted:
    finding = incident.finding
    kind = NonFiniteError if finding.kind.startswith("nonfinite") else TrainingHalted
    reason, outcome = incident.verdict.reason, incident.outcome.message
    causes = [one.cause for one in (incident, *reversed(story)) if one.cause is not None]
    quoted = f"\n{causes[0]}" if causes else ""
    return kind(f"{finding.when}: {finding.message}; {reason}; {outcome}. {finding.advice}{quoted}", story)


def _note_when(finding: Finding, step: int) -> Finding:
    """Return the finding with the step at which it was noticed."""
    return finding if finding.noticed_at is not None else dataclasses.replace(finding, noticed_at=step)
