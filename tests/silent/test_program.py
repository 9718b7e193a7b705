"""Every silent error of a program is named, and its healthy twin is left alone: under a Guard and under `run`."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import program_cases
import pytest
import torch
from program_cases import CASES, HEALTHY
from torch import nn

from forks import start_forked
from steadygrad import Finding, Guard

pytestmark = pytest.mark.filterwarnings("ignore")
BY_SCRIPT = [
    *("clip_after_step", "unfrozen_later", "initialised_after_loading", "saves_a_copy", "float16_without_scale"),
    *("clip_of_a_copy", "loads_in_every_step", "copy_never_updated", "without_causal_flag"),
    "seed_in_the_loop",
]
"""Cases that are also run as plain scripts: one for each place that a script is watched from."""


class Watched:
    """Makes guards, and collects what they report."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Any:
        self.guards.append(Guard(model, optimizer, scaler=scaler))
        return self.guards[-1].step

    @property
    def warnings(self) -> list[Finding]:
        for guard in self.guards:
            guard.close()
        return [f for guard in self.guards for f in guard.findings if f.severity.value != "info"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", CASES)
def test_a_silent_error_is_named(name: str) -> None:
    watched = Watched()

    CASES[name].train(watched, True)

    assert [finding.kind for finding in watched.warnings] == [CASES[name].kind]


@pytest.mark.parametrize("name", CASES)
def test_its_healthy_twin_is_left_alone(name: str) -> None:
    watched = Watched()

    CASES[name].train(watched, False)

    assert watched.warnings == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_that_looks_like_one_is_left_alone(name: str) -> None:
    watched = Watched()

    HEALTHY[name](watched)

    assert watched.warnings == []


@pytest.mark.parametrize("name", BY_SCRIPT)
@pytest.mark.parametrize("which", ["bug", "healthy"])
def test_a_plain_script_is_judged_alike(name: str, which: str, tmp_path: Path) -> None:
    command = ["run", "--run-dir", "r", program_cases.__file__, name, which]

    ran = start_forked(f"import sys, steadygrad.cli\nsys.exit(steadygrad.cli.main({command}))", folder=tmp_path).wait()

    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line)["finding"] for path in tmp_path.rglob("incidents.jsonl") for line in path.open()]
    assert [one["kind"] for one in found] == ([CASES[name].kind] if which == "bug" else [])


def test_a_closed_guard_leaves_no_hook_behind() -> None:
    model = program_cases.make_model()
    before = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    batch = next(program_cases.make_batches(1))

    guard.step(program_cases.compute_loss, model, batch)
    guard.close()

    assert [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()] == before


def test_functions_of_torch_that_are_listened_to_can_be_pickled() -> None:
    """`worker_init_fn=torch.manual_seed` goes to spawned workers in a pickle."""
    model = program_cases.make_model()
    with Guard(model, torch.optim.SGD(model.parameters(), 0.1)) as guard:
        guard.step(program_cases.compute_loss, model, next(program_cases.make_batches(1)))

    for heard in (torch.save, nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        imported_before = heard.__wrapped__
        assert pickle.loads(pickle.dumps(imported_before)) is imported_before
        assert pickle.loads(pickle.dumps(heard)) is heard
    assert pickle.loads(pickle.dumps(torch.manual_seed)) is torch.manual_seed
