"""Findings -> one coloured line each on standard error, with numbers and advice; plain text for files.

A `logging.Handler` for the logger `steadygrad`. A record that carries `finding` (and `outcome`) is formatted as one;
any other is printed as it is. Findings of one kind are printed a few times, then only counted: a run that spikes at
every step must not bury everything else. It never wraps a line, so that a plain log can be searched, and leaves its own
failures to logging.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from steadygrad.facts import Action, Finding, Outcome, Severity
from steadygrad.facts.carried import open_carried
from steadygrad.words import make_printable

if TYPE_CHECKING:
    from rich.console import Console

COLORS = {Severity.INFO: "36", Severity.WARNING: "33", Severity.ERROR: "31", Severity.CRITICAL: "1;31"}
"""ANSI colours: cyan, yellow, red, bold red."""
BURST = 3
"""Number of lines of one kind before they are only counted."""
WINDOW_SECONDS = 60.0
"""A kind may be printed again this long after its last line, or since its first."""

_bars: list[Console] = []  # progress bars on the terminal now: lines must be printed through them, or the bars break


def describe_finding(finding: Finding, outcome: Outcome | None = None, *, whose: str = "", color: bool = False) -> str:
    """Format one line: whose ('Generator: '), step, kind, what was found, what was done, what to change."""
    label = f"{finding.severity.value} {whose}{finding.when} {finding.kind}"
    did = "" if outcome is None or outcome.action is Action.NONE else f" [{outcome.message}]"
    text = f": {finding.message}{did}"
    advice = f" {finding.advice}" if finding.advice else ""
    # Before the colours are added, which are escape sequences themselves
    label, text, advice = map(make_printable, (label, text, advice))
    if not color:
        return f"{label}{text}.{advice}"
    return f"\x1b[{COLORS[finding.severity]}m{label}\x1b[0m{text}.\x1b[2m{advice}\x1b[0m"


@dataclass
class _Quota:
    since: float
    shown: int = 0
    held_back: int = 0


class FindingsHandler(logging.Handler):
    """Writes findings to a terminal or a file; `clock` is for tests."""

    def __init__(
        self, file: TextIO | None = None, *, level: int = logging.WARNING, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(level)
        self._file, self._clock = file, clock
        self._quotas: dict[str, _Quota] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Print a finding, or any other record of the logger."""
        try:
            finding = open_carried(getattr(record, "finding", None))
            if not isinstance(finding, Finding):
                for line in record.getMessage().splitlines():
                    self._write(make_printable(line))
                return
            outcome, whose = open_carried(getattr(record, "outcome", None)), str(getattr(record, "whose", ""))
            for line in self._take(finding, outcome, whose):
                self._write(line)
        except Exception:  # logging's contract: a handler never raises into the program
            self.handleError(record)

    def _take(self, finding: Finding, outcome: Any, whose: str) -> Iterator[str]:
        """Yield the lines to write now: none while the kind is held back, two after some were."""
        now = self._clock()
        # No lock: logging calls emit under the handler's own
        key = f"{whose}{finding.kind}"
        quota = self._quotas.setdefault(key, _Quota(now))
        if now - quota.since >= WINDOW_SECONDS:
            if quota.held_back:
                kind = make_printable(finding.kind)
                yield f"({make_printable(whose)}{quota.held_back} more {kind} in between; all are in the record)"
            quota = self._quotas[key] = _Quota(now)
        if quota.shown >= BURST:
            quota.held_back += 1
            return
        quota.shown += 1
        line = describe_finding(finding, outcome, whose=whose, color=self._is_colored())
        last = quota.shown == BURST
        yield line + (f" (more {make_printable(finding.kind)} are counted, not printed, for a minute)" if last else "")

    def _is_colored(self) -> bool:
        return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and self._stream.isatty()

    @property
    def _stream(self) -> TextIO:
        # Looked up at each line: notebooks and pytest replace sys.stderr
        return sys.stderr if self._file is None else self._file

    def _write(self, line: str) -> None:
        if _bars and self._file is None:
            from rich.text import Text

            # As Text: in a plain string rich would read [...] as markup
            _bars[-1].print(Text.from_ansi(line), soft_wrap=True)
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        # A terminal in ASCII or cp1252 cannot show every character, and must not cost the line
        print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


@contextlib.contextmanager
def share_with_bar(console: Console) -> Iterator[None]:
    """Write lines above the progress bar while it is on the terminal."""
    _bars.append(console)
    try:
        yield
    finally:
        _bars.remove(console)


def show_findings(*, level: int = logging.WARNING) -> FindingsHandler | None:
    """Add a handler to the logger `steadygrad`, once; return None if logging is already set up."""
    logger = logging.getLogger("steadygrad")
    if logger.hasHandlers():  # asks the root logger too: a program's own setup wins
        return None
    handler = FindingsHandler(level=level)
    logger.addHandler(handler)
    return handler
