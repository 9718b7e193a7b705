"""Record: one optimizer's run directory, and the lines that are printed when it begins and when it ends.

Closed when the optimizer is freed or the process ends, so it holds no reference to the optimizer. A forked process that
inherits it neither writes nor prints.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from steadygrad.adapters.scripts.messages import Voice, spell_done
from steadygrad.adapters.scripts.places import spell_folder
from steadygrad.config import GuardConfig
from steadygrad.errors import ConfigError
from steadygrad.facts import Cause, Finding, Incident
from steadygrad.judgement import Judgement
from steadygrad.record import Recorder
from steadygrad.record.run_directory import make_record
from steadygrad.record.run_folder import RunFolder
from steadygrad.record.tally import Tally
from steadygrad.words import spell_count

RISEN = ("loss_explosion", "rate_too_high", "unrecovered_loss")
"""Kinds of which a loss far above its earlier level is the sign: an info here, which is not printed when it comes."""
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


class Record:
    """Where one optimizer's steps are written down."""

    def __init__(self, voice: Voice, *, observe: bool, started_in: Path) -> None:
        self._voice, self._observe, self._started_in, self._process = voice, observe, started_in, os.getpid()
        self._held: RunFolder | None = None
        self._ledger: tuple[Tally, list[Finding], list[Incident]] | None = None
        self._finish: weakref.finalize[..., object] | None = None
        self.recorder = Recorder([voice])
        self.folder: Path | None = None
        """The run directory; None when nothing is written."""

    def open(self, folder: Path | None, config: GuardConfig, names: Sequence[str]) -> None:
        """Begin to write there; each start of a script is a separate run. A folder that cannot be used is reported."""
        if folder is None:
            return
        try:
            held = RunFolder(folder)
            # At once: whatever fails below, `_close` must give the lock back.
            self._held = held
            held.settle()
            if held.is_used:
                held.begin_anew()
            sink = make_record(held.path, config, names, run_id=held.run_id)
        except ConfigError as error:
            self._voice.terminal.say(f"no record is written: {error}")
            return
        self.recorder, self.folder = Recorder([sink, self._voice]), held.path

    def follow(self, owner: object, judgement: Judgement) -> None:
        """Finish when `owner` is freed or the process ends."""
        # The judgement itself holds the optimizer.
        self._ledger = (judgement.tally, judgement.findings, judgement.incidents)
        # Also runs at exit, by weakref's own atexit handler. Nothing that `self` holds may lead to `owner`, or it never
        # runs before that.
        self._finish = weakref.finalize(owner, self._close)

    def finish(self) -> None:
        """Close the record and print a summary now."""
        if self._finish is not None:
            self._finish()

    def report_start(self, parameters: Sequence[Tensor], owner: nn.Module) -> None:
        """Print what is guarded and where the record is."""
        size = spell_size(sum(p.numel() for p in parameters))
        whose = "" if type(owner) is nn.Module else f" of {type(owner).__name__}"
        where = "nothing is recorded" if self.folder is None else f"record in {self._spell_folder(self.folder)}"
        tensors = spell_count(len(parameters), "tensor")
        what, but = ("watching", ", nothing is skipped") if self._observe else ("guarding", "")
        name = self._voice.name.removesuffix(whose)
        line = f"{what} {name} ({tensors}, {size}){whose}{but}; {where}"
        self._voice.terminal.say_few("an optimizer begins", line)

    def _spell_folder(self, folder: Path) -> str:
        return spell_folder(folder, self._started_in)

    def _close(self) -> None:
        # A forked process inherits the finalizer, and would close and report its parent's run.
        if os.getpid() != self._process or self._ledger is None:
            return
        self.recorder.close()
        if self._held is not None:
            self._held.release()
        tally, findings, incidents = self._ledger
        steps, found = spell_count(tally.num_steps, "step"), spell_count(len(incidents), "incident")
        cause = spell_cause(incidents)
        terminal = self._voice.terminal
        terminal.add_totals(tally.num_steps, tally.num_skipped, cause, observed=self._observe)
        opened = "" if self.folder is None else f"; steadygrad report {self._spell_folder(self.folder)}"
        what = f"{self._voice.name}: {steps}, {spell_done(tally.num_skipped, observed=self._observe)}, {found}"
        terminal.say_few("an optimizer ends", f"{what}{cause}{spell_rise(findings)}{opened}")


def spell_cause(incidents: Sequence[Incident]) -> str:
    """Return '; step 5: NaN born in aten.div, train.py:14' for the first incident whose cause is known."""
    known = (incident.cause for incident in incidents if incident.cause is not None)
    cause = next((cause for cause in known if cause.phase != "unknown"), None)
    return "" if cause is None else f"; {cause.headline}{_spell_line(cause)}"


def spell_rise(findings: Sequence[Finding]) -> str:
    """Return where the loss first left its range and stayed, which a script may mean to happen; '' if it did not."""
    risen = next((finding for finding in findings if finding.kind in RISEN), None)
    return "" if risen is None else f"; the loss rose far above its earlier level (step {risen.step}), by design or not"


def _spell_line(cause: Cause) -> str:
    if cause.file is None or f"{Path(cause.file).name}:{cause.line}" in cause.headline:
        return ""
    return f" ({Path(cause.file).name}:{cause.line})"


def spell_size(count: int) -> str:
    """Return '10.7M' for a number of elements."""
    for unit, letter in UNITS:
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)
