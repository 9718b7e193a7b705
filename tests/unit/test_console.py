"""The console on a narrow terminal, and first messages: no word is broken, nothing is cut off."""

from __future__ import annotations

import io
import re

import pytest

from steadygrad.cli import main
from steadygrad.cli.commands import SECTIONS, steadygrad
from steadygrad.cli.console import Console
from steadygrad.facts import Action, Cause, Finding, Incident, Outcome, Severity, Verdict
from steadygrad_recipes.demo.narration import Narrator
from steadygrad_recipes.demo.words import LEFT

LONG = "   step  120  the learning rate is three hundred times too high for fifteen of the steps that follow it"


class Terminal(io.StringIO):
    """A terminal without colours, 80 columns wide."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def test_a_long_line_breaks_between_words_and_continues_indented(terminal: Terminal) -> None:
    Console(terminal).say(LONG, hang=len(LEFT))
    first, second = terminal.getvalue().splitlines()
    assert len(first) <= 80
    assert second.startswith(LEFT)
    assert second[len(LEFT)] != " "
    assert f"{first} {second.strip()}" == LONG


def test_a_line_continues_below_its_own_beginning_by_default(terminal: Terminal) -> None:
    Console(terminal).say("    " + "word " * 30)
    assert [line[:8] for line in terminal.getvalue().splitlines()] == ["    word", "    word"]


def test_a_path_is_never_broken_so_that_it_can_be_copied(terminal: Terminal) -> None:
    path = "/a" * 60
    Console(terminal).say(f"Report  {path}")
    assert path in terminal.getvalue()


@pytest.mark.parametrize("name", ["model{1}.pt", "{", "w[/b]", "[bold]x[/bold]", "{task.total}"])
def test_a_bar_shows_names_unchanged(terminal: Terminal, name: str) -> None:
    with Console(terminal).track(name, 10) as advance:
        advance(3, f"MiB {name}")

    lines = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", terminal.getvalue()).splitlines()
    assert [line for line in lines if line.startswith(f"{name} ") and line.rstrip().endswith(f"MiB {name}")]


def test_a_file_gets_unbroken_lines_so_that_it_can_be_searched() -> None:
    file = io.StringIO()
    console = Console(file)
    console.say(LONG, hang=14)
    assert file.getvalue() == f"{LONG}\n"
    assert console.width is None


def test_every_command_is_listed_in_one_line_of_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    named = [name for texts in SECTIONS.values() for name in texts]
    assert sorted(named) == sorted(steadygrad.commands)
    assert "..." not in listed.partition("Begin:")[2]
    for texts in SECTIONS.values():
        for name, text in texts.items():
            assert f"  {name} " in listed
            assert len(text) <= 66  # the rest of 80 columns


def test_the_demo_reports_an_incident_within_80_columns(terminal: Terminal) -> None:
    kind, message = "nonfinite_gradient", f"NaN in the gradients of {', '.join(f'blocks.{i}.weight' for i in range(9))}"
    finding = Finding(kind=kind, severity=Severity.ERROR, step=240, message=message, advice="", evidence={})
    incident = Incident(
        step=240,
        finding=finding,
        cause=Cause(
            kind="nan", phase="backward", op="aten.sqrt", explanation="a long reason " * 12, fixes=("x.sqrt()",)
        ),
        verdict=Verdict(action=Action.SKIP, reason=""),
        outcome=Outcome(
            action=Action.SKIP, message="the step was skipped, and no weight was touched by what it had done"
        ),
    )
    with Narrator(Console(terminal)) as teller:
        teller.incident(incident)
        teller.incident(incident)
    assert "\x1b" not in terminal.getvalue()  # NO_COLOR: bold and dim are colours too
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.startswith(LEFT) for line in lines[1:])
    assert sum("why:" in line for line in lines) == 1


def test_a_system_error_names_the_file_and_not_its_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr(steadygrad.commands["plot"], "callback", fail)
    assert main(["plot", "x", "-o", "y.png"]) == 2
    assert capsys.readouterr().err == (
        "Error: /somewhere: Permission denied. Check that the path is right, and that it may be read and written.\n"
    )
