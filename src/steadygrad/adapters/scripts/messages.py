"""What `steadygrad run` prints: incidents as they happen and a few lines at the end, on standard error only.

Lines are short, start with `steadygrad:`, and are limited in number: repeats are counted, and recorded in the run
directory. Standard output belongs to the script.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TextIO

from steadygrad.facts import Cause, Incident
from steadygrad.record import Sink

SHOWN = 5
"""Incidents of one kind that are printed in full."""


class Terminal(Sink):
    """A Sink that prints incidents and other lines."""

    def __init__(self, file: TextIO, *, rank: int | None = None) -> None:
        self._file = file
        self._prefix = "steadygrad: " if rank is None else f"steadygrad: rank {rank}: "
        self._told: Counter[str] = Counter()
        self._cause: Cause | None = None

    def say(self, text: str) -> None:
        """Print lines of text; a closed terminal is not an error."""
        with contextlib.suppress(OSError, ValueError):
            for line in text.splitlines():
                print(self._prefix + line, file=self._file)
            self._file.flush()

    def write_incident(self, incident: Incident) -> None:
        """Print what was found, what was done, what caused it, and what to do."""
        finding = incident.finding
        self._told[finding.kind] += 1
        if self._told[finding.kind] > SHOWN:
            return
        self.say(f"{finding.when}: {finding.message} ({incident.outcome.message})")
        if incident.also:
            self.say(f"  also: {'; '.join(other.message for other in incident.also)}")
        if incident.cause is not None and incident.cause is not self._cause:
            self._cause = incident.cause  # shared by all findings of its step
            self.say(str(incident.cause))
        if finding.advice and self._told[finding.kind] == 1:
            self.say(f"  {finding.advice}")
        if self._told[finding.kind] == SHOWN:
            self.say(f"  (further incidents of the kind {finding.kind} are only counted)")
