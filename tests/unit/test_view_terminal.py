"""Findings on a terminal: one line each, coloured where possible, limited in number, and without control sequences."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import torch
from view_runs import make_incident, make_step

from steadygrad import Guard
from steadygrad.facts import Finding, Severity
from steadygrad.view.progress import describe_step
from steadygrad.view.sparkline import draw_bars, squeeze
from steadygrad.view.terminal import BURST, WINDOW_SECONDS, FindingsHandler, share_with_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.Logger("steadygrad.test")
    yield logger
    for handler in logger.handlers:
        handler.close()


def log_finding(log: logging.Logger, finding: Finding, outcome: object = None) -> None:
    log.warning("as text", extra={"finding": finding, "outcome": outcome})


INCIDENT = make_incident(7, message="the loss is 12.5 times its median")
LINE = (
    "error step 7 nonfinite_loss: the loss is 12.5 times its median [the step was skipped]. "
    "Add an epsilon before the square root.\n"
)


def test_a_file_gets_one_plain_line(log: logging.Logger) -> None:
    file = io.StringIO()
    log.addHandler(FindingsHandler(file))
    log_finding(log, INCIDENT.finding, INCIDENT.outcome)
    assert file.getvalue() == LINE


def test_a_terminal_gets_the_same_line_in_colour(log: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    log.addHandler(FindingsHandler(file))
    log_finding(log, INCIDENT.finding, INCIDENT.outcome)
    assert file.getvalue().startswith("\x1b[31merror step 7 nonfinite_loss\x1b[0m")
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()) == LINE


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_is_honoured(log: logging.Logger, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    file = Terminal()
    log.addHandler(FindingsHandler(file))
    log_finding(log, INCIDENT.finding, INCIDENT.outcome)
    assert file.getvalue() == LINE


def test_a_repeated_kind_is_counted_and_other_kinds_are_still_printed(log: logging.Logger) -> None:
    file, clock = io.StringIO(), Clock()
    log.addHandler(FindingsHandler(file, clock=clock))
    for step in range(50):
        log_finding(log, make_incident(step, kind="loss_spike").finding)
    log_finding(log, make_incident(50, kind="dead_layer").finding)
    lines = file.getvalue().splitlines()
    assert [("loss_spike:" in line) for line in lines] == [True] * BURST + [False]
    assert "not printed, for a minute" in lines[BURST - 1]

    clock.now = WINDOW_SECONDS + 1
    log_finding(log, make_incident(60, kind="loss_spike").finding)
    assert file.getvalue().splitlines()[BURST + 1].startswith(f"({50 - BURST} more loss_spike")


def test_control_characters_are_escaped(log: logging.Logger) -> None:
    file = io.StringIO()
    log.addHandler(FindingsHandler(file))
    log_finding(log, make_incident(1, message="\x1b[2J\nboo", severity=Severity.CRITICAL).finding)
    log.warning("a name: %s", "\x1b]0;title\x07")
    assert "\x1b" not in file.getvalue()
    assert file.getvalue().count("\n") == 2
    assert r"\x1b[2J\nboo" in file.getvalue()


def test_other_log_records_are_printed_unchanged(log: logging.Logger) -> None:
    file = io.StringIO()
    log.addHandler(FindingsHandler(file))
    log.error("%s failed and is switched off", "RunDirectory")
    assert file.getvalue() == "RunDirectory failed and is switched off\n"


def test_infos_are_only_recorded(log: logging.Logger) -> None:
    file = io.StringIO()
    log.addHandler(FindingsHandler(file))
    log.info("as text", extra={"finding": INCIDENT.finding})
    assert file.getvalue() == ""


def test_a_line_goes_above_a_bar(log: logging.Logger) -> None:
    from rich.console import Console

    file = io.StringIO()
    log.addHandler(FindingsHandler())
    with share_with_bar(Console(file=file, width=20)):
        log_finding(log, INCIDENT.finding, INCIDENT.outcome)
    assert file.getvalue() == LINE


def test_the_bar_shows_loss_norm_rate_and_skips() -> None:
    record = make_step(3, loss=2.5, grad_norm=0.75, learning_rates=(1e-4, 3e-4))
    assert describe_step(record, 2) == "loss=2.5, grad=0.75, lr=0.0003, skipped=2"
    assert describe_step(make_step(3, loss=None, grad_norm=0.75, learning_rates=()), 0) == "grad=0.75, lr=-"
    assert describe_step(None, 0) == ""


def test_a_spike_is_a_full_column_at_any_width() -> None:
    values = [1.0] * 500
    values[250] = 100.0
    rows = draw_bars(values, 20, 3)
    assert [len(row) for row in rows] == [20, 20, 20]
    assert rows[0].count("█") == 1
    assert max(squeeze(values, 7)) == 100.0


def test_bars_of_no_values_are_empty() -> None:
    assert draw_bars([], 10, 3) == []
    assert draw_bars([float("nan")], 10, 3) == []
    assert draw_bars([0.0, 0.0], 10, 1, log=True) == ["▁▁"]


def test_a_formatter_that_writes_every_attribute_as_json_can_write_a_finding() -> None:
    """Like the workers of Ray: an object that json cannot write would fill their logs with tracebacks."""
    model = torch.nn.Linear(2, 1)
    written: list[str] = []

    class Json(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            own = {key: value for key, value in vars(record).items() if key in ("finding", "outcome")}
            written.append(json.dumps(own))

    handler = Json()
    logging.getLogger("steadygrad").addHandler(handler)
    try:
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        guard.step(lambda: model(torch.full((1, 2), torch.nan)).sum())
    finally:
        logging.getLogger("steadygrad").removeHandler(handler)
    assert '{"finding": "nonfinite_loss", "outcome": "skip"}' in written
