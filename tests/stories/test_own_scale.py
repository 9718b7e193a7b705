"""Optimizers that search a loss scale themselves, or clean their gradients: a bad step is theirs to deal with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import run_guarded, run_plainly
from scripts.own_scale import Halving, train, train_cleaned
from torch import nn

from steadygrad import Guard
from steadygrad.facts import Severity


@pytest.mark.parametrize("kind", ["halving", "masters"])
def test_the_search_for_its_scale_is_left_to_the_optimizer(kind: str) -> None:
    guards: list[Guard] = []

    def open_guard(model: nn.Module, optimizer: Any) -> Guard:
        guards.append(Guard(model, optimizer))
        return guards[0]

    expected, plain = train(kind)
    model, optimizer = train(kind, guard=open_guard)
    assert 1 < optimizer.scale == plain.scale < 2**40
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))
    assert all(finding.severity is Severity.INFO for finding in guards[0].findings)


@pytest.mark.parametrize("kind", ["inside", "hook"])
def test_an_optimizer_that_cleans_its_gradients_takes_the_step(kind: str) -> None:
    guards: list[Guard] = []

    def open_guard(model: nn.Module, optimizer: Any) -> Guard:
        guards.append(Guard(model, optimizer))
        return guards[0]

    expected, model = train_cleaned(kind), train_cleaned(kind, open_guard)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))
    assert guards[0].stats()["num_skipped"] == 0


def test_a_script_with_such_optimizers_ends_with_identical_bits(tmp_path: Path) -> None:
    plain = run_plainly(tmp_path / "plain", "own_scale.py")
    guarded = run_guarded(tmp_path / "guarded", "own_scale.py")
    assert (plain.code, guarded.code) == (0, 0), guarded.err
    assert guarded.out == plain.out


class Counting(torch.optim.Adam):
    """Asks whether the gradients are finite, only to count, and steps anyway."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 1e-2)
        self.num_bad, self.trust = 0, 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if any(not p.grad.isfinite().all() for group in self.param_groups for p in group["params"]):
            self.num_bad, self.trust = self.num_bad + 1, self.trust / 2
        super().step(closure)


@pytest.mark.parametrize("bad_step", [0, 3], ids=["before it has state", "later"])
def test_one_that_steps_all_the_same_is_put_back(bad_step: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters())
    guard = Guard(model, optimizer)
    for step in range(6):
        loss = model(torch.randn(8, 3)).square().mean()
        before = [p.detach().clone() for p in model.parameters()]
        state = {key: dict(value) for key, value in optimizer.state.items()}
        copies = [t.clone() for value in state.values() for t in value.values()]
        optimizer.zero_grad()
        loss.backward()
        if step == bad_step:
            model.weight.grad[0, 0] = float("inf")  # type: ignore[index]
        guard.step()
        if step == bad_step:
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
            assert {key: dict(value) for key, value in optimizer.state.items()} == state
            assert all(torch.equal(t, c) for t, c in zip((t for v in state.values() for t in v.values()), copies))
    assert (optimizer.num_bad, optimizer.trust) == (0, 1.0)
    assert [f.kind for f in guard.findings if f.severity is Severity.ERROR] == ["nonfinite_gradient"]
    assert all(p.isfinite().all() for p in model.parameters())


class Strict(Halving):
    """Gives up below a least scale."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        if self.scale < 1:
            raise FloatingPointError("the least loss scale is reached")


def test_an_error_of_its_own_reaches_the_program() -> None:
    model = nn.Linear(3, 2)
    optimizer = Strict(torch.optim.SGD(model.parameters(), 0.1))
    optimizer.scale = 4.0
    guard = Guard(model, optimizer)

    def take_bad_steps() -> None:
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            model.weight.grad[0, 0] = float("nan")  # type: ignore[index]
            guard.step()

    with pytest.raises(FloatingPointError, match="least loss scale"):
        take_bad_steps()
    assert optimizer.scale == 0.5
