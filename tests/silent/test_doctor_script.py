"""`steadygrad doctor SCRIPT`: the first steps of a script, what was checked and what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for i in range(1000):
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    out = model(x)
    loss = F.nll_loss(out.softmax(1), y) if "bug" in sys.argv else F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
"""


def check(tmp_path: Path, *arguments: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "steadygrad", "doctor", "--steps", "24", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)


def test_a_script_with_an_error_is_ended_early_and_told_the_fix(tmp_path: Path) -> None:
    done = check(tmp_path, "train.py", "bug")

    assert done.returncode == 1, done.stderr
    assert "FOUND  the loss, and what feeds it" in done.stdout
    assert "Fix: Use F.cross_entropy on the logits" in done.stdout
    assert "ok     batches and their order" in done.stdout
    assert "-      labels, against tokens" not in done.stdout
    assert "done" not in done.stdout


def test_a_healthy_script_passes_every_check_that_applies(tmp_path: Path) -> None:
    done = check(tmp_path, "--json", "train.py")

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_steps"] == 24
    passed = [check["passed"] for check in told["checks"]]
    assert False not in passed
    assert passed.count(None) == 1  # about ranks, of which there is one


def test_a_script_without_a_step_was_not_checked(tmp_path: Path) -> None:
    done = check(tmp_path, "train.py", script="import torch\n")

    assert done.returncode == 2
    assert "nothing was checked" in done.stdout
