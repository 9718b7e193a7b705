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
        ("import torch", "the script created no torch.optim.Optimizer"),
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
    assert "NOTHING WAS GUARDED: the script created no torch.optim.Optimizer" in nothing.err

    assert run(tmp_path / "bad", BAD + "import os\nos._exit(0)\n", "--fail-on", "error").code == 1


RAISES = """
import torch
torch.manual_seed(0)

class Net(torch.nn.Linear):
    def forward(self, x):
        return torch.sigmoid(super().forward(x.log()))

model = Net(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    x = torch.rand(8, 4) + 0.1
    if step == 5:
        x[3] = -1.0
    out = model(x)
    BAD
    loss = torch.nn.functional.binary_cross_entropy(out, torch.ones(8, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_nan_that_shows_as_an_error_of_the_next_function_is_traced_to_its_line(tmp_path: Path) -> None:
    done = run(tmp_path, RAISES.replace("BAD", "pass"))

    assert done.code == 1
    traceback, _, rest = done.err.partition("RuntimeError: all elements of input should be between 0 and 1\n")
    assert "Traceback" in traceback
    assert "step 5: the step raised RuntimeError: all elements of input" in rest
    assert "born in aten.log" in rest
    assert "train.py:7" in rest.splitlines()[-1]
    assert "1 of 8 in the batch (index 3)" in rest


def test_an_error_that_has_nothing_to_do_with_numbers_is_left_to_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, RAISES.replace("BAD", "{}['key'] if step == 4 else None"))

    assert done.code == 1
    assert done.err.splitlines()[-1] == "steadygrad: AdamW: 4 steps, 0 skipped, no incident; steadygrad report run"


def test_an_optimizer_whose_inner_one_is_guarded_is_not_called_unguarded(tmp_path: Path) -> None:
    """SAM steps an optimizer of its own on the same parameters, and keeps a state of its own."""
    text = """
import torch

class Sharp(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.clone()
        self.inner.step()

model = torch.nn.Linear(4, 1)
optimizer = Sharp(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.second_step()
"""
    assert run(tmp_path, text).err.splitlines() == [
        "steadygrad: guarding SGD (2 tensors, 5) of Linear; record in run",
        "steadygrad: SGD: 3 steps, 0 skipped, no incident; steadygrad report run",
    ]


def test_a_loss_that_rises_slowly_is_not_an_incident(tmp_path: Path) -> None:
    """Without a proof it cannot be known whether it is meant to: here the noise of the targets grows."""
    text = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
for step in range(300):
    x = torch.randn(64, 4)
    noise = (1.0 + step / 200) * torch.randn(64, 1)
    loss = (model(x) - x.sum(1, keepdim=True) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    done = run(tmp_path, text, "--fail-on", "warning")

    assert (done.code, len(done.err.splitlines())) == (0, 2), done.err
