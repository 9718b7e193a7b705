"""`steadygrad run` reports the silent mistakes that a Guard reports, in the graph and in the gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import run_guarded

TRAINING = """
import torch
from torch import nn

class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(4, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
#BEFORE
for step in range(12):
    x = torch.randn(32, 4)
    target = x.sum(1, keepdim=True)
    optimizer.zero_grad()
    output = model(x)
    loss = (output - target).square().mean()
    loss.backward()
    optimizer.step()
"""
MISTAKES = {
    "nothing": ("", "", None),
    "no zero_grad": ("    optimizer.zero_grad()\n", "", "stale_gradient"),
    "a broadcast": ("x.sum(1, keepdim=True)", "x.sum(1)", "silent_broadcast"),
    "another model": ("#BEFORE", "model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))", "missing_gradient"),
    "another head": ("#BEFORE", "model[2] = nn.Linear(16, 1)", "unregistered_layers"),
    "LoRA after the optimizer": (
        "#BEFORE",
        "model.requires_grad_(False)\nmodel[0] = Adapted(model[0])",
        "missing_gradient",
    ),
}


@pytest.mark.parametrize(("written", "instead", "kind"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_silent_mistake_is_reported(written: str, instead: str, kind: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING.replace(written, instead) if written else TRAINING)
    done = run_guarded(tmp_path, str(tmp_path / "train.py"))

    assert done.code == 0, done.err
    lines = (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()
    found = [(f["kind"], f["severity"]) for i in map(json.loads, lines) for f in (i["finding"], *i["also"])]
    assert found == ([] if kind is None else [(kind, "warning")])


UNUSUAL_MODES = """
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

class Mine(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(120):
    optimizer.zero_grad()
    with Mine():
        output = model(torch.randn(32, 4))
    with Mine():
        loss = output.square().mean()
        loss.backward()
        if step % 3 == 1:
            optimizer.step()
    if step % 3 != 1:
        optimizer.step()
    assert torch._C._len_torch_function_stack() in (0, 1)
with Mine():
    pass
print("done")
"""


def test_modes_of_the_script_are_unchanged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNUSUAL_MODES)
    done = run_guarded(tmp_path, str(tmp_path / "train.py"))
    assert (done.code, done.out) == (0, "done\n"), done.err
    assert "NOT guarded" not in done.err
