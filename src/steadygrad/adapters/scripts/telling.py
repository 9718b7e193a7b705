"""What `steadygrad run` tells a person: incidents as they come and a few lines at the end, on standard error only.

Lines are short, start with `steadygrad:`, and are limited in number: what is repeated is counted, and stands in the
run directory. Standard output is the script's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from steadygrad.facts import Cause, GradientTable, Incident, StepRecord
from steadygrad.record import Sink

SHOWN = 5
"""Incidents of one kind that are told in full."""
ABOUT_STEPS = ("nonfinite_loss", "nonfinite_gradient")
"""Kinds that a diagnosis of a step explains."""


class Terminal:
    """A Sink that tells incidents, and lines of its own."""

    def __init__(self, file: TextIO, *, rank: int | None = None) -> None:
        self._file = file
        self._prefix = "steadygrad: " if rank is None else f"steadygrad: rank {rank}: "
        self._told: Counter[str] = Counter()

    def say(self, text: str) -> None:
        """Lines of text; a terminal that is gone is no reason to fail."""
        with contextlib.suppress(OSError, ValueError):
            for line in text.splitlines():
                print(self._prefix + line, file=self._file)
            self._file.flush()

    def write_step(self, record: StepRecord) -> None:
        """Nothing: steps go into the run directory."""

    def write_layers(self, step: int, gradients: GradientTable) -> None:
        """Nothing."""

    def write_incident(self, incident: Incident) -> None:
        """What was found, what was done, who did it, what to do."""
        finding = incident.finding
        self._told[finding.kind] += 1
        if self._told[finding.kind] > SHOWN:
            return
        self.say(f"step {finding.step}: {finding.message} ({incident.outcome.message})")
        if incident.cause is not None:
            self.say(str(incident.cause))
        if finding.advice and self._told[finding.kind] == 1:
            self.say(f"  {finding.advice}")
        if self._told[finding.kind] == SHOWN:
            self.say(f"  (further incidents of the kind {finding.kind} are only counted)")

    def close(self) -> None:
        """Nothing: the terminal is not ours."""


class WithCause:
    """Hands facts on to other sinks; incidents about a step get the cause that was found for it."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self.cause: Cause | None = None

    def write_step(self, record: StepRecord) -> None:
        """On to every sink."""
        for sink in self._sinks:
            sink.write_step(record)

    def write_layers(self, step: int, gradients: GradientTable) -> None:
        """On to every sink."""
        for sink in self._sinks:
            sink.write_layers(step, gradients)

    def write_incident(self, incident: Incident) -> None:
        """On to every sink, the cause once."""
        if incident.finding.kind in ABOUT_STEPS and incident.cause is None and self.cause is not None:
            incident, self.cause = dataclasses.replace(incident, cause=self.cause), None
        for sink in self._sinks:
            sink.write_incident(incident)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()
