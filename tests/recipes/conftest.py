"""What the tests of the recipes share: a training killed by SIGKILL at an exact step, and the weights it left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forks import run_forked
from steadygrad.checkpoint import CheckpointStore
from steadygrad.checkpoint.signals import EXIT_CODE

PROGRAM = """
import os, signal, sys
from steadygrad.guard import Guard

make_step = Guard.step

def step(self, *args, **kwargs):
    result = make_step(self, *args, **kwargs)
    if self.num_steps == {at_step} and self.num_microbatches == 0:
        while {number} == signal.SIGKILL and not self.checkpoints.list():
            pass  # the disk is written by a thread; one checkpoint must be there to resume
        os.kill(os.getpid(), {number})
    return result

Guard.step = step
from steadygrad.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.fixture(autouse=True)
def _no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEADYGRAD", raising=False)


@pytest.fixture
def kill_at() -> Callable[[Sequence[str], int], None]:
    """`kill_at(["train", "seo", ...], 30)`: run the command in a process that SIGKILL ends after 30 optimizer steps."""

    def run(arguments: Sequence[str], at_step: int) -> None:
        code = PROGRAM.format(at_step=at_step, arguments=list(arguments), number=int(signal.SIGKILL))
        done = run_forked(code)
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]

    return run


@pytest.fixture
def stop_at() -> Callable[[Sequence[str], int], None]:
    """The same with SIGTERM, which the training answers by a checkpoint and exit code 75."""

    def run(arguments: Sequence[str], at_step: int) -> None:
        done = run_forked(PROGRAM.format(at_step=at_step, arguments=list(arguments), number=int(signal.SIGTERM)))
        assert done.returncode == EXIT_CODE, done.stderr[-3000:]

    return run


@pytest.fixture
def read_weights() -> Callable[[Path], dict[str, Tensor]]:
    """`read_weights(run_dir)`: the model in the newest checkpoint of a run."""

    def read(run_dir: Path) -> dict[str, Tensor]:
        store = CheckpointStore(run_dir / "checkpoints")
        newest = max(store.list(), key=lambda info: info.serial)
        found = store.load(path=newest.path)
        store.close()
        assert found is not None
        weights = found.state["model"]
        assert all(isinstance(value, torch.Tensor) for value in weights.values())
        return weights

    return read
