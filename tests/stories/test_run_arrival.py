"""`steadygrad run` notices torch whichever import loads it first, and however often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.randn(8, 4)
    if step == 5:
        x[0] = float("nan")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print("weights finite:", bool(model.weight.isfinite().all()))
"""
FIRST = {
    "nothing": "",
    "find_spec": "import importlib.util; importlib.util.find_spec('torch'); importlib.util.find_spec('torch')",
    "transformers": "import transformers",
    "datasets": "import datasets",
    "accelerate": "from accelerate import logging",
    "lightning": "import lightning",
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_a_script_is_guarded_whatever_it_imports_before_torch(first: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(first + TRAINING)
    command = [sys.executable, "-m", "steadygrad", "run", "--run-dir", "run", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, "weights finite: True\n"), done.stderr
    assert "step 5: the loss is NaN (the step was skipped" in done.stderr


RETRYING = """
import sys
sys.path.insert(0, "broken")
try:
    import torch
except RuntimeError as error:
    print(error)
sys.path.remove("broken")
"""


def test_an_import_that_first_failed_is_guarded(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise RuntimeError('not yet')\n")
    (tmp_path / "train.py").write_text(RETRYING + TRAINING)
    command = [sys.executable, "-m", "steadygrad", "run", "--run-dir", "run", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, "not yet\nweights finite: True\n"), done.stderr
