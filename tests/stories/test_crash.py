"""A training killed at any moment loses no step beyond its last save, and ends with the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NUM_KILLS = 20


def test_a_training_killed_twenty_times_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    program = Path(__file__).with_name("crashes.py")
    command = [sys.executable, str(program), str(tmp_path), str(NUM_KILLS), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num_kills"] == NUM_KILLS
    assert found["num_kills_while_writing"] > NUM_KILLS // 2, "most kills should hit a save"
    assert found["num_restarts_at_another_checkpoint_than_the_newest"] == 0
    assert found["num_restarts_before_a_confirmed_save"] == 0
    assert found["num_set_aside"] == 0, "what a kill leaves is never taken for a checkpoint"
    assert found["num_lives_that_got_further"] > NUM_KILLS // 2
    assert found["weights_equal"]
