"""`steadygrad run` names the line of a bug in the loss: by replaying the script's code, or in a running step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import run_guarded, run_plainly

EMPTY_MASK = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(40):
    x = torch.randn(32, 8)
    mask = (x[:, 0] > 0).float() if step < 10 else torch.zeros(32)
    prediction = model(x).squeeze(-1)
    error = (prediction - x.sum(1)).square() * mask
    x = None  # the next batch
    loss = error.sum() / mask.sum()  # HERE
    losses.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
assert len(losses) == 40
torch.save(model.state_dict(), "w.pt")
"""
IN_FUNCTIONS = """
import torch
from torch import nn

def distance(one, other):
    return (one - other).square().sum(1).sqrt()  # HERE

def compute_loss(model, batch):
    output = model(batch)
    target = output.detach() if batch[0, 0] > 100 else torch.zeros(16, 2)
    return distance(output, target).mean()

def train(model, optimizer, log):
    for step in range(12):
        batch = torch.randn(16, 4)
        if step == 6:
            batch[0, 0] = 101.0
        optimizer.zero_grad()
        for _ in range(2):
            loss = compute_loss(model, batch) / 2
            log.append(step)
            loss.backward()
        optimizer.step()

torch.manual_seed(0)
log = []
model = nn.Linear(4, 2)
train(model, torch.optim.SGD(model.parameters(), lr=0.1), log)
assert len(log) == 24, len(log)
torch.save(model.state_dict(), "w.pt")
"""
USES_UP_DATA = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
divisors = iter([1.0, 2.0, 4.0, 0.0] * 3)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean() / next(divisors)  # HERE
    loss.backward()
    optimizer.step()
assert next(divisors, None) is None
torch.save(model.state_dict(), "w.pt")
"""
NO_MODULE = """
import torch

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
for step in range(12):
    optimizer.zero_grad()
    (weight * (step % 4 != 3)).sqrt().sum().backward()  # HERE
    optimizer.step()
torch.save(weight.detach(), "w.pt")
"""


def run(folder: Path, text: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Return the incidents, and the output."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    done = run_guarded(folder, str(folder / "train.py"), options=options)
    assert done.code == 0, done.err
    return [json.loads(line) for line in (folder / "run" / "incidents.jsonl").read_text().splitlines()], done.err


def find_line(text: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if "# HERE" in line)


@pytest.mark.parametrize(
    ("text", "op", "step"),
    [(EMPTY_MASK, "aten.div", 10), (IN_FUNCTIONS, "aten.sqrt", 6)],
    ids=["in the script", "in functions, with microbatches"],
)
def test_the_first_bad_loss_is_replayed_and_its_line_named(text: str, op: str, step: int, tmp_path: Path) -> None:
    incidents, err = run(tmp_path, text)

    cause = incidents[0]["cause"]
    assert (incidents[0]["finding"]["step"], cause["op"], cause["line"]) == (step, op, find_line(text))
    assert Path(cause["file"]).name == "train.py"
    assert cause["reproducible"].startswith("yes, bit for bit")
    assert f"train.py:{cause['line']}" in err.splitlines()[-1]  # the summary


@pytest.mark.parametrize(
    ("text", "op"),
    [(USES_UP_DATA, "aten.div"), (NO_MODULE, "aten.sqrt")],
    ids=["draws from an iterator", "calls no module"],
)
def test_an_unreplayable_loss_is_named_at_its_second_failure(text: str, op: str, tmp_path: Path) -> None:
    incidents, _ = run(tmp_path, text)

    first, second = [i for i in incidents if i["finding"]["kind"].startswith("nonfinite")][:2]
    assert (first["finding"]["step"], second["finding"]["step"]) == (3, 7)
    assert first["cause"] is None or first["cause"]["line"] is None
    assert (second["cause"]["op"], second["cause"]["line"]) == (op, find_line(text))


@pytest.mark.parametrize("text", [EMPTY_MASK, IN_FUNCTIONS, USES_UP_DATA, NO_MODULE])
def test_searching_for_the_line_changes_no_bit(text: str, tmp_path: Path) -> None:
    run(tmp_path / "observed", text, "--observe")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.py").write_text(text)
    done = run_plainly(tmp_path / "plain", str(tmp_path / "plain" / "train.py"))

    assert done.code == 0, done.err
    mine, theirs = (torch.load(tmp_path / name / "w.pt", weights_only=True) for name in ("observed", "plain"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


BAD_RATE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(12):
    optimizer.param_groups[0]["lr"] = float("nan") if step == 6 else 1e-2
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
assert all(p.isfinite().all() for p in model.parameters())
"""


def test_a_step_with_a_learning_rate_of_nan_is_skipped_and_the_rate_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAD_RATE)
    done = run_guarded(tmp_path, str(tmp_path / "train.py"))

    assert done.code == 0, done.err
    assert "step 6: the learning rate of parameter group 0 is NaN" in done.err


PICKLED = """
import pickle
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    if step == 3:
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    x = torch.randn(16, 4)
    size = torch.zeros(()) if step == 6 else torch.ones(())
    loss = model(x).square().sum() / size  # HERE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_unpickled_model_and_optimizer_are_diagnosed_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PICKLED)
    done = run_guarded(tmp_path, str(script))

    line = 1 + PICKLED[: PICKLED.index("# HERE")].count("\n")
    assert done.code == 0, done.err
    assert f"born in aten.div (train.py:{line})" in done.err.splitlines()[-1]


DROPS_BAD_STEPS = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    CLEAR
    for part in range(2):
        x = torch.randn(8, 4) / (0 if step == 5 and part == 0 else 1)
        model(x).square().mean().backward()
    if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
        continue
    optimizer.step()
torch.save(model.state_dict(), "w.pt")
"""


@pytest.mark.parametrize("clear", ["optimizer.zero_grad()", "model.zero_grad(set_to_none=False)"])
def test_a_step_that_the_script_drops_itself_is_not_part_of_the_next_one(clear: str, tmp_path: Path) -> None:
    text = DROPS_BAD_STEPS.replace("CLEAR", clear)
    incidents, _ = run(tmp_path / "guarded", text)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.py").write_text(text)
    done = run_plainly(tmp_path / "plain", str(tmp_path / "plain" / "train.py"))

    assert done.code == 0, done.err
    assert incidents == []
    mine, theirs = (torch.load(tmp_path / name / "w.pt") for name in ("guarded", "plain"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
