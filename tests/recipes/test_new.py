"""`steadygrad new`: the project runs at once, on one process and on two, goes on, and passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import steadygrad
from steadygrad.cli import main

SOURCE = Path(steadygrad.__file__).parent.parent


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "leaf_counter"
    assert main(["new", "leaf_counter", "--into", str(folder)]) == 0
    return folder


def test_it_runs_at_once_and_goes_on(project: Path) -> None:
    done = call(project, "-m", "leaf_counter", "--quick", "--run-dir", "runs/a")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Training leaf_counter in runs/a" in done.stdout
    assert (project / "runs" / "a" / "report.html").is_file()

    more = call(project, "-m", "leaf_counter", "--resume", "runs/a", "--epochs", "4")
    assert more.returncode == 0, more.stderr[-2000:]
    assert "Resuming at step 42." in more.stdout
    assert "Epoch 4/4" in more.stdout


def test_it_runs_on_two_ranks(project: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = call(project, *launcher, "-m", "leaf_counter", "--quick", "--learning-rate", "1e-9", "--run-dir", "runs/two")

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Training leaf_counter in runs/two") == 1
    assert len((project / "runs" / "two" / "steps.jsonl").read_text().splitlines()) == 21
    assert done.stderr.count("no_better_than_guessing") == 1  # a finding of all ranks is printed by the first


def test_its_own_tests_pass(project: Path) -> None:
    done = call(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_leaf_counter.py")

    assert done.returncode == 0, done.stdout[-2000:]
    assert "3 passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my-training", "Use letters, digits and _: my_training"),
        ("torch", "existing"),
        ("class", "train_class"),
        ("3d", "train_3d"),
        ("__main__", "Use letters, digits and _: main"),
        ("__init__", "Use letters, digits and _: init"),
        ("mine_", "Use letters, digits and _: mine."),
        ("größe", "Use letters, digits and _: gr__e"),
        ("\ufb01t", "Use letters, digits and _: t."),  # a ligature, which Python reads as "fit"
        ("", "Use letters, digits and _: my_training"),
    ],
)
def test_a_name_that_no_package_can_have_is_refused(
    name: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["new", name, "--into", str(tmp_path / "x")]) == 2
    assert words in capsys.readouterr().err


def test_advice_names_the_command_that_runs_it(project: Path) -> None:
    (project / "runs" / "used").mkdir(parents=True)
    (project / "runs" / "used" / "steps.jsonl").write_text("{}\n")

    unknown = call(project, "-m", "leaf_counter", "--unheard-of", "1")
    used = call(project, "-m", "leaf_counter", "--quick", "--run-dir", "runs/used")

    assert "See them: python -m leaf_counter --help." in unknown.stderr
    assert "Continue it with python -m leaf_counter --resume runs/used" in used.stderr


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("")

    assert main(["new", "leaf_counter", "--into", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_folder_of_that_name_is_the_reason_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as python -m does: the project could then be imported from here
    assert main(["new", "leaf_counter"]) == 0

    assert main(["new", "leaf_counter"]) == 2
    assert "leaf_counter exists and is not empty" in capsys.readouterr().err
