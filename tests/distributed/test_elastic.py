"""torchrun restarts a job whose worker was killed; what it ends with equals the job that nobody disturbed."""

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
"""20 in the long version."""
NUM_EPOCHS = max(4, NUM_KILLS)
"""Enough steps for every life to make some."""


def run_elastically(run_dir: Path, num_kills: int, **settings: str) -> tuple[int, str]:
    """Exit code, and what was said on standard error."""
    program = Path(__file__).with_name("elastic_program.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--max-restarts", str(num_kills), "--monitor-interval", "0.1", str(program)]
    command += [str(run_dir), str(num_kills), str(NUM_EPOCHS)]
    # torchrun's store outlives its workers, and with it the addresses of the dead: a new one for each life.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | settings
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            _, told = process.communicate(timeout=60 + 30 * num_kills)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its workers, which SIGKILL would leave behind
            _, told = process.communicate(timeout=60)
    return process.returncode, told


@pytest.mark.timeout(900)
def test_a_job_whose_ranks_are_killed_finishes_with_the_weights_of_one_that_was_left_alone(tmp_path: Path) -> None:
    code, told = run_elastically(tmp_path / "killed", NUM_KILLS)
    assert code == 0, told[-4000:]
    undisturbed = run_ranks(train, 2, tmp_path / "whole", 0, NUM_EPOCHS)
    for rank in range(2):
        assert_same(torch.load(tmp_path / "killed" / f"final_{rank}.pt"), undisturbed[rank])
    assert len((tmp_path / "killed" / "kills.txt").read_text().splitlines()) == NUM_KILLS
    starts = [line for line in (tmp_path / "killed" / "rank_0.jsonl").read_text().splitlines() if '"process"' in line]
    assert len(starts) == NUM_KILLS + 1, "each life says that it began"
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(NUM_EPOCHS * NUM_ROWS // 8)), "each step stands in the record once"


@pytest.mark.timeout(300)
def test_a_rank_that_hangs_is_replaced_and_its_file_says_which_it_was(tmp_path: Path) -> None:
    run_dir = tmp_path / "hung"
    code, told = run_elastically(run_dir, 1, STEADYGRAD_TEST_HANG="1")
    assert code == 0, told[-4000:]
    undisturbed = run_ranks(train, 2, tmp_path / "whole", 0, NUM_EPOCHS)
    for rank in range(2):
        assert_same(torch.load(run_dir / f"final_{rank}.pt"), undisturbed[rank])
    (victim,) = (int(line.removeprefix("rank ")) for line in (run_dir / "kills.txt").read_text().splitlines())
    lives = [_split_lives(run_dir / f"rank_{rank}.jsonl") for rank in range(2)]
    assert [len(life) for life in lives] == [2, 2], "each rank says that it began, and began again"
    last_seen = [life[0][-1]["time"] for life in lives]
    assert last_seen[victim] <= last_seen[1 - victim], "the rank that stood still was heard last before the others"


def _split_lives(path: Path) -> list[list[dict[str, Any]]]:
    lives: list[list[dict[str, Any]]] = []
    for line in map(json.loads, path.read_text().splitlines()):
        if "process" in line:
            lives.append([])
        lives[-1].append(line)
    return lives
