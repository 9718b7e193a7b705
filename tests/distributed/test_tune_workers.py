"""Workers started by torchrun share one search: one study, one result, and nothing is lost with a worker.

Some workers are forks that get torchrun's variables: their rank and their number.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import steadygrad
from forks import start_forked
from steadygrad.tune.ledger import NAME
from steadygrad.tune.write import CONFIG, PAGE, PICTURE

pytest.importorskip("optuna")

PROGRAM = """
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MEETING = Path(os.environ["MEETING"])  # a folder with a pipe: both ends wait for each other
RANK = int(os.environ["RANK"])
# Batches: a range test has at most 100, a trial 12. So rank 0 has reported a trial, and waits for rank 1 to be in one.
MEETS_AT = (113, 1)
calls = 0

def loss_fn(output, target):
    global calls
    calls += 1
    seen = MEETING / f"seen_{RANK}"
    if calls == MEETS_AT[RANK] and not seen.exists():
        seen.touch()
        open(MEETING / "pipe", "rw"[RANK]).close()
    if RANK == 1 and calls == 14 and (MEETING / "kill").exists():
        (MEETING / "kill").unlink()  # in its second trial of twelve steps
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.mse_loss(output, target)

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(96, 6)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, loader
"""
NUM_TRIALS = 12
"""More trials than rank 0 makes before its 113th batch."""
TUNE = [
    "-m",
    "steadygrad",
    "tune",
    "train.py:make",
    "--search",
    "lr,clip",
    "--trials",
    str(NUM_TRIALS),
    "--steps",
    "12",
]


class Workers:
    """A folder with the program, a meeting point, and torchrun."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.meeting = folder, folder / "meeting"
        self.meeting.mkdir()
        os.mkfifo(self.meeting / "pipe")

    def start(self, *arguments: str, folder: str = ".") -> subprocess.Popen[str]:
        """Start one torchrun in a separate working folder."""
        there = self.folder / folder
        there.mkdir(exist_ok=True)
        (there / "train.py").write_text(PROGRAM)
        source = str(Path(steadygrad.__file__).parent.parent)
        env = {**os.environ, "MEETING": str(self.meeting), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *arguments]
        return subprocess.Popen(
            command, cwd=there, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self) -> tuple[int, str]:
        """Run two workers on this machine with torchrun; return exit code and output."""
        started = self.start("--standalone", "--nproc-per-node", "2", *TUNE, "--run-dir", "out")
        return wait_for(started)

    def run_forked(self) -> tuple[int, str]:
        """Run the same two workers without torchrun."""
        (self.folder / "train.py").write_text(PROGRAM)
        code = "import sys; from steadygrad.cli import main; sys.exit(main(sys.argv[1:]))"
        started = [
            start_forked(
                code,
                *TUNE[2:],
                "--run-dir",
                "out",
                folder=self.folder,
                environment={"MEETING": str(self.meeting), "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
            )
            for rank in "01"
        ]
        ends = [one.wait() for one in started]
        return max(end.returncode for end in ends), "\n".join(end.stdout + end.stderr for end in ends)


def wait_for(started: subprocess.Popen[str]) -> tuple[int, str]:
    with started:
        try:
            printed, _ = started.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            started.send_signal(signal.SIGTERM)  # it ends its workers, which would survive SIGKILL
            printed, _ = started.communicate(timeout=60)
    return started.returncode, printed


def load_study(storage: Any) -> Any:
    import optuna

    return optuna.load_study(study_name="steadygrad", storage=storage)


def read_numbers(printed: str) -> dict[str, list[int]]:
    """Return worker -> the trials that it reported as done."""
    done: dict[str, list[int]] = {"0": [], "1": []}
    for rank, number in re.findall(r"^(?:Rank (\d): )?Trial (\d+):", printed, re.MULTILINE):
        done[rank or "0"].append(int(number))
    return done


def assert_shared(printed: str, study: Any) -> None:
    """Assert that both did trials, each trial was done once, and one worker has chosen and written."""
    done = read_numbers(printed)
    assert done["0"], printed
    assert done["1"], printed
    finished = [trial.number for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    assert sorted(done["0"] + done["1"]) == finished
    assert NUM_TRIALS <= len(finished) <= NUM_TRIALS + 1, "both may ask for the last one"
    assert len({trial.user_attrs["worker"] for trial in study.trials}) == 2
    assert printed.count("Range test:") == 1
    assert printed.count("Written:") == 1
    assert "Rank 1: Written" not in printed


def test_a_search_with_a_killed_worker_continues_with_the_same_command(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    (workers.meeting / "kill").touch()
    code, printed = workers.run()
    assert code != 0, printed
    assert all(read_numbers(printed).values()), "both have done trials"
    assert printed.count("Range test:") == 1
    assert not (tmp_path / "out" / CONFIG).exists()
    storage = f"sqlite:///{tmp_path}/out/tune.db"
    before = {t.number: t.values for t in load_study(storage).trials if t.state.is_finished()}
    abandoned = [t.number for t in load_study(storage).trials if t.state.name == "RUNNING"]
    assert before
    assert abandoned

    code, printed = workers.run_forked()
    assert code == 0, printed
    trials = load_study(storage).trials
    assert {t.number: t.values for t in trials if t.number in before} == before
    assert [trials[number].state.name for number in abandoned] == ["FAIL"] * len(abandoned)
    finished = [t.number for t in trials if t.state.name in ("COMPLETE", "PRUNED")]
    assert NUM_TRIALS <= len(finished) <= NUM_TRIALS + 1
    assert "Range test:" not in printed, "what was finished is not done again"
    assert printed.count("Written:") == 1
    assert "Rank 1: Written" not in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [CONFIG, PAGE, PICTURE, NAME, "tune.db"]
    )
    assert yaml.safe_load((tmp_path / "out" / CONFIG).read_text())["lr"] > 0


def test_workers_on_two_machines_share_only_the_storage(tmp_path: Path) -> None:
    import optuna

    workers = Workers(tmp_path)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    tune = [*TUNE, "--run-dir", "out", "--storage", f"journal:{tmp_path}/tune.log"]
    started = [workers.start(*nodes, "--node-rank", rank, *tune, folder=f"machine_{rank}") for rank in "01"]
    ends = [wait_for(one) for one in started]
    assert [code for code, _ in ends] == [0, 0], ends
    backend = optuna.storages.journal.JournalFileBackend(f"{tmp_path}/tune.log")
    assert_shared("\n".join(printed for _, printed in ends), load_study(optuna.storages.JournalStorage(backend)))
    assert (tmp_path / "machine_0" / "out" / CONFIG).exists()
    assert not (tmp_path / "machine_1" / "out").exists(), "only rank 0 writes"
