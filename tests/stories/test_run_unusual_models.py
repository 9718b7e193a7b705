"""`steadygrad run` guards models that are compiled by `torch.jit`, or that are made by their first forward."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run_guarded, run_plainly

SCRIPT = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model = MAKE
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(20):
    x = torch.randn(16, 4)
    BAD
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print({name: value.tolist() for name, value in model.state_dict().items()})
print([value.tolist() for state in optimizer.state.values() for value in state.values()])
"""
LAZY = "torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(1))"


@pytest.mark.parametrize("make", ["torch.jit.script(net)", "torch.jit.trace(net, torch.randn(16, 4))", LAZY])
@pytest.mark.parametrize(
    ("alone", "guarded", "end"),
    [
        ("pass", "pass", "20 steps, 0 skipped, no incident"),
        ("if step == 7: continue", "x[3] = float('nan') if step == 7 else x[3]", "20 steps, 1 skipped, 1 incident"),
    ],
)
def test_an_unusual_model_is_guarded(tmp_path: Path, make: str, alone: str, guarded: str, end: str) -> None:
    for name, bad in (("alone.py", alone), ("guarded.py", guarded)):
        (tmp_path / name).write_text(SCRIPT.replace("BAD", bad).replace("MAKE", make))
    plain, ours = run_plainly(tmp_path, str(tmp_path / "alone.py")), run_guarded(tmp_path, str(tmp_path / "guarded.py"))
    assert ours.out == plain.out
    assert f"steadygrad: AdamW: {end}" in ours.err
    assert "NaN loss, already in the input x" in ours.err or "1 skipped" not in end


TWO_PACES = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
often = torch.optim.AdamW(model[0].parameters(), lr=0.01)
seldom = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.01)
for step in range(20):
    x = torch.randn(16, 4)
    BAD
    often.zero_grad()
    seldom.zero_grad()
    model(x).square().mean().backward()
    often.step()
    if step % 3 == 0:
        seldom.step()
print({name: value.tolist() for name, value in model.state_dict().items()})
"""


@pytest.mark.parametrize("bad", [11, 12])
def test_statistics_are_as_before_when_parts_of_a_model_are_stepped_at_different_times(
    tmp_path: Path, bad: int
) -> None:
    (tmp_path / "alone.py").write_text(TWO_PACES.replace("BAD", f"if step == {bad}: continue"))
    (tmp_path / "guarded.py").write_text(TWO_PACES.replace("BAD", f"x[3] = float('nan') if step == {bad} else x[3]"))
    plain = run_plainly(tmp_path, str(tmp_path / "alone.py"))
    ours = run_guarded(tmp_path, str(tmp_path / "guarded.py"))
    assert ours.out == plain.out


GAN = """
import torch
from torch.nn import functional as F
torch.manual_seed(0)

class Gan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.made = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
        self.judge = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

gan = Gan()
maker = torch.optim.AdamW(gan.made.parameters(), lr=0.01)
judge = torch.optim.AdamW(gan.judge.parameters(), lr=0.01)
for step in range(20):
    real, fake = torch.randn(16, 4), gan.made(torch.randn(16, 4))
    bad = step == 11
    if BAD:
        judge.zero_grad()
        (F.softplus(-gan.judge(real)).mean() + F.softplus(gan.judge(fake.detach())).mean()).backward()
        judge.step()
    maker.zero_grad()
    F.softplus(-gan.judge(fake)).mean().backward()
    maker.step()
print({name: value.tolist() for name, value in gan.state_dict().items()})
"""


def test_a_skipped_step_of_one_network_leaves_the_statistics_of_another_that_its_loss_did_not_train(
    tmp_path: Path,
) -> None:
    poison = "real.__setitem__(3, float('nan')) if bad else None"
    (tmp_path / "alone.py").write_text(GAN.replace("if BAD", "if not bad"))
    (tmp_path / "guarded.py").write_text(GAN.replace("    if BAD", f"    {poison}\n    if True"))
    plain = run_plainly(tmp_path, str(tmp_path / "alone.py"))
    ours = run_guarded(tmp_path, str(tmp_path / "guarded.py"))
    assert "1 skipped" in ours.err
    assert ours.out == plain.out
