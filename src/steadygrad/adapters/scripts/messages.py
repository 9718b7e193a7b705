"""What `steadygrad run` prints: incidents as they happen and a few lines at the end, on standard error only.

Lines are short, start with `steadygrad:`, and are limited in number: repeats are counted, and recorded in the run
directory. Standard output belongs to the script.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from typing import TextIO

from steadygrad.adapters.scripts.places import find_rank
from steadygrad.facts import Action, Cause, Incident, Severity
from steadygrad.facts.kinds import find_kind
from steadygrad.record import Sink
from steadygrad.words import spell_count

SHOWN = 5
"""Incidents of one kind that are printed in full."""


class Terminal(Sink):
    """A Sink that prints incidents and other lines."""

    def __init__(self, file: TextIO, *, is_child: bool = False) -> None:
        """`is_child`: the script has started this process; its lines say so unless it is a rank."""
        self._file, self._is_child = file, is_child
        self._told: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._cause: Cause | None = None
        self._known_causes: dict[tuple[str | int | None, ...], int] = {}  # identity -> step where it was first printed
        self._first_cause = ""
        self.worst: Severity | None = None
        """The worst severity of all incidents."""

    def say(self, text: str) -> None:
        """Print lines of text; a closed terminal is not an error."""
        prefix = self._name_process()
        # OSError: a pipe whose reader has ended. ValueError: the script has closed stderr.
        with contextlib.suppress(OSError, ValueError):
            lines = [f"{prefix}{line}\n" for line in text.splitlines()]
            self._file.write("".join(lines))  # in one piece: other ranks write to the same terminal
            self._file.flush()

    def say_loudly(self, text: str) -> None:
        """Print a line that should not be overlooked: in bold on a terminal."""
        with contextlib.suppress(OSError, ValueError):
            is_terminal = self._file.isatty()
            self.say(f"\x1b[1m{text}\x1b[0m" if is_terminal else text)

    def say_once(self, text: str) -> None:
        """Print a warning loudly, the first time."""
        self._told[text] += 1
        if self._told[text] == 1:
            self.say_loudly(text)

    def say_few(self, kind: str, text: str) -> None:
        """Print a line loudly; of each kind only the first few."""
        self._told[kind] += 1
        if self._told[kind] <= SHOWN:
            self.say_loudly(text)
        if self._told[kind] == SHOWN + 1:
            self.say(f"  (more lines of this kind are left out: {kind})")

    def add_totals(self, num_steps: int, num_skipped: int, cause: str, *, observed: bool = False) -> None:
        """Count what one optimizer did; keep the first `cause` of a bad step. `observed`: nothing could be skipped."""
        self._totals.update(optimizers=1, steps=num_steps, skipped=num_skipped, observed=observed)
        self._first_cause = self._first_cause or cause

    def report_totals(self, opened: str) -> None:
        """Print the totals if the lines of some optimizers were left out. `opened`: how to open the report, or ''."""
        total = self._totals
        if total["optimizers"] > SHOWN:
            steps = spell_count(total["steps"], "step")
            done = spell_done(total["skipped"], observed=total["observed"] > 0)
            what = f"{total['optimizers']} optimizers in all: {steps}, {done}"
            self.say_loudly(f"{what}{self._first_cause}{opened}")

    def _name_process(self) -> str:
        rank = find_rank()
        if rank is not None:
            return f"steadygrad: rank {rank}: "
        return f"steadygrad: process {os.getpid()}: " if self._is_child else "steadygrad: "

    def write_incident(self, incident: Incident, whose: str = "") -> None:
        """Print what was found, what was done, what caused it, and what to do. `whose`: 'Adam: ', or ''."""
        finding = incident.finding
        self._told[finding.kind] += 1
        if self.worst is None or finding.severity.rank > self.worst.rank:
            self.worst = finding.severity
        if self._told[finding.kind] > SHOWN:
            return
        self.say(f"{whose}{finding.when}: {finding.message}{_spell_outcome(incident)}")
        if incident.also:
            self.say(f"  also: {'; '.join(other.message for other in incident.also)}")
        if incident.cause is not None and incident.cause is not self._cause:
            self._cause = incident.cause  # shared by all findings of its step
            self.say(f"{whose}{self._spell_cause(incident.cause, finding.step)}")
        if finding.advice and self._told[finding.kind] == 1:
            self.say(f"  {finding.advice}")
        if self._told[finding.kind] == SHOWN:
            self.say(f"  (further {finding.kind} incidents are only counted)")

    def _spell_cause(self, cause: Cause, step: int) -> str:
        """Return the cause in full, or in a line if the same bug was printed before."""
        first = self._known_causes.setdefault(cause.identity, step)
        return str(cause) if first == step else cause.refer_to(first)


class Voice(Sink):
    """One optimizer's lines on a Terminal: they begin with its name while others live beside it."""

    def __init__(self, terminal: Terminal, name: str, *, has_others: Callable[[], bool]) -> None:
        self.terminal, self.name, self._has_others = terminal, name, has_others

    @property
    def _whose(self) -> str:
        return f"{self.name}: " if self._has_others() else ""

    def say_loudly(self, text: str) -> None:
        """Print a line that should not be overlooked."""
        self.terminal.say_loudly(f"{self._whose}{text}")

    def say_few(self, kind: str, text: str) -> None:
        """Print a line loudly; of each kind only the first few."""
        self.terminal.say_few(kind, f"{self._whose}{text}")

    def write_incident(self, incident: Incident) -> None:
        """Print an incident."""
        self.terminal.write_incident(incident, self._whose)


def spell_done(num_skipped: int, *, observed: bool) -> str:
    """Return what was done to the steps: '3 skipped'."""
    return "only observed" if observed else f"{num_skipped} skipped"


def _spell_outcome(incident: Incident) -> str:
    """Return what was done, in parentheses; empty for a mere report, but never silent about a bad step."""
    if incident.outcome.action is not Action.NONE:
        return f" ({incident.outcome.message})"
    is_of_step = any(find_kind(finding.kind).about_step for finding in (incident.finding, *incident.also))
    return " (the step was taken anyway)" if is_of_step else ""
