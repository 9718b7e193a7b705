"""Where a finding's line goes, and when a kind that was held back is told again: each line once, in one place."""

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
    """A clock that has been going for long when the run begins, as `time.monotonic` has."""

    def __init__(self) -> None:
        self.now = 5000.0

    def __call__(self) -> float:
        return self.now


class Teller:
    """A log whose lines go to a file, and what has come out since it was last asked."""

    def __init__(self) -> None:
        self.clock, self._file = Clock(), io.StringIO()
        self._log = logging.Logger("steadygrad.test")
        self._log.addHandler(FindingsHandler(self._file, clock=self.clock))

    def tell(self, finding: Finding, *, times: int = 1) -> list[str]:
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


# --- when -----------------------------------------------------------------------------------------------------------


def test_the_third_line_of_a_kind_says_that_more_are_only_counted() -> None:
    first, second, third = Teller().tell(SPIKE, times=9)
    assert first == second
    assert third == f"{first} (more loss_spike are counted, not printed, for a minute)"


def test_a_kind_is_held_back_for_a_minute_and_then_told_with_how_many_there_were() -> None:
    teller = Teller()
    (line, *_) = teller.tell(SPIKE, times=5)
    teller.clock.now += MINUTE - 0.5
    assert teller.tell(SPIKE) == []
    teller.clock.now += 0.5
    assert teller.tell(SPIKE) == ["(3 more loss_spike in between; all are in the record)", line]


def test_after_a_minute_a_kind_has_its_three_lines_again() -> None:
    teller = Teller()
    teller.tell(SPIKE, times=3)
    teller.clock.now += MINUTE
    lines = teller.tell(SPIKE, times=4)
    assert len(lines) == 3, "none were held back, so none are counted"
    assert lines[0] == lines[1]
    assert lines[2].endswith("for a minute)")


def test_the_minute_of_one_kind_is_not_that_of_another() -> None:
    teller = Teller()
    teller.tell(SPIKE, times=4)
    teller.clock.now += MINUTE / 2
    assert len(teller.tell(DEAD, times=4)) == 3
    teller.clock.now += MINUTE / 2
    assert len(teller.tell(SPIKE)) == 2
    assert teller.tell(DEAD) == []


# --- where ----------------------------------------------------------------------------------------------------------


def test_without_a_file_and_a_bar_lines_go_to_standard_error(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log.addHandler(FindingsHandler())
    log.warning("the disk is full")
    assert capsys.readouterr() == ("", "the disk is full\n")


def test_a_file_gets_its_lines_also_while_a_bar_is_on_the_terminal(log: logging.Logger) -> None:
    file, terminal = io.StringIO(), io.StringIO()
    log.addHandler(FindingsHandler(file))
    with share_with_bar(Console(file=terminal)):
        log.warning("the disk is full")
    assert (file.getvalue(), terminal.getvalue()) == ("the disk is full\n", "")


def test_lines_go_through_the_innermost_bar_and_past_it_when_it_has_ended(
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


def test_a_bar_that_ended_with_an_error_gets_no_more_lines(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    log.addHandler(FindingsHandler())
    with pytest.raises(KeyboardInterrupt), share_with_bar(Console(file=terminal)):
        raise KeyboardInterrupt
    log.warning("stopped")
    assert (terminal.getvalue(), capsys.readouterr().err) == ("", "stopped\n")


def test_a_line_that_cannot_be_written_is_told_by_logging_and_ends_nothing(
    log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.StringIO()
    log.addHandler(FindingsHandler(file))
    file.close()
    log.warning("as text", extra={"finding": SPIKE})
    error = capsys.readouterr().err
    assert error.startswith("--- Logging error ---")
    assert "ValueError: I/O operation on closed file" in error


def test_findings_are_shown_once_and_not_at_all_where_a_program_has_set_up_its_own_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("steadygrad")
    monkeypatch.setattr(logger, "propagate", False)  # away from pytest's own handlers
    monkeypatch.setattr(logger, "handlers", [])
    handler = show_findings()
    assert handler is not None
    assert show_findings() is None
    logger.warning("the disk is full")
    assert capsys.readouterr().err == "the disk is full\n"
    logger.removeHandler(handler)
    logger.addHandler(logging.NullHandler())
    assert show_findings() is None
