"""`steadygrad run` on CUDA: fused and foreach optimizers, with and without a loss scaler."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import sys
import torch
from torch import nn

fused, scaled, poison, out = sys.argv[1] == "fused", sys.argv[2] == "scaled", int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
scaler = torch.amp.GradScaler(device, init_scale=1024.0, enabled=scaled)
for step in range(10):
    x = torch.randn(64, 32, device=device)
    if step == poison:
        x[3] = float("nan")
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16, enabled=scaled and device == "cuda"):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
"""


def run(folder: Path, *arguments: str, guarded: bool) -> list[torch.Tensor]:
    """Return the tensors that the script has saved."""
    script, out = folder / "train.py", folder / f"{guarded}-{'-'.join(arguments)}.pt"
    script.write_text(SCRIPT)
    command = ["-m", "steadygrad", "run", "--run-dir", str(out) + ".run"] if guarded else []
    done = subprocess.run(
        [sys.executable, *command, str(script), *arguments, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    leaves = torch.utils._pytree.tree_leaves(torch.load(out, map_location="cpu", weights_only=True))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("scaled", ["scaled", "unscaled"])
@pytest.mark.parametrize("fused", ["fused", "foreach"])
def test_healthy_runs_are_bit_identical_and_a_nan_is_skipped(fused: str, scaled: str, tmp_path: Path) -> None:
    plain = run(tmp_path, fused, scaled, "-1", guarded=False)
    guarded = run(tmp_path, fused, scaled, "-1", guarded=True)
    assert all(torch.equal(one, other) for one, other in zip(guarded, plain, strict=True))

    assert not all(bool(t.isfinite().all()) for t in run(tmp_path, fused, scaled, "4", guarded=False))
    assert all(bool(t.isfinite().all()) for t in run(tmp_path, fused, scaled, "4", guarded=True))
    steps = (tmp_path / f"True-{fused}-{scaled}-4.pt.run" / "steps.jsonl").read_text().splitlines()
    assert [step["step"] for step in map(json.loads, steps) if step["skipped"]] == [4]
