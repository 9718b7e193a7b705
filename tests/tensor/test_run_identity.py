"""A run directory knows its run: starts are distinguished, kept apart, and found again."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forks import run_forked
from steadygrad import ConfigError, Guard, GuardConfig, Severity
from steadygrad.cli import main
from steadygrad.config import CheckpointConfig
from steadygrad.record.run_folder import RunFolder
from steadygrad.record.run_lock import RunLock

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")


def make_guard(run_dir: Path, seed: int = 0, **settings: Any) -> tuple[nn.Module, Guard]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    config = GuardConfig(checkpoint=CheckpointConfig(**settings))
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=run_dir, config=config)


def train(model: nn.Module, guard: Guard, num_steps: int) -> list[float]:
    return [guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4)).item() for _ in range(num_steps)]


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]


def read_id(folder: Path) -> str:
    found: str = json.loads((folder / "run.json").read_text(encoding="utf-8"))["id"]
    return found


def list_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}


def steps_on_disk(guard: Guard) -> list[int]:
    return [info.step for info in guard.checkpoints.list()]


# --- one directory, several starts ----------------------------------------------------------------------------------


def test_the_id_of_a_run_is_in_its_record_and_its_checkpoints(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 3)
    guard.save()
    guard.close()
    run = read_id(tmp_path)
    assert len(run) == 8
    assert {line["run"] for line in read_steps(tmp_path)} == {run}
    assert [info.run for info in guard.checkpoints.list()] == [run]


def test_a_used_directory_is_unchanged_until_the_training_is_identified(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 3)
    guard.save()
    guard.close()
    before = list_files(tmp_path)
    _, second = make_guard(tmp_path)
    second.validate(0.5)
    assert list_files(tmp_path) == before
    second.close()
    assert list_files(tmp_path) == before


@pytest.mark.parametrize("num_steps", [21, 40, 110])
def test_a_start_without_resume_keeps_the_checkpoints_of_the_previous_run(
    tmp_path: Path, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, guard = make_guard(tmp_path, every=20)
    train(model, guard, 200)
    guard.close()
    before = steps_on_disk(guard)
    model, second = make_guard(tmp_path, every=20)
    train(model, second, num_steps)
    second.close()
    assert set(before) <= set(steps_on_disk(second))
    new_runs = [finding for finding in second.findings if finding.kind == "new_run"]
    assert [finding.severity for finding in new_runs] == [Severity.INFO]
    assert "guard.resume()" in new_runs[0].advice
    assert second.incidents == []  # these are about training
    assert [r.levelname for r in caplog.records if new_runs[0].message in r.getMessage()] == ["WARNING"]
    assert new_runs[0].message in (tmp_path / "incidents.jsonl").read_text(encoding="utf-8")


def test_a_resume_continues_the_newest_run_and_its_record(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 30)  # no checkpoint
    guard.close()
    first = read_id(tmp_path)
    model, guard = make_guard(tmp_path)
    losses = train(model, guard, 10)
    guard.save()
    train(model, guard, 5)
    guard.close()
    model, guard = make_guard(tmp_path)
    assert guard.resume() == 10
    train(model, guard, 5)
    guard.close()
    lines = read_steps(tmp_path)
    assert [line["step"] for line in lines] == list(range(15))
    assert [line["loss"] for line in lines[:10]] == losses
    assert read_id(tmp_path) not in (first, "")
    assert read_id(tmp_path / "earlier" / "1") == first


def test_a_run_left_by_mistake_can_be_continued(tmp_path: Path) -> None:
    """Restarted without resume(), stopped before its first checkpoint, then resumed."""
    model, guard = make_guard(tmp_path)
    losses = train(model, guard, 12)
    guard.save()
    guard.close()
    first = read_id(tmp_path)
    model, guard = make_guard(tmp_path)
    train(model, guard, 3)
    guard.close()
    second = read_id(tmp_path)
    model, guard = make_guard(tmp_path)
    assert guard.resume() == 12
    train(model, guard, 1)
    guard.close()
    assert read_id(tmp_path) == first
    assert [line["loss"] for line in read_steps(tmp_path)][:12] == losses
    assert second in [read_id(path) for path in (tmp_path / "earlier").iterdir()]


def test_a_resume_before_the_first_checkpoint_restarts_the_same_run(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 7)
    guard.close()
    run = read_id(tmp_path)
    model, guard = make_guard(tmp_path)
    assert guard.resume() is None
    train(model, guard, 4)
    guard.close()
    assert [line["step"] for line in read_steps(tmp_path)] == [0, 1, 2, 3]
    assert read_id(tmp_path) == run
    assert not (tmp_path / "earlier").exists()
    assert "new_run" not in [finding.kind for finding in guard.findings]


def test_a_manually_loaded_state_continues_the_run(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 6)
    state = guard.state_dict()
    train(model, guard, 2)
    guard.close()
    model, guard = make_guard(tmp_path)
    guard.load_state_dict(state)
    train(model, guard, 3)
    guard.close()
    assert [line["step"] for line in read_steps(tmp_path)] == list(range(9))


def test_a_resume_from_another_directory_is_a_new_run(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path / "a")
    train(model, guard, 4)
    guard.save()
    guard.close()
    model, guard = make_guard(tmp_path / "b")
    assert guard.resume(tmp_path / "a") == 4
    train(model, guard, 2)
    guard.close()
    assert [line["step"] for line in read_steps(tmp_path / "b")] == [4, 5]
    assert read_id(tmp_path / "b") != read_id(tmp_path / "a")


def test_a_resume_of_checkpoints_without_an_id_replaces_some_of_them(tmp_path: Path) -> None:
    """They come from a version without ids: the resumed run is the one that saved them."""
    model, guard = make_guard(tmp_path)
    guard.checkpoints.run_id = ""
    train(model, guard, 2)
    for _ in range(3):
        train(model, guard, 1)
        guard.checkpoints.run_id = ""
        guard.save()
    guard.close()
    assert {info.run for info in guard.checkpoints.list()} == {""}
    model, guard = make_guard(tmp_path, every=1)
    assert guard.resume() == 5
    train(model, guard, 20)
    guard.close()
    assert steps_on_disk(guard)[-3:] == [23, 24, 25]
    assert len(steps_on_disk(guard)) <= 5


# --- two guards of one process --------------------------------------------------------------------------------------


def train_in_turn(models: list[nn.Module], guards: list[Guard], num_rounds: int) -> None:
    for _ in range(num_rounds):
        for model, guard in zip(models, guards):
            train(model, guard, 1)


def make_pair(run_dir: Path, **settings: Any) -> tuple[list[nn.Module], list[Guard]]:
    made = [make_guard(run_dir, seed, **settings) for seed in (0, 1)]
    return [model for model, _ in made], [guard for _, guard in made]


@pytest.mark.parametrize("first", [0, 1], ids=["the first made steps first", "the second made steps first"])
def test_two_guards_have_separate_folders_in_one_run(tmp_path: Path, first: int) -> None:
    models, guards = make_pair(tmp_path, every=10)
    order = slice(None) if first == 0 else slice(None, None, -1)
    train_in_turn(models[order], guards[order], 25)
    weights = [model.weight.detach().clone() for model in models]
    for guard in guards:
        guard.save()
        guard.close()
    assert read_id(tmp_path) == read_id(tmp_path / "guard-2")
    assert [len(read_steps(folder)) for folder in (tmp_path, tmp_path / "guard-2")] == [25, 25]

    models, guards = make_pair(tmp_path)
    assert [guard.resume() for guard in guards] == [25, 25]
    assert all(torch.equal(model.weight, weight) for model, weight in zip(models, weights))
    for guard in guards:
        guard.close()


def test_guards_that_step_in_turn_are_saved_after_the_round(tmp_path: Path) -> None:
    models, guards = make_pair(tmp_path, every=10, keep_last=9)
    train_in_turn(models, guards, 35)
    for guard in guards:
        guard.close()
    assert [steps_on_disk(guard) for guard in guards] == [[10, 20, 30], [10, 20, 30]]
    tokens = [[info.manifest.about["together"] for info in guard.checkpoints.list()] for guard in guards]
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) == 3


@pytest.mark.parametrize("lost", [0, 1])
def test_a_kill_between_their_saves_resumes_both_from_the_previous_save(tmp_path: Path, lost: int) -> None:
    models, guards = make_pair(tmp_path, every=10)
    train_in_turn(models, guards, 25)
    for guard in guards:
        guard.close()
    newest = guards[lost].checkpoints.list()[-1].path
    newest.rename(newest.with_name("gone"))
    _, guards = make_pair(tmp_path)
    assert [guard.resume() for guard in guards] == [10, 10]
    for guard in guards:
        guard.close()


def test_saving_one_saves_both_and_saving_twice_saves_once(tmp_path: Path) -> None:
    models, guards = make_pair(tmp_path)
    train_in_turn(models, guards, 3)
    saves = [guard.save() for guard in guards]
    assert [None if save is None else save.wait() is not None for save in saves] == [True, True]
    assert [steps_on_disk(guard) for guard in guards] == [[3], [3]]
    for guard in guards:
        guard.close()


def test_a_report_of_the_directory_shows_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models, guards = make_pair(tmp_path / "gan")
    train_in_turn(models, guards, 3)
    for guard in guards:
        guard.close()
    assert main(["report", str(tmp_path / "gan"), "-o", str(tmp_path / "report.html")]) == 0
    said = capsys.readouterr().out
    assert "gan:" in said
    assert "guard-2:" in said


def test_a_guard_resumed_by_a_later_one_gives_up_its_folder(tmp_path: Path) -> None:
    """A notebook cell that is run again while the old guard still exists."""
    model, old = make_guard(tmp_path)
    train(model, old, 5)
    old.save()
    model, new = make_guard(tmp_path)
    assert new.resume() == 5
    train(model, new, 1)
    new.close()
    assert not (tmp_path / "guard-2").exists()


def test_a_deleted_guard_is_not_counted(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 2)
    guard.me = guard  # type: ignore[attr-defined]  # a circle, which only the collector finds
    del guard
    model, guard = make_guard(tmp_path)
    train(model, guard, 1)
    guard.close()
    assert not (tmp_path / "guard-2").exists()
    assert (tmp_path / "earlier" / "1").is_dir()


# --- the lock -------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, torch
from torch import nn
from steadygrad import Guard
model = nn.Linear(4, 1)
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=sys.argv[1])
guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
print("ready", flush=True)
sys.stdin.readline()
"""


def start_holder(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", HOLDER, str(run_dir)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline().strip() == "ready"
    return program


def test_a_directory_locked_by_another_process_is_refused_and_taken_over_after_its_death(
    tmp_path: Path,
) -> None:
    program = start_holder(tmp_path)
    try:
        before = list_files(tmp_path)
        with pytest.raises(ConfigError, match=rf"process {program.pid} on {socket.gethostname()}.*another run_dir"):
            make_guard(tmp_path)
        assert list_files(tmp_path) == before
    finally:
        program.kill()
        program.communicate()
    model, guard = make_guard(tmp_path)
    train(model, guard, 1)
    guard.close()
    assert not (tmp_path / "run.lock").exists()


def write_lock(folder: Path, **changes: Any) -> None:
    lock = RunLock(folder)
    lock.take()
    text = json.loads(lock.path.read_text(encoding="utf-8"))
    lock.path.write_text(json.dumps({**text, **changes}), encoding="utf-8")


@pytest.mark.parametrize(
    "make_lock",
    [
        lambda folder: write_lock(folder, process=2**22 - 1),
        lambda folder: write_lock(folder, process=os.getppid(), began="another boot:1"),
        lambda folder: write_lock(folder),
        lambda folder: write_lock(folder, host="another-machine", process=1),
        lambda folder: (folder / "run.lock").write_text('{"proc', encoding="utf-8"),
    ],
    ids=["its process is gone", "its number was given again", "our own number", "another host", "cut short"],
)
def test_a_stale_lock_is_taken_over(tmp_path: Path, make_lock: Callable[[Path], Any]) -> None:
    make_lock(tmp_path)
    folder = RunFolder(tmp_path)
    assert json.loads((tmp_path / "run.lock").read_text(encoding="utf-8"))["process"] == os.getpid()
    folder.release()
    assert not (tmp_path / "run.lock").exists()


def test_a_lock_of_a_living_process_is_not_taken_over(tmp_path: Path) -> None:
    write_lock(tmp_path, process=os.getppid(), began=None)
    with pytest.raises(ConfigError, match="is being written by process"):
        RunFolder(tmp_path)


def test_an_unclosed_guard_releases_the_lock_when_deleted(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 1)
    assert (tmp_path / "run.lock").exists()
    del guard
    gc.collect()
    assert not (tmp_path / "run.lock").exists()


def test_a_deleted_guard_releases_the_lock_after_completing_its_record(tmp_path: Path) -> None:
    is_locked = []

    class LastWords:
        def write_step(self, record: Any) -> None: ...
        def write_layers(self, step: int, gradients: Any) -> None: ...
        def write_incident(self, incident: Any) -> None: ...

        def close(self) -> None:
            is_locked.append((tmp_path / "run.lock").exists())

    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path, sinks=[LastWords()])
    guard.step(lambda x: model(x).square().mean(), torch.ones(2, 4))
    del guard
    gc.collect()

    assert is_locked == [True]
    assert not (tmp_path / "run.lock").exists()


# --- a fork ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["exit", "step"])
def test_a_fork_repeats_no_line_and_keeps_the_lock(tmp_path: Path, how: str) -> None:
    code = f"""
import os, sys, torch
from torch import nn
from steadygrad import Guard
torch.set_num_threads(1)
model = nn.Linear(4, 1)
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=sys.argv[1])
for step in range(90):
    guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
    if step == 60:
        child = os.fork()
        if child == 0:
            if {how!r} == "step":
                guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
                guard.close()
            sys.exit(0)
        os.waitpid(child, 0)
        assert os.path.exists(sys.argv[1] + "/run.lock")
guard.close()
"""
    done = run_forked(code, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_steps(tmp_path / "run")] == list(range(90))


def test_a_record_that_cannot_be_moved_aside_is_kept_and_training_continues(tmp_path: Path) -> None:
    model, guard = make_guard(tmp_path)
    train(model, guard, 3)
    guard.close()
    before = list_files(tmp_path)
    (tmp_path / "earlier").write_text("a file where a folder should be", encoding="utf-8")
    model, guard = make_guard(tmp_path)
    train(model, guard, 4)
    guard.close()
    (tmp_path / "earlier").unlink()
    assert list_files(tmp_path) == before
    assert [finding.kind for finding in guard.findings].count("run_directory_lost") == 1
    assert guard.stats()["num_steps"] == 4
