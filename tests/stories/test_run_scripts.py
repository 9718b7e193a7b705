"""`steadygrad run`: scripts from the frameworks' docs, unedited, healthy and with a NaN."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import SCRIPTS, Done, run_guarded, run_plainly, start, start_command
from torch import nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Story:
    """A script, how to poison it, and the steps that must then be skipped, by record folder."""

    script: str
    poison: tuple[str, ...]
    skipped: dict[str, list[int]]
    arguments: tuple[str, ...] = ()
    kind: str = "nonfinite_loss"


STORIES = {
    "plain loop": Story("plain_loop.py", ("--poison", "10"), {".": [1, 9]}),
    "transformers": Story("hf_trainer.py", ("--poison", "5"), {".": [0]}),
    "lightning": Story("lightning_mnist.py", ("--poison", "10"), {".": [1]}),
    "scaler": Story("amp_scaler.py", ("--poison", "5"), {".": [5]}),
    "scaler, fused": Story("amp_scaler.py", ("--poison", "5"), {".": [5]}, ("--fused",)),
    "two optimizers": Story("gan.py", ("--poison", "3"), {".": [], "optimizer-1": [3]}),
    "LBFGS": Story("lbfgs.py", ("--poison", "6"), {".": [1]}),
    "compiled": Story("compiled.py", ("--poison", "3"), {".": [3]}),
}
stories = pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())


def load(folder: Path) -> list[Any]:
    return tree_leaves(torch.load(folder / "w.pt", weights_only=True))


def tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def all_finite(values: list[Any]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors(values))


def assert_same_bits(mine: list[Any], theirs: list[Any]) -> None:
    """Assert equality; NaN equals NaN."""
    assert len(mine) == len(theirs) > 0
    for one, other in zip(mine, theirs):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def skipped_steps(folder: Path) -> list[int]:
    return [record["step"] for record in read(folder / "steps.jsonl") if record["skipped"]]


@stories
def test_a_healthy_script_ends_with_identical_bits(story: Story, tmp_path: Path) -> None:
    plain = run_plainly(tmp_path / "plain", story.script, "--out", "w.pt", *story.arguments)
    guarded = run_guarded(tmp_path / "guarded", story.script, "--out", "w.pt", *story.arguments)

    assert (plain.code, guarded.code) == (0, 0), guarded.err
    assert_same_bits(load(tmp_path / "guarded"), load(tmp_path / "plain"))
    assert name_apart(guarded) == name_apart(plain)
    for place in story.skipped:
        assert skipped_steps(tmp_path / "guarded" / "run" / place) == []
        assert read(tmp_path / "guarded" / "run" / place / "incidents.jsonl") == []


def name_apart(done: Done) -> list[str]:
    """Return standard output without lines that contain seconds, or the time of day as DeepSpeed prints."""
    timed = re.compile(r"runtime|^\[\d{4}-\d\d-\d\d ")
    return [line for line in done.out.splitlines() if not timed.search(line)]


@pytest.fixture(scope="module")
def run_dying(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Story], tuple[Path, Done]]:
    """Run the poisoned script alone, once."""

    @functools.cache
    def run(place: str) -> tuple[Path, Done]:
        story, folder = STORIES[place], tmp_path_factory.mktemp("dying")
        return folder, run_plainly(folder, story.script, "--out", "w.pt", *story.arguments, *story.poison)

    return lambda story: run(next(place for place, other in STORIES.items() if other is story))


@stories
def test_a_nan_that_kills_the_script_is_skipped_and_reported(story: Story, run_dying: Any, tmp_path: Path) -> None:
    folder, plain = run_dying(story)
    arguments = ("--out", "w.pt", *story.arguments, *story.poison)
    guarded = run_guarded(tmp_path / "guarded", story.script, *arguments)

    assert (plain.code, guarded.code) == (0, 0), guarded.err
    assert not all_finite(load(folder))
    assert all_finite(load(tmp_path / "guarded"))
    for place, steps in story.skipped.items():
        assert skipped_steps(tmp_path / "guarded" / "run" / place) == steps
    bad = [place for place, steps in story.skipped.items() if steps]
    incidents = read(tmp_path / "guarded" / "run" / bad[0] / "incidents.jsonl")
    assert {f["kind"] for i in incidents for f in (i["finding"], *i["also"])} >= {"nonfinite_gradient", story.kind}
    assert all(i["outcome"]["action"] == "skip" for i in incidents)
    first = story.skipped[bad[0]][0]
    assert f": step {first}: the loss is NaN (the step was skipped" in guarded.err
    assert "steadygrad" not in guarded.out


@stories
def test_observing_changes_no_bit_of_a_dying_script(story: Story, run_dying: Any, tmp_path: Path) -> None:
    folder, plain = run_dying(story)
    arguments = ("--out", "w.pt", *story.arguments, *story.poison)
    observed = run_guarded(tmp_path / "observed", story.script, *arguments, options=["--observe"])

    assert (plain.code, observed.code) == (0, 0), observed.err
    assert_same_bits(load(tmp_path / "observed"), load(folder))
    assert "the loss is NaN" in observed.err


# --- exactly ------------------------------------------------------------------------------------------------------


def test_a_skipped_step_leaves_no_trace_in_weights_and_momentum(tmp_path: Path) -> None:
    run_guarded(tmp_path, "compiled.py", "--out", "w.pt", "--poison", "3")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(8):
        x = torch.randn(16, 8)
        if step != 3:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    saved = torch.load(tmp_path / "w.pt", weights_only=True)
    mine = [value for name, value in saved["model"].items() if "num_batches" not in name]
    assert_same_bits(mine, list(model.state_dict().values()))
    moments = [state["momentum_buffer"] for state in saved["optimizer"]["state"].values()]
    assert_same_bits(moments, [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()])


@pytest.mark.parametrize("fused", [(), ("--fused",)], ids=["unfused", "fused"])
def test_the_overflow_of_a_loss_scale_is_left_to_the_scaler(fused: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ("--out", "w.pt", "--overflow", "5", *fused)
    run_plainly(tmp_path / "plain", "amp_scaler.py", *arguments)
    done = run_guarded(tmp_path / "guarded", "amp_scaler.py", *arguments)

    assert done.code == 0, done.err
    assert_same_bits(load(tmp_path / "guarded"), load(tmp_path / "plain"))  # weights, moments, buffers, scales
    assert skipped_steps(tmp_path / "guarded" / "run") == [5]
    record = read(tmp_path / "guarded" / "run" / "steps.jsonl")
    assert [r["loss_scale"] for r in record[:6]] == [1024, 1024, 1024, 1024, 2048, 2048]
    assert record[6]["loss_scale"] == 1024
    incidents = read(tmp_path / "guarded" / "run" / "incidents.jsonl")
    assert {i["finding"]["severity"] for i in incidents} <= {"info"}  # a search, not a bug


def test_gradients_are_reported_as_before_the_scripts_clipping(tmp_path: Path) -> None:
    run_guarded(tmp_path / "free", "plain_loop.py", "--out", "w.pt", "--epochs", "1")
    run_plainly(tmp_path / "plain", "plain_loop.py", "--out", "w.pt", "--epochs", "1", "--clip", "0.05")
    run_guarded(tmp_path / "clipped", "plain_loop.py", "--out", "w.pt", "--epochs", "1", "--clip", "0.05")

    assert_same_bits(load(tmp_path / "clipped"), load(tmp_path / "plain"))
    free, clipped = (read(tmp_path / name / "run" / "steps.jsonl") for name in ("free", "clipped"))
    assert free[0]["grad_norm"] == clipped[0]["grad_norm"] > 0.05
    assert clipped[0]["clip_coefficient"] == pytest.approx(0.05 / clipped[0]["grad_norm"], rel=1e-4)
    assert all(record["clipped"] for record in clipped)


def test_the_diagnosis_names_the_sample(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, "plain_loop.py", "--out", "w.pt", "--poison", "10", "--epochs", "1")

    assert "already in the input" in done.err
    cause = read(tmp_path / "run" / "incidents.jsonl")[0]["cause"]
    assert (cause["phase"], cause["samples"]) == ("input", [2])


def test_files_saved_by_the_script_contain_nothing_of_ours(tmp_path: Path) -> None:
    run_plainly(tmp_path / "plain", "plain_loop.py", "--out", "w.pt", "--epochs", "1")
    run_guarded(tmp_path / "guarded", "plain_loop.py", "--out", "w.pt", "--epochs", "1")

    plain, guarded = ((tmp_path / name / "w.pt.whole").read_bytes() for name in ("plain", "guarded"))
    assert b"NeuralNetwork" in guarded
    assert b"steadygrad" not in guarded
    assert len(guarded) == len(plain)


def test_unusual_scripts_work_and_are_guarded(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, "corners.py", "--out", "w.pt")

    assert done.code == 0, done.err
    assert "failed" not in done.err
    assert all_finite(load(tmp_path))
    printed = [line.partition(";")[0] for line in done.err.splitlines() if "; steadygrad report" in line]
    assert {
        "steadygrad: SAM: 4 steps, 1 skipped, 1 incident",
        "steadygrad: RMSprop: 3 steps, 1 skipped, 1 incident",
    } <= set(printed)


def test_trainings_in_several_threads_stay_separate(tmp_path: Path) -> None:
    plain = run_plainly(tmp_path / "plain", "threads.py", "--out", "w.pt")
    healthy = run_guarded(tmp_path / "healthy", "threads.py", "--out", "w.pt")
    bad = run_guarded(tmp_path / "bad", "threads.py", "--out", "w.pt", "--poison")

    assert (plain.code, healthy.code, bad.code) == (0, 0, 0), healthy.err + bad.err
    assert_same_bits(load(tmp_path / "healthy"), load(tmp_path / "plain"))
    assert all_finite(load(tmp_path / "bad"))
    records = [path.parent for path in (tmp_path / "bad" / "run").rglob("steps.jsonl")]
    assert sorted(skipped_steps(record) for record in records) == [[10], [11], [12]]
    for record in records:  # none reports the loss of another
        found = [line["finding"] for line in read(record / "incidents.jsonl")]
        assert [one["step"] for one in found if one["kind"].startswith("nonfinite")] == skipped_steps(record)


def test_a_script_with_its_own_guard_is_not_guarded_again(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, "own_guard.py", "--out", "w.pt", "--poison", "3")

    assert done.code == 0, done.err
    assert all_finite(load(tmp_path))
    assert done.out.split() == ["skipped", "1", "of", "6"]
    assert not (tmp_path / "run").exists()


# --- other processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_workers_of_a_loader_are_not_guarded(method: str, tmp_path: Path) -> None:
    arguments = ("--out", "w.pt", "--poison", "10", "--workers", "1", "--start", method, "--epochs", "1")
    done = run_guarded(tmp_path, "plain_loop.py", *arguments)

    assert done.code == 0, done.err
    assert [record["step"] for record in read(tmp_path / "run" / "steps.jsonl")] == list(range(8))
    assert skipped_steps(tmp_path / "run") == [1]
    assert done.err.count("record in") == 1


FORKING = """
import os
import torch

weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)

def step(factor):
    optimizer.zero_grad()
    (weight * factor).sum().backward()
    optimizer.step()

step(1.0)
child = os.fork()
if child == 0:
    step(float("nan"))
    step(1.0)
    os._exit(0 if weight.isfinite().all() else 1)
assert os.waitpid(child, 0)[1] == 0
step(1.0)
"""


def test_a_forked_process_is_guarded_separately(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, write(tmp_path / "forking.py", FORKING))

    assert done.code == 0, done.err
    assert [record["step"] for record in read(tmp_path / "run" / "steps.jsonl")] == [0, 1]
    assert read(tmp_path / "run" / "incidents.jsonl") == []
    assert len(read(tmp_path / "run" / "process-1" / "incidents.jsonl")) == 1
    assert sum("guarding SGD (1 tensor, 2)" in line for line in done.err.splitlines()) == 2


FORKS_WITH_THE_LOCK = """
import os, signal
import torch
from steadygrad.adapters.scripts.session import _current

with _current[0]._lock:  # as when another thread makes an optimizer while this one forks
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that waits for the lock is ended
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for factor in (1.0, float("nan")):
            optimizer.zero_grad()
            (model(torch.ones(4, 2)) * factor).mean().backward()
            optimizer.step()
        os._exit(0 if model.weight.isfinite().all() else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""


def test_a_process_forked_while_a_lock_was_held_trains_on_guarded(tmp_path: Path) -> None:
    done = run_guarded(tmp_path, write(tmp_path / "forking.py", FORKS_WITH_THE_LOCK))

    assert done.code == 0, done.err
    assert skipped_steps(tmp_path / "run" / "process-1") == [1]


def test_ranks_started_by_torchrun_skip_the_same_step(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    plain = start_ranks(tmp_path / "plain", None, port)
    assert [done.code for done in plain] == [0, 0], plain[0].err
    assert not all_finite(tensors(tree_leaves(torch.load(tmp_path / "plain" / "w.pt.0", weights_only=True))))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "steadygrad"]
    script = [str(SCRIPTS / "ddp.py"), "--out", "w.pt", "--poison", "3"]
    done = run_python(*command, "run", "--run-dir", "run", *script, folder=tmp_path)

    assert done.returncode == 0, done.stderr
    ranks = [tree_leaves(torch.load(tmp_path / f"w.pt.{rank}", weights_only=True)) for rank in (0, 1)]
    assert all_finite(ranks[0])
    assert_same_bits(*ranks)
    assert skipped_steps(tmp_path / "run") == skipped_steps(tmp_path / "run" / "rank-1") == [3]
    assert "steadygrad: rank 1: step 3: the loss is NaN" in done.stderr


def test_ranks_spawned_by_the_script_are_guarded_too(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    done = run_guarded(tmp_path, "ddp.py", "--out", "w.pt", "--poison", "3", "--spawn", meeting)

    assert done.code == 0, done.err
    ranks = [tree_leaves(torch.load(tmp_path / f"w.pt.{rank}", weights_only=True)) for rank in (0, 1)]
    assert all_finite(ranks[0])
    assert_same_bits(*ranks)
    assert skipped_steps(tmp_path / "run") == skipped_steps(tmp_path / "run" / "rank-1") == [3]


def start_ranks(folder: Path, command: list[str] | None, port: int) -> list[Done]:
    """Run two ranks with torchrun's environment variables."""
    folder.mkdir()
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        out = str(folder / "w.pt")
        ranks.append(start(folder / str(rank), command, "ddp.py", ("--out", out, "--poison", "3"), place))
    return [running.wait() for running in ranks]


# --- the script's behaviour ---------------------------------------------------------------------------------------

CURIOUS = """
import os, sys
print(sys.argv, __name__, os.path.basename(__file__), sys.path[0], os.getcwd(), "torch" in sys.modules)
print(sys.modules["__main__"].__dict__ is globals(), sorted(set(globals()) - {"__annotations__"}))
"""


def run_python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **environment},
    )


def run_both(
    folder: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Run by Python alone, and by us."""
    command = ["-m", "steadygrad", "run", "--run-dir", "run"]
    return run_python(*arguments, folder=folder), run_python(*command, *arguments, folder=folder)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_the_script_sees_the_same_as_without_us(tmp_path: Path) -> None:
    write(tmp_path / "inner" / "curious.py", CURIOUS)
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "curious.py", CURIOUS)

    plain, ours = run_both(tmp_path, "inner/curious.py", "--run-dir", "theirs", "-m", "--", "x")
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)
    assert ours.stderr == "steadygrad: NOTHING WAS GUARDED: the script did not import torch\n"
    assert "['inner/curious.py', '--run-dir', 'theirs', '-m', '--', 'x'] __main__" in ours.stdout
    plain, ours = run_both(tmp_path, "-m", "package.curious", "--observe")
    assert (ours.returncode, ours.stdout) == (0, plain.stdout)
    assert not (tmp_path / "run").exists()  # nothing was trained


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise SystemExit('printed and gone')", 1),
        ("def f():\n    raise ValueError('a bug of mine')\nf()", 1),
        ("import os; os._exit(3)", 3),
        ("this is no python", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_exit_code_and_traceback_are_those_of_the_script(ending: str, code: int, tmp_path: Path) -> None:
    script = write(tmp_path / "ends.py", f"print('before', flush=True)\n{ending}\n")
    plain, ours = run_both(tmp_path, script)
    assert plain.returncode == ours.returncode == code
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


def test_a_missing_script_is_reported(tmp_path: Path) -> None:
    done = run_python("-m", "steadygrad", "run", "nowhere.py", folder=tmp_path)
    assert done.returncode == 2
    assert "there is no script nowhere.py" in done.stderr


@pytest.mark.parametrize("wrong", [["empty"], ["-m", "no_such_module"], ["-m", "torch.no_such_module"]], ids=" ".join)
def test_an_unrunnable_file_is_reported_without_a_traceback(wrong: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = start_command(tmp_path, ["run", *wrong]).wait()
    assert done.code == 2
    assert f"{wrong[-1]} cannot be run: " in done.err
    assert "Traceback" not in done.err


def test_a_script_without_an_optimizer_is_reported_as_unguarded(tmp_path: Path) -> None:
    script = write(tmp_path / "idle.py", "import torch\nprint(torch.ones(2).sum().item())\n")
    done = run_python("-m", "steadygrad", "run", script, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert done.stderr == "steadygrad: NOTHING WAS GUARDED: the script created no torch.optim.Optimizer\n"


def test_disabled_the_script_runs_alone_and_a_default_folder_is_named(tmp_path: Path) -> None:
    off = start(tmp_path, ["run"], "lbfgs.py", ("--out", "w.pt"), {"STEADYGRAD": "off"}).wait()
    assert (off.code, "steadygrad: " in off.err) == (0, False)  # a warning may quote a path
    assert not (tmp_path / "runs").exists()
    on = start(tmp_path, ["run"], "lbfgs.py", ("--out", "w.pt")).wait()
    assert (on.code, on.out) == (0, off.out)
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("lbfgs-")
    assert len(read(folder / "steps.jsonl")) == 5


def test_an_unwritable_folder_costs_the_record_but_not_the_guard(tmp_path: Path) -> None:
    write(tmp_path / "run" / "steps.jsonl" / "in the way", "")
    done = run_guarded(tmp_path, "compiled.py", "--out", "w.pt", "--poison", "3")
    assert done.code == 0
    assert "no record is written: run_dir cannot be used" in done.err
    assert all_finite(load(tmp_path))
