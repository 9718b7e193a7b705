"""`steadygrad run`: the first and the last line, the loud one when nothing was guarded, and the exit code by choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import Done, run_guarded, run_plainly

HEALTHY = """
import torch
torch.manual_seed(0)

class Net(torch.nn.Linear):
    pass

model = Net(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.randn(8, 4)
    BAD
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
BAD = HEALTHY.replace("BAD", "x[0] = float('nan') if step == 5 else 1.0")
SWEEP = """
import torch
bad = 0
for trial in range(20):
    torch.manual_seed(trial)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=10 ** -(1 + trial % 4))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for step in range(10):
        x = torch.randn(8, 4)
        if step == 5:
            x[0] = float("nan")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
    bad += not bool(model.weight.isfinite().all())
print("trials with bad weights:", bad)
"""


def run(folder: Path, text: str, *options: str) -> Done:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    return run_guarded(folder, str(folder / "train.py"), options=options)


def test_the_first_line_says_what_is_guarded_and_the_last_one_what_came_of_it(tmp_path: Path) -> None:
    healthy = run(tmp_path / "healthy", HEALTHY.replace("BAD", "pass"))
    assert healthy.err.splitlines() == [
        "steadygrad: guarding AdamW (2 tensors, 5) of Net; record in run",
        "steadygrad: AdamW: 10 steps, 0 skipped, no incident; steadygrad report run",
    ]
    bad = run(tmp_path / "bad", BAD)
    assert bad.err.splitlines()[0] == "steadygrad: guarding AdamW (2 tensors, 5) of Net; record in run"
    last = bad.err.splitlines()[-1]
    assert last.startswith("steadygrad: AdamW: 10 steps, 1 skipped, 1 incident; step 5: NaN")
    assert last.endswith("(train.py:14); steadygrad report run")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import torch", "the script made no torch.optim.Optimizer"),
        ("import torch\ntorch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)", "no optimizer took a step"),
    ],
)
def test_that_nothing_was_guarded_is_said_loudly_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    done = run(tmp_path, text)
    assert (done.code, f"NOTHING WAS GUARDED: {why}" in done.err) == (0, True)
    assert run(tmp_path, text, "--fail-on", "error").code == 1


@pytest.mark.parametrize(
    ("text", "level", "code"),
    [
        (HEALTHY.replace("BAD", "pass"), "warning", 0),
        (BAD, "error", 1),
        (BAD, "critical", 0),
        (f"{BAD}\nraise SystemExit(7)", "error", 7),
        (f"{BAD}\nraise SystemExit(0)", "error", 1),
    ],
)
def test_the_exit_code_tells_of_incidents_when_asked_to(text: str, level: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path, text, "--fail-on", level)
    assert done.code == code, done.err


STARTING = (
    "import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[0].replace('train', 'child')], check=True)\n"
)


def test_incidents_of_started_processes_count_for_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(BAD)
    assert run(tmp_path, STARTING).code == 0
    assert run(tmp_path, STARTING, "--fail-on", "error").code == 1
    (tmp_path / "child.py").write_text(HEALTHY.replace("BAD", "pass"))
    assert run(tmp_path, STARTING, "--fail-on", "error").code == 0


def test_every_trial_of_a_sweep_is_guarded_and_has_a_record_of_its_own(tmp_path: Path) -> None:
    done = run(tmp_path, SWEEP)

    assert (done.code, done.out) == (0, "trials with bad weights: 0\n")
    folders = [tmp_path / "run", *(tmp_path / "run" / f"trial-{number}" for number in range(2, 21))]
    assert all(len((folder / "steps.jsonl").read_text().splitlines()) == 10 for folder in folders)
    last = done.err.splitlines()[-1]
    assert last.startswith("steadygrad: 20 optimizers in all: 200 steps, 20 skipped; step ")
    assert "(train.py:" in last
    assert last.endswith("; steadygrad report run")


UNSEEN = """
import torch

seen, unseen = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
optimizers = [torch.optim.SGD(seen.parameters(), lr=0.1), torch.optim.Adam(unseen.parameters())]
steps = [optimizers[0].step, torch.compile(optimizers[1].step, backend="eager")]
for _ in range(3):
    for model, step in zip((seen, unseen), steps):
        model(torch.randn(8, 4)).square().mean().backward()
        step()
"""


def test_an_optimizer_whose_steps_are_not_seen_is_named_beside_one_that_is_guarded(tmp_path: Path) -> None:
    done = run(tmp_path, UNSEEN)

    assert done.code == 0
    assert "guarding SGD" in done.err
    assert "steadygrad: no step of Adam was seen: if it has trained, it was NOT guarded" in done.err.splitlines()


WARNING = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(8, 4)
    hidden = model(x)
    copied = torch.tensor(x[:, :1])
    turned = torch.randn(2, 3, 4).T
    nothing = hidden.grad
    loss = torch.nn.functional.mse_loss(hidden, x[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_warnings_of_torch_name_the_line_of_the_script_and_come_as_often_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WARNING)
    plain = run_plainly(tmp_path, str(tmp_path / "train.py"))
    guarded = run_guarded(tmp_path, str(tmp_path / "train.py"))

    expected = [line for line in plain.err.splitlines() if "Warning: " in line]
    assert len(expected) == 4
    assert [line for line in guarded.err.splitlines() if "Warning: " in line] == expected


@pytest.mark.parametrize(("code", "how"), [(0, "finished"), (3, "stopped")])
def test_a_script_that_leaves_by_os_exit_has_every_step_on_disk_and_its_last_line(
    code: int, how: str, tmp_path: Path
) -> None:
    done = run(tmp_path, BAD + f"import os\nos._exit({code})\n")

    assert done.code == code
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 10
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ended"]["how"] == how
    assert done.err.splitlines()[-1].startswith("steadygrad: AdamW: 10 steps, 1 skipped, 1 incident; step 5: NaN")


def test_os_exit_hides_neither_that_nothing_was_guarded_nor_the_exit_code_that_was_asked_for(tmp_path: Path) -> None:
    nothing = run(tmp_path / "nothing", "import os, torch\nos._exit(0)\n")
    assert "NOTHING WAS GUARDED: the script made no torch.optim.Optimizer" in nothing.err

    assert run(tmp_path / "bad", BAD + "import os\nos._exit(0)\n", "--fail-on", "error").code == 1
