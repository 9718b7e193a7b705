"""`steadygrad run`: small behaviours of scripts, each compared with plain Python in one pair of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

HABITS = """
import difflib, gc, os, pickle, sys, weakref
import torch

print("own module:", difflib.MARK)
print("file:", os.path.relpath(__file__, os.getcwd()), __file__.endswith("/./inner/train.py"))


def train(num_steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    print("weights:", sum(float(p.double().sum()) for p in model.parameters()), sorted(vars(optimizer)))
    return weakref.ref(model), weakref.ref(optimizer)


adam = sys.modules["torch.optim.adam"]
own_adam, num_calls = adam.adam, 0


def count_call(*args, **kwargs):
    global num_calls
    num_calls += 1
    own_adam(*args, **kwargs)


adam.adam = count_call
train(2)  # torch imports more at the first step, which leaves cycles
gc.collect()
gc.disable()
print("freed:", [ref() is None for ref in train(10)])
gc.enable()
print("calls:", num_calls)
functions = [torch.save, torch.nn.utils.clip_grad_norm_, torch.set_rng_state]
functions += [torch.autograd.backward, torch.nn.utils.clip_grad.clip_grad_norm_, torch.multiprocessing.start_processes]
print("pickled:", [pickle.loads(pickle.dumps(function)) is function for function in functions])
os.chdir("/")
"""


@dataclass(frozen=True)
class Pair:
    """The same script run by Python alone, and by us."""

    plain: subprocess.CompletedProcess[str]
    ours: subprocess.CompletedProcess[str]

    def take(self, start: str) -> str:
        """Return the lines of standard output with this prefix, equal in both."""
        plain, ours = (
            [line for line in done.stdout.splitlines() if line.startswith(start)] for done in (self.plain, self.ours)
        )
        assert plain == ours
        return "\n".join(ours)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("alike")
    (folder / "inner").mkdir()
    (folder / "inner" / "train.py").write_text(HABITS)
    (folder / "inner" / "difflib.py").write_text("MARK = 'mine'\n")  # the command line has imported the library
    (folder / "inner" / "statistics.py").write_text("print('a module that the script never imports')\n")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, "./inner/train.py"],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={**os.environ, "PYTHONSAFEPATH": ""},
        )

    return Pair(run(), run("-m", "steadygrad", "run", "--run-dir", "run"))


def test_a_script_imports_the_modules_of_its_folder_and_no_other_ones(pair: Pair) -> None:
    assert pair.take("own module:") == "own module: mine", pair.ours.stderr
    assert "never imports" not in pair.ours.stdout
    assert "guarding AdamW" in pair.ours.stderr, "steadygrad has got the library's modules"


def test_a_script_sees_its_name_as_typed(pair: Pair) -> None:
    assert pair.take("file:") == "file: inner/train.py True"


def test_models_and_optimizers_are_freed_when_the_script_drops_them(pair: Pair) -> None:
    """A sweep over large models must not hold two at once."""
    assert pair.take("freed:") == "freed: [True, True]"


def test_weights_and_optimizer_attributes_equal_those_of_a_plain_run(pair: Pair) -> None:
    assert pair.take("weights:")


def test_small_steps_of_adam_use_fewer_calls(pair: Pair) -> None:
    """The weights are still equal, as the previous test shows."""
    counts = [int(done.stdout.partition("calls: ")[2].split()[0]) for done in (pair.plain, pair.ours)]
    assert counts == [12, 4], "the first two steps of each training are torch's own"


def test_the_records_path_is_relative_to_where_the_run_started(pair: Pair) -> None:
    """The script has changed its folder, the user's shell has not."""
    assert pair.ours.stderr.splitlines()[-1].endswith("; steadygrad report run/trial-2")


def test_functions_of_torch_can_be_pickled_as_before(pair: Pair) -> None:
    """An object may hold one of them and be sent to a spawned process."""
    assert pair.take("pickled:") == f"pickled: {[True] * 6}", pair.ours.stderr
