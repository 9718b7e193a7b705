"""`steadygrad run` with programs that create one optimizer after another for the same parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import run_guarded, run_plainly

from steadygrad.adapters.scripts.places import Places


def read_steps(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the steps of each record, the record with most steps first."""
    records = [path.read_text().splitlines() for path in (folder / "run").rglob("steps.jsonl")]
    return [[json.loads(line) for line in lines] for lines in sorted(records, key=len, reverse=True)]


def list_kinds(folder: Path) -> list[str]:
    path = folder / "run" / "incidents.jsonl"
    return [json.loads(line)["finding"]["kind"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("every", ["1", "10"])
@pytest.mark.parametrize("way", ["adam", "sgd", "with_schedule", "scaled"])
def test_a_new_optimizer_goes_on_with_the_record(way: str, every: str, tmp_path: Path) -> None:
    run_plainly(tmp_path / "plain", "new_optimizers.py", way, "--every", every, "--out", "w.pt")
    done = run_guarded(tmp_path / "guarded", "new_optimizers.py", way, "--every", every, "--out", "w.pt")

    assert done.code == 0, done.err
    assert (tmp_path / "guarded" / "w.pt").read_bytes() == (tmp_path / "plain" / "w.pt").read_bytes()
    (steps,) = read_steps(tmp_path / "guarded")
    assert [one["step"] for one in steps] == list(range(30))
    # Plain SGD keeps nothing that could be lost, and a new start every ten steps may be meant.
    is_lost = every == "1" and way != "sgd"
    assert list_kinds(tmp_path / "guarded") == (["forgotten_state"] if is_lost else [])


@pytest.mark.parametrize("way", ["adam", "sgd", "with_schedule", "two_at_once"])
@pytest.mark.parametrize("bad", [10, 13])
def test_a_bad_step_is_skipped_and_named_after_a_new_optimizer_too(way: str, bad: int, tmp_path: Path) -> None:
    done = run_guarded(tmp_path, "new_optimizers.py", way, "--every", "10", "--poison", str(bad), "--out", "w.pt")

    assert done.code == 0, done.err
    skipped = [(len(steps), one["step"]) for steps in read_steps(tmp_path) for one in steps if one["skipped"]]
    assert len(skipped) == 1, done.err
    assert "NaN loss, already in the input x" in done.err
    if way != "two_at_once":
        assert skipped == [(30, bad)]


def test_optimizers_that_live_side_by_side_have_records_of_their_own(tmp_path: Path) -> None:
    run_guarded(tmp_path, "new_optimizers.py", "two_at_once", "--every", "10", "--out", "w.pt")

    assert [len(steps) for steps in read_steps(tmp_path)] == [18, 8, 4]
    assert list_kinds(tmp_path) == []


ROUNDS = """
import copy, torch
from torch import nn
shared = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for number in range(105):
    model = copy.deepcopy(shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(2):
        x = torch.randn(8, 4)
        if (number, step) == (104, 1):
            x[2] = torch.nan
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
assert all(p.isfinite().all() for p in model.parameters())
"""


def test_of_very_many_short_trainings_the_first_have_a_record_and_all_a_guard(tmp_path: Path) -> None:
    """As in meta-learning and federated learning."""
    (tmp_path / "rounds.py").write_text(ROUNDS)
    done = run_guarded(tmp_path, str(tmp_path / "rounds.py"))

    assert done.code == 0, done.err
    assert [len(steps) for steps in read_steps(tmp_path)] == [2] * 100
    assert done.err.count("100 trainings have a record; further ones are guarded without one") == 1
    assert "step 1: the loss is NaN (the step was skipped" in done.err


TWO_PARTS = """
import sys, torch
from torch import nn
trunk, head = nn.Linear(4, 8), nn.Linear(8, 1)
first, second = (torch.optim.SGD(part.parameters(), lr=1e-2) for part in (trunk, head))
if "frozen" in sys.argv:
    head.requires_grad_(False)
for step in range(5):
    x = torch.randn(8, 4)
    first.zero_grad()
    second.zero_grad()
    (head(trunk(x).tanh()) - x.sum(1, keepdim=True)).square().mean().backward()
    first.step()
    if "both" in sys.argv:
        second.step()
"""


def test_an_optimizer_that_is_never_stepped_is_named_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_PARTS)
    said = {way: run_guarded(tmp_path / way, str(tmp_path / "two.py"), way).err for way in ("one", "both", "frozen")}

    assert "steadygrad: SGD of Linear never took a step, though the loss reaches its parameters" in said["one"]
    assert "never took a step" not in said["both"] + said["frozen"]


@pytest.mark.parametrize("trains_beside_others", [False, True], ids=["one after the other", "beside an outer one"])
def test_a_hundred_optimizers_get_a_folder(trains_beside_others: bool, tmp_path: Path) -> None:
    places = Places(tmp_path, is_child=False)
    folders = [places.choose(trains_beside_others=trains_beside_others) for _ in range(105)]

    assert None not in folders[:100]
    assert len(set(folders[:100])) == 100
    assert folders[100:] == [None] * 5
    assert places.is_full
