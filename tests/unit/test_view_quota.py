"""Where the line of a finding is printed, and when a suppressed kind is printed again: each line once, in one place."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console
from view_runs import make_incident

from steadygrad.facts import Finding
from steadygrad.view.terminal import FindingsHandler, share_with_bar, show_findings

MINUTE = 60.0
SPIKE, DEAD = (make_incident(3, kind=kind).finding for kind in ("loss_spike", "dead_layer"))


class Clock:
    """A clock that started long before the run, like `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


class Log:
    """A log that writes to a file, and returns what was printed since the last read."""

    def __init__(self) -> None:
        self.clock, self._file = Clock(), io.StringIO()
        self._log = logging.Logger("steadygrad.test")
        self._log.addHandler(FindingsHandler(self._file, clock=self.clock))

    def report(self, finding: Finding, *, times: int = 1) -> list[str]:
        before = len(self._file.getvalue())
        for _ in range(times):
            self._log.warning("as text", extra={"finding": finding})
        return self._file.getvalue()[before:].splitlines()


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.Logger("steadygrad.test")
    yield logger
    for handler in logger.handlers:
        handler.close()


# --- when it is printed ---------------------------------------------------------------------------------------------


def test_the_third_line_of_a_kind_says_that_more_are_only_counted() -> None:
    first, second, third = Log().report(SPIKE, times=9)
    assert first == second
    assert third == f"{first} (more loss_spike are counted, not printed, for a minute)"


def test_a_kind_is_suppressed_for_a_minute_and_then_printed_with_its_count() -> None:
    output = Log()
    (line, *_) = output.report(SPIKE, times=5)
    output.clock.now += MINUTE - 0.5
    assert output.report(SPIKE) == []
    output.clock.now += 0.5
    assert output.report(SPIKE) == ["(3 more loss_spike in between; all are in the record)", line]


def test_after_a_minute_a_kind_gets_three_lines_again() -> None:
    output = Log()
    output.report(SPIKE, times=3)
    output.clock.now += MINUTE
    lines = output.report(SPIKE, times=4)
    assert len(lines) == 3, "none were held back, so none are counted"
    assert lines[0] == lines[1]
    assert lines[2].endswith("for a minute)")


def test_each_kind_has_its_own_minute() -> None:
    output = Log()
    output.report(SPIKE, times=4)
    output.clock.now += MINUTE / 2
    assert len(output.report(DEAD, times=4)) == 3
    output.clock.now += MINUTE / 2
    assert len(output.report(SPIKE)) == 2
    assert output.report(DEAD) == []


# --- where it is printed --------------------------------------------------------------------------------------------


def test_without_a_file_or_a_bar_lines_go_to_standard_error(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.addHandler(FindingsHandler())
    log.warning("the disk is full")
    assert capsys.readouterr() == ("", "the disk is full\n")


def test_a_file_gets_its_lines_even_with_a_bar_on_the_terminal(log: logging.Logger) -> None:
    file, terminal = io.StringIO(), io.StringIO()
    log.addHandler(FindingsHandler(file))
    with share_with_bar(Console(file=terminal)):
        log.warning("the disk is full")
    assert (file.getvalue(), terminal.getvalue()) == ("the disk is full\n", "")


def test_lines_go_through_the_innermost_bar_until_it_ends(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    outer, inner = io.StringIO(), io.StringIO()
    log.addHandler(FindingsHandler())
    with share_with_bar(Console(file=outer)):
        with share_with_bar(Console(file=inner)):
            log.warning("one")
        log.warning("two")
    log.warning("three")
    assert (inner.getvalue(), outer.getvalue(), capsys.readouterr().err) == ("one\n", "two\n", "three\n")


def test_a_bar_that_failed_gets_no_more_lines(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = io.StringIO()
    log.addHandler(FindingsHandler())
    with pytest.raises(KeyboardInterrupt), share_with_bar(Console(file=terminal)):
        raise KeyboardInterrupt
    log.warning("stopped")
    assert (terminal.getvalue(), capsys.readouterr().err) == ("", "stopped\n")


def test_a_line_that_cannot_be_written_is_reported_by_logging_and_stops_nothing(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.StringIO()
    log.addHandler(FindingsHandler(file))
    file.close()
    log.warning("as text", extra={"finding": SPIKE})
    error = capsys.readouterr().err
    assert error.startswith("--- Logging error ---")
    assert "ValueError: I/O operation on closed file" in error


def test_findings_are_shown_once_and_not_at_all_if_the_program_configured_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("steadygrad")
    monkeypatch.setattr(logger, "propagate", False)  # without pytest's handlers
    monkeypatch.setattr(logger, "handlers", [])
    handler = show_findings()
    assert handler is not None
    assert show_findings() is None
    logger.warning("the disk is full")
    assert capsys.readouterr().err == "the disk is full\n"
    logger.removeHandler(handler)
    logger.addHandler(logging.NullHandler())
    assert show_findings() is None
