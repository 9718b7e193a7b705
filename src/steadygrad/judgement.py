"""Judgement: the host's loop. Facts in; detect -> decide -> act -> record, in that order, once for each fact.

It holds what a person asks about afterwards: findings, incidents, the last step, the totals. It never touches a
gradient, and its own failure never ends or alters a training: a rule, sink or callback that breaks is reported once.
Only a Verdict to halt leaves it as an exception.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from steadygrad.act.followers import Followers
from steadygrad.act.outcome import UNTOUCHED, tell_reflex
from steadygrad.config import GuardConfig
from steadygrad.decide import decide
from steadygrad.detect import Detector, standard_rules
from steadygrad.errors import NonFiniteError, TrainingHalted
from steadygrad.facts import Action, Finding, Incident, Outcome, Reading, Severity, StepRecord, Verdict
from steadygrad.measure.scan import find_nonfinite
from steadygrad.measure.subjects import Subjects
from steadygrad.record import Recorder
from steadygrad.record.tally import Tally

logger = logging.getLogger("steadygrad")
NO_ACTION = Verdict(action=Action.NONE, reason="told, not acted on")


class Judgement:
    """Judges each step after its optimizer was queued, while the weights are still those it left."""

    def __init__(self, config: GuardConfig, *, subjects: Subjects, followers: Followers, recorder: Recorder) -> None:
        self._config, self._subjects = config, subjects
        self._followers, self._recorder = followers, recorder
        threshold = getattr(config.clip, "max_norm", None)
        self._detector = Detector(standard_rules(config.detect, clip_threshold=threshold))
        self._started = time.monotonic()
        self._complained: set[str] = set()
        self.tally = Tally()
        self.findings: list[Finding] = []
        self.incidents: list[Incident] = []
        self.last: StepRecord | None = None
        self.last_reading: Reading | None = None

    def judge(self, reading: Reading) -> None:
        """One step, from its numbers to the record."""
        if not reading.skipped:
            self._followers.after_applied()
        self.tally.add(reading)
        self.last_reading = reading
        self.last = StepRecord.of(reading, time_seconds=time.monotonic() - self._started)
        findings = self._observe(reading)
        self._record_step(self.last, reading, findings)
        for finding in findings:
            verdict = decide(finding, reading, self._config.on_nonfinite)
            self.conclude(finding, verdict, tell_reflex(verdict.action, reading))

    def note(self, finding: Finding) -> None:
        """A finding that nothing is done about."""
        self.conclude(finding, NO_ACTION, UNTOUCHED)

    def conclude(self, finding: Finding, verdict: Verdict, outcome: Outcome) -> None:
        """Write a finding down; it is an incident when it matters, or when something was done about it."""
        self.findings.append(finding)
        level = logging.INFO if finding.severity is Severity.INFO else logging.WARNING
        logger.log(level, "step %d: %s (%s). %s", finding.step, finding.message, outcome.message, finding.advice)
        if finding.severity is not Severity.INFO or verdict.action not in (Action.NONE, Action.CLIP):
            incident = Incident(step=finding.step, finding=finding, verdict=verdict, outcome=outcome)
            self.incidents.append(incident)
            self._recorder.write_incident(incident)
            self._call_back(incident)
        if verdict.action is Action.HALT:
            kind = NonFiniteError if finding.kind.startswith("nonfinite") else TrainingHalted
            story = f"step {finding.step}: {finding.message}. {outcome.message.capitalize()}. {finding.advice}"
            raise kind(story, tuple(self.incidents))

    def _observe(self, reading: Reading) -> list[Finding]:
        try:
            findings = self._detector.observe(reading)
            if reading.is_nonfinite and any(f.severity is not Severity.INFO for f in findings):
                findings += self._scan_parameters(reading.step)
        except Exception as error:  # a broken rule must not end a healthy training
            self._complain("detect", f"a rule failed on step {reading.step}, training goes on: {error!r}")
            return []
        return findings

    def _scan_parameters(self, step: int) -> list[Finding]:
        """A bad step makes it worth a pass over the weights: were they bad before it?"""
        bad = find_nonfinite(self._subjects.named)
        if not bad:
            return []
        return [
            Finding(
                kind="nonfinite_parameter",
                severity=Severity.CRITICAL,
                step=step,
                message=f"{len(bad)} parameters already held NaN or Inf before this step: {', '.join(bad[:5])}",
                advice="No skip can heal this. Load an earlier checkpoint; if the optimizer made them (Adam in half "
                "precision), keep the weights in float32 and use autocast.",
                evidence={"parameters": bad[:5], "num_parameters": len(bad)},
            )
        ]

    def _record_step(self, record: StepRecord, reading: Reading, findings: list[Finding]) -> None:
        config, step = self._config.record, reading.step
        if step % config.steps_every == 0 or reading.skipped:
            self._recorder.write_step(record)
        notable = any(f.severity is not Severity.INFO for f in findings)
        if config.layers_every and (step % config.layers_every == 0 or notable):
            self._recorder.write_layers(step, reading.gradients)

    def _call_back(self, incident: Incident) -> None:
        if self._config.on_incident is None:
            return
        try:
            self._config.on_incident(incident)
        except Exception as error:
            self._complain("on_incident", f"on_incident failed, training goes on: {error!r}")

    def _complain(self, what: str, message: str) -> None:
        if what not in self._complained:
            self._complained.add(what)
            logger.error(message)

    def state_dict(self) -> dict[str, Any]:
        """Histories and totals."""
        return {"detect": self._detector.state_dict(), "tally": self.tally.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of `state_dict()`."""
        self._detector.load_state_dict(state["detect"])
        self.tally.load_state_dict(state["tally"])

    def close(self) -> None:
        """Close the record."""
        self._recorder.close()
