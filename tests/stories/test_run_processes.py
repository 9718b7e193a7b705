"""`steadygrad run`: processes started by the script are guarded too, and ranks skip together or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import SCRIPTS, Done, run_guarded, start, start_command

TRAINING = """
import sys
import torch

def train(number=0):
    torch.manual_seed(number)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(10):
        x = torch.randn(8, 4)
        if step == 5:
            x[0] = float("nan")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    print(f"finite: {bool(model.weight.isfinite().all())}\\n", end="", flush=True)
"""
STARTED = {
    "subprocess": "import subprocess, sys\nsubprocess.run([sys.executable, 'train.py'], check=True)\n",
    "spawned process": """
import multiprocessing
from training import train
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    process.join()
""",
    "forked process": """
import multiprocessing
from training import train
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
""",
    "accelerate launch": """
import subprocess, sys
subprocess.run([sys.executable, "-m", "accelerate.commands.launch", "--cpu", "train.py"], check=True)
""",
    "accelerate's notebook launcher": """
from accelerate import debug_launcher
from training import train
if __name__ == "__main__":
    debug_launcher(train, num_processes=1)
""",
}


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **environment},
        timeout=600,
    )


def skipped_steps(folder: Path) -> list[int]:
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if record["skipped"]]


@pytest.mark.parametrize("starter", STARTED.values(), ids=STARTED.keys())
def test_a_child_process_is_guarded(starter: str, tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    (tmp_path / "train.py").write_text("from training import train\ntrain()\n")
    (tmp_path / "start.py").write_text(starter)
    done = run_guarded(tmp_path, str(tmp_path / "start.py"))

    assert done.code == 0, done.err
    assert "finite: True" in done.out
    assert skipped_steps(tmp_path / "run" / "process-1") == [5]
    assert "NOTHING" not in done.err


def test_a_sitecustomize_of_the_environment_still_runs_in_child_processes(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('customized', flush=True)\n")
    (tmp_path / "start.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'])\n")
    paths = os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")])
    done = run(tmp_path, "-m", "steadygrad", "run", "start.py", PYTHONPATH=paths)

    assert done.stdout.split() == ["customized", "customized", "1"]


def test_a_child_process_with_a_failing_sitecustomize_is_still_guarded(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("raise ValueError('of the environment')\n")
    asks = "import sys; print('steadygrad.adapters.scripts.children' in sys.modules)"
    (tmp_path / "start.py").write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {asks!r}])\n")
    paths = os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")])
    done = run(tmp_path, "-m", "steadygrad", "run", "start.py", PYTHONPATH=paths)

    assert done.stdout.split() == ["True"]
    assert done.stderr.count("ValueError: of the environment") == 2, "Python prints it for each process"


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_ranks_started_by_lightning_skip_the_same_step(strategy: str, tmp_path: Path) -> None:
    done = run_guarded(tmp_path, "lightning_ddp.py", "--strategy", strategy)

    assert done.code == 0, done.err
    assert done.out.count("finite: True") == (2 if strategy == "ddp" else 1)
    assert skipped_steps(tmp_path / "run") == skipped_steps(tmp_path / "run" / "rank-1") == [5]


def test_a_command_runs_in_an_environment_with_a_space_in_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "with space" / "train_it"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\nprint('trained')\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    done = run(tmp_path, "-m", "steadygrad", "run", "--run-dir", "run", "train_it")
    assert done.stdout == "trained\n", done.stderr


def test_torchrun_can_be_run_as_a_command(tmp_path: Path) -> None:
    script = [str(SCRIPTS / "ddp.py"), "--out", "w.pt", "--poison", "3"]
    command = ["torchrun", "--nproc-per-node", "2", "--standalone", *script]
    done = start_command(tmp_path, ["run", "--run-dir", "run", *command]).wait()

    assert done.code == 0, done.err
    assert skipped_steps(tmp_path / "run") == skipped_steps(tmp_path / "run" / "rank-1") == [3]


# --- ranks without DistributedDataParallel --------------------------------------------------------------------------


def run_ranks(folder: Path, script: str, *environments: dict[str, str]) -> list[Done]:
    """Run two ranks with torchrun's environment variables; they meet at a file."""
    path = folder / "train.py"
    path.write_text(script)
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MEETING": f"file://{folder}/meeting"}
        command = ["run", "--run-dir", str(folder / "run")]
        own = environments[rank] if environments else {}
        ranks.append(start(folder / str(rank), command, str(path), (), {**place, **own}))
    return [running.wait() for running in ranks]


# gloo sometimes aborts a rank at exit, guarded or not: the files are complete by then, whatever the exit code.
REDUCE_IN_STEP = """
import datetime, gc, os
import torch
import torch.distributed as dist

class DistSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        return super().step(closure)

rank, patience = int(os.environ["RANK"]), datetime.timedelta(minutes=5)
dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=2, timeout=patience)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = DistSGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(8):
    x = torch.randn(8, 4)
    if step == 3 and rank == 1:
        x[0] = float("nan")
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"weights {model.weight.data.tolist()}", flush=True)
del optimizer
gc.collect()  # its record is complete now
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_that_average_in_the_optimizer_agree_before_they_skip(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, REDUCE_IN_STEP)

    assert first.out.startswith("weights")
    assert first.out == second.out
    assert "nan" not in first.out
    assert skipped_steps(tmp_path / "run") == skipped_steps(tmp_path / "run" / "rank-1") == [3]
    assert "rank 0: step 3: another rank found values that are not finite" in first.err


SHARDED = """
import gc, os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def train(bad_step, left_out, step):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for number in range(8):
        x = torch.randn(8, 4)
        if number == left_out:
            continue
        size = torch.zeros(()) if number == bad_step and rank == 1 else torch.ones(())
        loss = (model(x) - x.sum(1, keepdim=True)).square().sum() / size  # HERE
        loss.backward()
        step(optimizer)
        optimizer.zero_grad()
    return [p.to_local().clone() for p in model.parameters()]

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=os.environ["MEETING"], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
expected = train(-1, 5, lambda optimizer: type(optimizer).step.__wrapped__(optimizer))  # past the guard
gc.collect()
guarded = train(5, -1, lambda optimizer: optimizer.step())
print(f"equal: {all(map(torch.equal, expected, guarded))}", flush=True)
gc.collect()  # the record is complete now
dist.barrier()
dist.destroy_process_group()
"""


def test_sharded_ranks_skip_together_bit_for_bit_and_name_the_line(tmp_path: Path) -> None:
    for done in run_ranks(tmp_path, SHARDED):
        assert done.out == "equal: True\n", done.err
        assert "NOT guarded" not in done.err
    line = 1 + SHARDED[: SHARDED.index("# HERE")].count("\n")
    for folder in (tmp_path / "run", tmp_path / "run" / "rank-1"):
        assert skipped_steps(folder) == [5]
        cause = json.loads((folder / "incidents.jsonl").read_text().splitlines()[0])["cause"]
        assert cause["line"] == line
        assert "Replayed on rank 1" in cause["note"]


UNGUARDED_RANK = """
import datetime
import torch
import steadygrad.adapters.scripts.agreement as agreement
agreement.PATIENCE = datetime.timedelta(seconds=2)
"""


def test_an_unguarded_rank_is_reported_and_no_other_skips_alone(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, UNGUARDED_RANK + REDUCE_IN_STEP, {}, {"STEADYGRAD": "off"})

    assert "rank 0: not all of the 2 ranks are guarded" in first.err
    assert skipped_steps(tmp_path / "run") == []
    assert first.out == second.out  # both took the bad step, so they stayed equal
    assert "nan" in first.out


AVERAGES_ALL = "                p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"


def test_no_rank_waits_for_one_without_gradients(tmp_path: Path) -> None:
    text = REDUCE_IN_STEP.replace("                dist.all_reduce", AVERAGES_ALL + "                dist.all_reduce")
    text = text.replace("    (model(x)", "    if step != 1 or rank == 0: (model(x)")
    first, second = run_ranks(tmp_path, UNGUARDED_RANK + text)

    for done in (first, second):
        assert "NOT skipped" not in done.err
    assert first.out == second.out
    assert "nan" not in first.out
    assert skipped_steps(tmp_path / "run") == skipped_steps(tmp_path / "run" / "rank-1") == [3]


STARTS_OTHERS = """
import os, subprocess, sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 2)).mean().backward()
optimizer.step()
subprocess.run([sys.executable, "-c", "pass"], env={**os.environ})
subprocess.run(["true"], env={})
if len(sys.argv) > 1:
    subprocess.run([sys.executable, "-c", "pass"], env={})
"""


def test_a_child_process_with_a_replaced_environment_is_reported_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STARTS_OTHERS)

    usual = run_guarded(tmp_path, str(script)).err
    assert "1 step" in usual
    assert "NOT guarded" not in usual

    last = [line for line in run_guarded(tmp_path, str(script), "cleaned").err.splitlines() if "NOT guarded" in line]
    assert len(last) == 1
    assert "1 Python process was started without the variable STEADYGRAD_RUN (python" in last[0]
    assert last[0].endswith("training in it is NOT guarded. Pass env={**os.environ, ...}")
