"""Ray Train: a guarded TorchTrainer of two workers, one of them killed, ends with the weights of an undisturbed one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parent / "ray_program.py"


def train(folder: Path, *how: str) -> list[dict[str, Any]]:
    folder.mkdir()
    environment = os.environ | {"RAY_DISABLE_METRICS_COLLECTION": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *how], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "not JSON serializable" not in done.stdout + done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (pip install 'ray[train]')")
def test_a_killed_worker_is_resumed_to_the_weights_of_an_undisturbed_job(tmp_path: Path) -> None:
    undisturbed, killed = train(tmp_path / "undisturbed"), train(tmp_path / "killed", "kill")
    assert (tmp_path / "killed" / "killed").exists()
    for one, other in zip(undisturbed, killed):
        assert (one["start"], other["start"]) == (0, 10)
        assert one["stats"]["num_skipped"] == other["stats"]["num_skipped"] == 1
        assert all(map(torch.equal, one["weights"], other["weights"]))
