"""How the record of a real training describes its end: stopped by a signal, halted by the policy, failed, closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steadygrad.view.headline import judge_run
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.state import State

PROGRAM = """
import sys, torch
from steadygrad import Guard, GuardConfig, Policy
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
end = sys.argv[2]
config = GuardConfig(policy=Policy.strict()) if end == "halt" else GuardConfig()
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config=config, run_dir=sys.argv[1])
for step in range(10**9 if end == "signal" else 30):
    x = torch.randn(8, 4)
    if end == "halt" and step == 20:
        x[0] = float("nan")
    guard.step(lambda x: model(x).square().mean(), x)
    if step == 20:
        print("ready", flush=True)
if end == "error":
    raise RuntimeError("no more data")
"""
"""Never closes its guard: the process exits first."""


@pytest.mark.parametrize(
    ("end", "state", "word"),
    [
        ("none", State.FINISHED, "Healthy"),
        ("signal", State.STOPPED, "Stopped"),
        ("error", State.FAILED, "Failed"),
        ("halt", State.HALTED, "Halted"),
    ],
)
def test_the_record_says_how_a_training_ended(tmp_path: Path, end: str, state: State, word: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    with process.stdout as out:
        if end == "signal":
            assert out.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
        out.read()
    code = process.wait()
    assert code == {"none": 0, "signal": 75, "error": 1, "halt": 1}[end]
    run = RunReader(tmp_path / "run").read_all()
    assert run.state is state
    assert judge_run(run).word == word
