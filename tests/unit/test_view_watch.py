"""`steadygrad watch`, driven through tmux like a user: it shows the run, follows it, and quits on q."""

from __future__ import annotations

import io
import math
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from view_runs import CAUSE, make_incident, make_step, open_directory, write_run

from steadygrad.cli import main
from steadygrad.view.read.run import open_run
from steadygrad.view.watch import draw_screen

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux on this machine: apt-get install tmux")


class Pane:
    """A terminal of 120 by 40 that runs one program, on a separate tmux server."""

    def __init__(self, command: str) -> None:
        self._folder = (
            tempfile.TemporaryDirectory()
        )  # short, since the path of a socket is limited to about a hundred characters
        script = f"trap : INT; {command}; echo left with $?; cat"  # its last output can still be read
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40", script, check=True)

    def _tmux(self, *arguments: str, check: bool = False) -> str:
        done = subprocess.run(
            ["tmux", "-S", f"{self._folder.name}/tmux", *arguments], capture_output=True, text=True, check=check
        )
        return done.stdout

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    @property
    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def close(self) -> None:
        self._tmux("kill-server")
        self._folder.cleanup()


def wait_until(holds: Callable[[], bool], pane: Pane) -> None:
    """Wait until it holds; the failure message shows the screen."""
    pause = threading.Event()
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, pane.screen
        pause.wait(0.1)


@pytest.fixture
def pane(tmp_path: Path) -> Iterator[Pane]:
    write_run(tmp_path / "run", 450)
    pane = Pane(shlex.join([sys.executable, "-m", "steadygrad", "watch", str(tmp_path / "run")]))
    yield pane
    pane.close()


@needs_tmux
def test_watch_shows_a_run_follows_it_and_quits_on_q(tmp_path: Path, pane: Pane) -> None:
    wait_until(lambda: "Survived." in pane.screen and "blocks.3.mlp.weight" in pane.screen, pane)
    screen = pane.screen
    assert "╮╭─ incidents" in screen, "the two tables are side by side in a pane of 120 columns"
    assert "steps 450" in screen
    assert "█" in screen
    assert "nonfinite_loss" in screen
    assert "incidents: 3" in screen

    directory = open_directory(tmp_path / "run")
    for step in range(450, 500):
        directory.write_step(make_step(step))
    directory.write_step(make_step(500, loss=math.inf, skipped=True))
    directory.write_incident(make_incident(500, kind="a_new_kind"))
    wait_until(lambda: "steps 501" in pane.screen and "a_new_kind" in pane.screen, pane)
    assert "now Inf" in pane.screen
    directory.close()

    assert "left with" not in pane.screen
    pane.press("q")
    wait_until(lambda: "left with 0" in pane.screen, pane)


@needs_tmux
def test_ctrl_c_quits_too(pane: Pane) -> None:
    wait_until(lambda: "Survived." in pane.screen, pane)
    pane.press("C-c")
    wait_until(lambda: "left with 0" in pane.screen, pane)
    assert "Traceback" not in pane.screen


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 40), (120, 40), (60, 24)])
def test_a_screen_fits_its_terminal_and_actions_are_not_cut_off(tmp_path: Path, width: int, height: int) -> None:
    write_run(tmp_path, 450)
    run = open_run(tmp_path).read_all()
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(draw_screen(run, width, height))
    lines = console.export_text().rstrip("\n").split("\n")
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert lines[-1].startswith("╰")  # the last frame is complete
    assert any("loss_divergence  rolled back" in line for line in lines)
    assert not any(line.rstrip(" │").endswith(("largest norm", "at", "skipped", "clipped")) for line in lines[4:8])


def test_sixty_columns_show_the_last_incident_with_its_line_and_complete_titles(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(60):
        directory.write_step(make_step(step, loss=0.00123456 + step * 1e-6, grad_norm=0.0189123 + step))
    directory.write_incident(make_incident(59, cause=CAUSE))
    directory.close()
    console = Console(width=60, height=40, file=io.StringIO(), record=True)
    console.print(draw_screen(open_run(tmp_path).read_all(), 60, 40))
    text = console.export_text()
    assert "gradient norm (log)   now 59.02   0.01891 to 59.02 ─" in text
    assert "NaN gradient, born in the backward of aten.sqrt " in text
    assert "model.py:41  scale = x.var(dim=-1).sqrt() " in text
    assert "nonfinite_loss  skipped " in text


def test_a_loss_jump_does_not_flatten_the_rest(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(60):
        directory.write_step(make_step(step, loss=900.0 if step == 40 else 2.0 - step / 60))
    directory.close()
    console = Console(width=100, height=40, file=io.StringIO(), record=True)
    console.print(draw_screen(open_run(tmp_path).read_all(), 100, 40))
    assert "loss (log)" in console.export_text()


def test_without_a_terminal_it_prints_one_screen(tmp_path: Path) -> None:
    write_run(tmp_path, 450)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    command = [sys.executable, "-m", "steadygrad", "watch", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Survived." in done.stdout
    assert "q quits" not in done.stdout
    assert "\x1b" not in done.stdout
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["empty", "torn"])
def test_an_empty_run_is_shown(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    open_directory(tmp_path).close()
    if name == "torn":
        (tmp_path / "steps.jsonl").write_text('{"step":')
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "Empty." in capsys.readouterr().out


def test_names_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 12, names=["\x1b[31mred", "[bold]w"])
    assert main(["watch", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[bold]w" in shown


def test_a_missing_run_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "There is no" in capsys.readouterr().err


def test_a_stream_that_cannot_encode_the_blocks_shows_question_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", 60)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0
    sys.stdout.flush()
    assert b"steps 60" in raw.getvalue()
