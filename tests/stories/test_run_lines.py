"""`steadygrad run`: the first and the last line, the warning when nothing was guarded, and the optional exit code."""

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


def test_the_first_line_says_what_is_guarded_and_the_last_one_the_result(tmp_path: Path) -> None:
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


def test_a_repeated_cause_takes_one_line_that_refers_to_the_first(tmp_path: Path) -> None:
    again = HEALTHY.replace("BAD", "x[0] = float('nan') if step in (5, 6, 7) else 1.0")
    lines = run(tmp_path, again).err.splitlines()
    assert sum("train.py:14   " in line for line in lines) == 1
    assert [line for line in lines if "the same cause as at step 5" in line] == [
        f"steadygrad: step {step}: NaN loss, already in the input x, train.py:14: the same cause as at step 5"
        for step in (6, 7)
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import torch", "the script created no torch.optim.Optimizer"),
        ("import torch\ntorch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)", "no optimizer took a step"),
    ],
)
def test_an_unguarded_run_is_reported_prominently_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
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
def test_the_exit_code_reports_incidents_if_requested(text: str, level: str, code: int, tmp_path: Path) -> None:
    done = run(tmp_path, text, "--fail-on", level)
    assert done.code == code, done.err


STARTING = (
    "import subprocess, sys\nsubprocess.run([sys.executable, sys.argv[0].replace('train', 'child')], check=True)\n"
)


def test_incidents_of_child_processes_count_for_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(BAD)
    assert run(tmp_path, STARTING).code == 0
    assert run(tmp_path, STARTING, "--fail-on", "error").code == 1
    (tmp_path / "child.py").write_text(HEALTHY.replace("BAD", "pass"))
    assert run(tmp_path, STARTING, "--fail-on", "error").code == 0


def test_every_trial_of_a_sweep_is_guarded_and_recorded_separately(tmp_path: Path) -> None:
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


def test_an_optimizer_with_unseen_steps_is_named_next_to_a_guarded_one(tmp_path: Path) -> None:
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


def test_warnings_of_torch_name_the_line_of_the_script_and_appear_as_often_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WARNING)
    plain = run_plainly(tmp_path, str(tmp_path / "train.py"))
    guarded = run_guarded(tmp_path, str(tmp_path / "train.py"))

    expected = [line for line in plain.err.splitlines() if "Warning: " in line]
    assert len(expected) == 4
    assert [line for line in guarded.err.splitlines() if "Warning: " in line] == expected


@pytest.mark.parametrize(("code", "how"), [(0, "finished"), (3, "stopped")])
def test_a_script_that_calls_os_exit_has_every_step_and_its_last_line_on_disk(
    code: int, how: str, tmp_path: Path
) -> None:
    done = run(tmp_path, BAD + f"import os\nos._exit({code})\n")

    assert done.code == code
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 10
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ended"]["how"] == how
    assert done.err.splitlines()[-1].startswith("steadygrad: AdamW: 10 steps, 1 skipped, 1 incident; step 5: NaN")


def test_os_exit_hides_neither_the_unguarded_warning_nor_the_requested_exit_code(tmp_path: Path) -> None:
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


def test_a_nan_that_makes_a_later_function_raise_is_traced_to_its_line(tmp_path: Path) -> None:
    done = run(tmp_path, RAISES.replace("BAD", "pass"))

    assert done.code == 1
    traceback, _, rest = done.err.partition("RuntimeError: all elements of input should be between 0 and 1\n")
    assert "Traceback" in traceback
    assert "step 5: the step raised RuntimeError: all elements of input" in rest
    assert "born in aten.log" in rest
    assert "train.py:7" in rest.splitlines()[-1]
    assert "1 of 8 in the batch (index 3)" in rest


def test_an_error_unrelated_to_numbers_keeps_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, RAISES.replace("BAD", "{}['key'] if step == 4 else None"))

    assert done.code == 1
    assert done.err.splitlines()[-1] == "steadygrad: AdamW: 4 steps, 0 skipped, no incident; steadygrad report run"


def test_an_optimizer_with_a_guarded_inner_one_is_not_reported_as_unguarded(tmp_path: Path) -> None:
    """SAM steps its inner optimizer on the same parameters, and keeps its own state."""
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


RISES = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-1)
for step in range(300):
    x = torch.randn(64, 4)
    CHANGE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
NOISE = (
    "noise = (1.0 + step / 200) * torch.randn(64, 1); "
    "loss = (model(x) - x.sum(1, keepdim=True) - noise).square().mean()"
)
GROWTH = "loss = (model(x) - (1.0 + step / 10) * x.sum(1, keepdim=True)).square().mean()"
"""The targets of docs/rising-loss.md, which grow forever."""
ODD_BATCH = (
    "noise = torch.randn(64, 1) * (100.0 if step == 200 else 1.0); "
    "loss = (model(x) - x.sum(1, keepdim=True) - noise).square().mean()"
)


@pytest.mark.parametrize(
    ("change", "rate", "is_told"), [(NOISE, "1e-1", False), (GROWTH, "1e-2", True), (ODD_BATCH, "1e-1", False)]
)
def test_a_rising_loss_is_not_an_incident_if_damage_cannot_be_proven(
    change: str, rate: str, is_told: bool, tmp_path: Path
) -> None:
    """It may be intended: noise or targets grow, or a batch is unlike the others."""
    text = RISES.replace("CHANGE", change).replace("1e-1", rate)
    done = run(tmp_path, text, "--fail-on", "warning")

    assert (done.code, len(done.err.splitlines())) == (0, 2), done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("steadygrad: Adam: 300 steps, 0 skipped, no incident; ")
    assert ("the loss rose far above its earlier level (step 1), by design or not" in last) == is_told


OFTEN = HEALTHY.replace("BAD", "x[0] = float('nan') if step >= 4 else 1.0")


def test_no_line_contradicts_the_actions(tmp_path: Path) -> None:
    guarded = run(tmp_path / "guarded", OFTEN)
    (habit,) = (line for line in guarded.err.splitlines() if "corrective actions" in line)
    assert habit == "steadygrad: step 8: 5 corrective actions in 5 steps", "these were changes"
    assert "step 4: the loss is NaN (the step was skipped, no weight was touched)" in guarded.err
    assert "AdamW: 10 steps, 6 skipped, 7 incidents" in guarded.err

    observed = run(tmp_path / "observed", OFTEN, "--observe")
    lines = observed.err.splitlines()
    assert lines[0] == "steadygrad: watching AdamW (2 tensors, 5) of Net, nothing is skipped; record in run"
    assert "step 4: NaN or Inf in 2 parameters: weight, bias (the step was taken anyway)" in lines[1]
    assert lines[-1].startswith("steadygrad: AdamW: 10 steps, only observed, 6 incidents; step 4: NaN")


SEVERAL = """
import torch

class Generator(torch.nn.Linear):
    pass

class Judge(torch.nn.Linear):
    pass

torch.manual_seed(0)
models = [kind(4, 1) for kind in KINDS]
optimizers = [torch.optim.Adam(model.parameters()) for model in models]
for step in range(6):
    for place, (model, optimizer) in enumerate(zip(models, optimizers)):
        x = torch.randn(8, 4)
        if (step, place) == (3, 1):
            x[0] = float("nan")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("kinds", "first", "second"),
    [
        ("Generator, Judge", "Adam of Generator", "Adam of Judge"),
        ("Judge, Judge", "Adam of Judge", "Adam 2 of Judge"),
    ],
)
def test_with_several_optimizers_each_line_names_its_own(kinds: str, first: str, second: str, tmp_path: Path) -> None:
    lines = run(tmp_path, SEVERAL.replace("KINDS", f"({kinds})")).err.splitlines()

    name, _, owner = second.partition(" of ")
    assert lines[1] == f"steadygrad: guarding {name} (2 tensors, 5) of {owner}; record in run/optimizer-1"
    printed = [line for line in lines if "step 3: " in line and "steps" not in line]
    assert len(printed) == 2
    assert all(line.startswith(f"steadygrad: {second}: step 3: ") for line in printed)
    ends = [line for line in lines if "steps" in line]
    assert any(line.startswith(f"steadygrad: {first}: 6 steps, 0 skipped, no incident") for line in ends)
    assert any(line.startswith(f"steadygrad: {second}: 6 steps, 1 skipped, 1 incident") for line in ends)


IN_A_THREAD = f"""
import atexit, threading
from concurrent.futures import ThreadPoolExecutor

atexit.register(lambda: print("handlers", flush=True))
pool = ThreadPoolExecutor(1)
pool.submit(print, "pooled", flush=True).result()  # its idle worker ends only when Python does

def train():
    {BAD.replace(chr(10), chr(10) + "    ")}
    print("trained", flush=True)

threading.Thread(target=train).start()
"""


def test_a_script_with_a_surviving_thread_is_judged_when_that_has_ended(tmp_path: Path) -> None:
    done = run(tmp_path, IN_A_THREAD, "--fail-on", "critical")

    assert (done.code, done.out.split()) == (0, ["pooled", "trained", "handlers"]), done.err
    assert "NOTHING WAS GUARDED" not in done.err
    assert done.err.splitlines()[-1].startswith("steadygrad: AdamW: 10 steps, 1 skipped, 1 incident")


def test_a_traceback_shows_the_frames_of_a_plain_run(tmp_path: Path) -> None:
    """An error inside backward passes through our functions, which the script should not see."""
    text = HEALTHY.replace("BAD", "model.weight.register_hook(lambda grad: 1 / 0)")
    guarded = run(tmp_path, text)
    plain = run_plainly(tmp_path, str(tmp_path / "train.py"))

    assert "ZeroDivisionError" in plain.err
    assert [line for line in guarded.err.splitlines() if not line.startswith("steadygrad: ")] == plain.err.splitlines()


PER_SAMPLE = """
import torch
from torch.func import functional_call, grad, vmap
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def measure(params, x, scale):
    return (functional_call(model, params, (x[None],)).square() * scale).sqrt().sum()

for step in range(8):
    scale = torch.ones(8)
    scale[3] = float(step not in BAD)
    params = {name: p.detach() for name, p in model.named_parameters()}
    gradients = vmap(grad(measure), in_dims=(None, 0, 0))(params, torch.randn(8, 4), scale)
    for name, p in model.named_parameters():
        p.grad = gradients[name].mean(0)
    optimizer.step()
"""


def test_inside_vmap_no_batch_is_kept_and_the_reason_is_given_once(tmp_path: Path) -> None:
    (once, twice) = (run(tmp_path / bad, PER_SAMPLE.replace("BAD", f"({bad})")).err for bad in ("4,", "4, 5"))
    assert "could not be kept" not in once
    assert once.count("Nothing could be replayed: no call of the model was seen") == 1
    # The step after it is watched op by op, which finds the line.
    assert "step 5: NaN gradient, born in the backward of aten.sqrt" in twice


def test_a_model_compiled_as_a_whole_names_the_way_to_a_diagnosis(tmp_path: Path) -> None:
    text = HEALTHY.replace("BAD", "x[0] = float('nan') if step in (5, 6) else 1.0")
    text = text.replace("for step", 'compiled = torch.compile(model, backend="eager")\nfor step').replace(
        "    model(x)", "    compiled(x)"
    )
    lines = run(tmp_path, text).err.splitlines()
    assert sum("TORCH_COMPILE_DISABLE=1" in line for line in lines) == 1
    assert not any("the same cause" in line for line in lines)
    assert any(line.endswith("no diagnosis: for the same reason as at step 5") for line in lines)
