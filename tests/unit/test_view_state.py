"""Whether a run is still going, and how it ended: read from the record alone, with real processes and every ending."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from view_page import read_report, read_text
from view_runs import make_incident, make_step, open_directory, write_run

from steadygrad.cli import main
from steadygrad.facts import Action
from steadygrad.record.run_folder import RunFolder
from steadygrad.view.headline import judge_run
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.state import SILENT_SECONDS, State

UNIT = Path(__file__).parent

PROGRAM = """
import sys, time
from pathlib import Path
from steadygrad.record.run_folder import RunFolder
from view_runs import make_step, open_directory
path = Path(sys.argv[1])
folder = RunFolder(path)
directory = open_directory(path)
def close():
    directory.close()
    folder.release()
for step in range(30):
    directory.write_step(make_step(step))
directory.flush()
print("ready", flush=True)
{end}
"""


def start(path: Path, end: str) -> subprocess.Popen[str]:
    """Start a training in another process that has written thirty steps."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(end=end), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(UNIT), *sys.path])},
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "ready\n"
    return process


def read(path: Path) -> RunReader:
    return RunReader(path).read_all()


def test_a_training_is_running_until_it_is_killed_and_never_healthy(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "time.sleep(600)")
    try:
        assert read(tmp_path / "run").state is State.RUNNING
        assert judge_run(read(tmp_path / "run")).word == "Running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    headline = judge_run(read(tmp_path / "run"))
    assert (read(tmp_path / "run").state, headline.word, headline.tone) == (State.KILLED, "Killed", "bad")
    assert headline.text.startswith("Its process disappeared after step 29: kill -9")
    assert main(["ls", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("end", "state", "expected"),
    [
        ("close()", State.FINISHED, "Healthy."),
        ("try: raise ValueError('no data')\nexcept ValueError: close()", State.FAILED, "ValueError: no data"),
        ("import atexit; atexit.register(close); raise ValueError('no data')", State.FAILED, "ValueError: no data"),
        ("try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: close()", State.STOPPED, "by Ctrl-C after step 29"),
        (
            "from steadygrad.errors import TrainingHalted\n"
            "try: raise TrainingHalted('three rollbacks')\nexcept TrainingHalted: close()",
            State.HALTED,
            "30 steps",
        ),
    ],
    ids=["by itself", "error", "error at exit", "Ctrl-C", "halt"],
)
def test_the_record_contains_how_a_training_ended(tmp_path: Path, end: str, state: State, expected: str) -> None:
    start(tmp_path, end).wait()
    run = read(tmp_path)
    headline = judge_run(run)
    assert run.state is state
    assert expected in f"{headline.word}. {headline.text}"
    assert json.loads((tmp_path / "run.json").read_text())["ended"]["how"] == state


def test_a_live_process_that_writes_nothing_is_stalled(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    directory = open_directory(tmp_path)
    directory.write_step(make_step(0))
    directory.flush()
    assert read(tmp_path).state is State.RUNNING
    long_ago = time.time() - SILENT_SECONDS - 60
    for path in tmp_path.glob("*.jsonl"):
        os.utime(path, (long_ago, long_ago))
    assert read(tmp_path).state is State.STALLED
    assert judge_run(read(tmp_path)).word == "Stalled"
    directory.close()
    folder.release()
    assert read(tmp_path).state is State.FINISHED


def test_slow_steps_are_not_a_stall(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    directory = open_directory(tmp_path)
    for step in range(3):
        directory.write_step(make_step(step, time_seconds=600.0 * step))
    directory.flush()
    long_ago = time.time() - SILENT_SECONDS - 60
    for path in tmp_path.glob("*.jsonl"):
        os.utime(path, (long_ago, long_ago))
    assert read(tmp_path).state is State.RUNNING
    directory.close()
    folder.release()


def test_a_resumed_run_has_the_state_of_its_last_start(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    folder = RunFolder(tmp_path)
    directory = open_directory(tmp_path)
    assert read(tmp_path).state is State.RUNNING
    directory.close()
    folder.release()
    assert read(tmp_path).state is State.FINISHED


def test_a_run_that_continued_after_a_halt_is_not_halted(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    directory.write_incident(make_incident(3, action=Action.HALT))
    for step in range(4):
        directory.write_step(make_step(step))
    directory.close()
    assert read(tmp_path).state is State.HALTED
    directory = open_directory(tmp_path)
    for step in range(4, 60):
        directory.write_step(make_step(step))
    directory.close()
    assert read(tmp_path).state is State.FINISHED


def test_a_record_without_a_state_has_an_unknown_state(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"loss": 1.0}\n')
    assert read(tmp_path).state is State.UNKNOWN
    assert RunReader(tmp_path / "steps.jsonl").read_all().state is State.UNKNOWN


def test_the_page_shows_the_state_and_the_time_of_the_last_write(tmp_path: Path) -> None:
    write_run(tmp_path, 20)
    os.utime(tmp_path / "steps.jsonl", (1_700_000_000, 1_700_000_000))
    for name in ("layers.jsonl", "incidents.jsonl"):
        os.utime(tmp_path / name, (1_600_000_000, 1_600_000_000))
    _, line = read_report(tmp_path).findall(".//div[@data-part='headline']/p")
    assert read_text(line) == "■ finished last written 2023-11-14 22:13:20 UTC"


# --- ls -------------------------------------------------------------------------------------------------------------


def test_the_runs_of_a_folder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "faulty")
    write_run(tmp_path / "runs" / "deep" / "calm", 80, calm=True)
    for name, when in (("faulty", 2e9), ("deep/calm", 1e9)):
        for path in (tmp_path / "runs" / name).glob("*.jsonl"):
            os.utime(path, (when, when))
    assert main(["ls", str(tmp_path / "runs")]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "last", "step", "last", "loss", "incidents", "last", "written"]
    assert first.split()[:3] == ["faulty", "finished", "599"]
    assert second.split()[:3] == ["deep/calm", "finished", "79"]
    assert first.split()[4] == "3"
    assert main(["ls", str(tmp_path / "runs"), "--json", "--sort", "name"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["name"], one["state"], one["num_incidents"]) for one in runs] == [
        ("deep/calm", "finished", 0),
        ("faulty", "finished", 3),
    ]


def test_a_folder_without_runs_and_a_missing_folder_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(tmp_path)]) == 0
    assert "No runs in" in capsys.readouterr().out
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert "There is no folder" in capsys.readouterr().err
