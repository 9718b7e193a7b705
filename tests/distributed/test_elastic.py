"""torchrun restarts a job whose worker was killed; its result equals that of an undisturbed job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_program import NUM_ROWS, train
from ranked_trainings import assert_same

from steadygrad.testing.ranks import run_ranks

NUM_KILLS = int(os.environ.get("STEADYGRAD_TEST_KILLS", "2"))
"""Number of lost lives, the last one by a rank that hangs; 20 in the long version."""
NUM_EPOCHS = max(4, NUM_KILLS)
"""Enough steps for every life."""

pytestmark = pytest.mark.timeout(900 + 60 * NUM_KILLS)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run directory of a job that torchrun restarted each time it lost a rank."""
    run_dir = tmp_path_factory.mktemp("elastic") / "killed"
    program = Path(__file__).with_name("elastic_program.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--max-restarts", str(NUM_KILLS), "--monitor-interval", "0.1", str(program)]
    command += [str(run_dir), str(NUM_KILLS), str(NUM_EPOCHS)]
    # torchrun's store outlives its workers and keeps addresses of dead ones: use a new one for each life.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            _, errors = process.communicate(timeout=600 + 30 * NUM_KILLS)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its workers, which would survive SIGKILL
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors[-4000:]
    return run_dir


def test_a_job_that_loses_ranks_ends_with_the_weights_of_an_undisturbed_one(disturbed: Path, tmp_path: Path) -> None:
    undisturbed = run_ranks(train, 2, tmp_path / "whole", 0, NUM_EPOCHS)
    for rank in range(2):
        assert_same(torch.load(disturbed / f"final_{rank}.pt"), undisturbed[rank])
    assert len((disturbed / "kills.txt").read_text().splitlines()) == NUM_KILLS
    steps = [json.loads(line)["step"] for line in (disturbed / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(NUM_EPOCHS * NUM_ROWS // 8)), "each step is in the record once"


def test_each_life_is_recorded_and_the_files_name_the_rank_that_hung(disturbed: Path) -> None:
    lives = [_split_lives(disturbed / f"rank_{rank}.jsonl") for rank in range(2)]
    assert [len(life) for life in lives] == [NUM_KILLS + 1] * 2
    victim = int((disturbed / "kills.txt").read_text().splitlines()[-1].split()[1])
    last_seen = [life[NUM_KILLS - 1][-1]["time"] for life in lives]
    assert last_seen[victim] <= last_seen[1 - victim], "the hanging rank wrote its last line before the others"


def _split_lives(path: Path) -> list[list[dict[str, Any]]]:
    lives: list[list[dict[str, Any]]] = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "process" in line:
            lives.append([])
        lives[-1].append(line)
    return lives
