"""The lines of incidents: a cause in full once, and the model's name if several are guarded."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard, GuardConfig, Policy
from steadygrad.view.terminal import FindingsHandler

CONFIG = GuardConfig(policy=Policy.patient())


class Generator(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


def make(kind: type[nn.Linear] = nn.Linear, run_dir: Path | None = None) -> tuple[nn.Linear, Guard]:
    torch.manual_seed(0)
    model = kind(2, 1)
    nn.init.ones_(model.weight)
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.0), config=CONFIG, run_dir=run_dir)


def root(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sqrt().mean()


def logarithm(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).log().mean()


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Return what a terminal shows."""
    shown, logger = io.StringIO(), logging.getLogger("steadygrad")
    handler = FindingsHandler(shown)
    logger.addHandler(handler)
    yield shown
    logger.removeHandler(handler)


BAD, GOOD = torch.full((2, 2), -5.0), torch.full((2, 2), 5.0)


def test_a_repeated_cause_is_printed_in_full_once_and_recorded_in_full_each_time(
    lines: io.StringIO, tmp_path: Path
) -> None:
    model, guard = make(run_dir=tmp_path)
    for x in (GOOD, BAD, GOOD, BAD, BAD):
        guard.step(root, model, x)
    guard.close()

    text = lines.getvalue()
    assert text.count("sqrt of a negative number is NaN") == 1
    again = [line for line in text.splitlines() if "the same cause as at step 1" in line]
    assert [line.partition(":")[0] for line in again] == ["step 3", "step 4"]
    assert all("born in aten.sqrt, test_lines.py:" in line for line in again)
    recorded = [json.loads(line)["cause"] for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [("negative" in cause["explanation"], cause["step"]) for cause in recorded] == [(True, s) for s in (1, 3, 4)]


def test_a_different_cause_is_printed_in_full(lines: io.StringIO) -> None:
    model, guard = make()
    for fn in (root, logarithm, root):
        guard.step(fn, model, BAD)
    guard.close()

    text = lines.getvalue()
    assert (text.count("sqrt of a negative number"), text.count("logarithm of a negative number")) == (1, 1)
    assert text.count("the same cause as at step 0") == 1


def test_lines_name_the_model_only_if_several_are_guarded(lines: io.StringIO) -> None:
    maker, making = make(Generator)
    making.step(root, maker, BAD)
    alone = lines.getvalue()
    critic, judging = make(Critic)
    judging.step(root, critic, BAD)
    making.step(logarithm, maker, BAD)
    both = lines.getvalue().removeprefix(alone)
    judging.close()
    making.step(root, maker, BAD)
    after = lines.getvalue().removeprefix(alone + both)
    making.close()

    assert "Generator" not in alone + after
    assert "error step 0 nonfinite_loss" in alone
    assert "Critic: step 0: NaN loss, born in aten.sqrt\n" in both
    assert "error Critic: step 0 nonfinite_loss" in both
    assert "Generator: step 1: NaN loss, born in aten.log\n" in both
    assert "error Generator: step 1 nonfinite_loss" in both


def test_models_of_one_class_are_numbered(lines: io.StringIO) -> None:
    (first, one), (second, other) = make(Critic), make(Critic)
    one.step(root, first, BAD)
    other.step(root, second, BAD)
    one.close()
    other.close()

    assert "error Critic: step 0" in lines.getvalue()
    assert "error Critic 2: step 0" in lines.getvalue()


def test_guards_of_one_model_are_named_after_the_parts_that_they_train(lines: io.StringIO) -> None:
    model = nn.ModuleDict({"actor": nn.Linear(2, 1), "critic": nn.Linear(2, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in model.values()]
    guards = [Guard(model, optimizer, config=CONFIG) for optimizer in optimizers]

    for part, guard in zip(model.values(), guards, strict=True):
        guard.step(root, part, BAD.abs().neg() * part.weight.detach().sign())
        guard.flush()

    assert "error ModuleDict.actor: step 0" in lines.getvalue()
    assert "error ModuleDict.critic: step 0" in lines.getvalue()


def test_two_guards_of_one_part_are_numbered(lines: io.StringIO) -> None:
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    guards = []  # each is alive while the other speaks
    for parameter in (model.weight, model.bias):
        guard = Guard(model, torch.optim.SGD([parameter], lr=0.0), config=CONFIG)
        guard.step(root, model, BAD)
        guard.flush()
        guards.append(guard)

    assert "error step 0" in lines.getvalue()
    assert "error Linear 2: step 0" in lines.getvalue()


def test_two_guards_of_one_model_are_not_several(lines: io.StringIO) -> None:
    model, one = make(Critic)
    other = Guard(model, torch.optim.SGD(model.parameters(), lr=0.0), config=CONFIG)
    one.step(root, model, BAD)
    one.close()
    other.close()

    assert "Critic" not in lines.getvalue()
