"""NaN that a program keeps on purpose, in buffers and weights that no step reads: nothing is skipped or undone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad import Guard
from steadygrad.facts import Severity


class Scored(nn.Module):
    """Keeps the accuracy of each class of the batch: 0/0 for one that does not occur."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
        self.register_buffer("accuracy", torch.zeros(5))

    def forward(self, number: int) -> Tensor:
        y = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.08, 0.02]), 16, replacement=True)
        out = self.body(F.one_hot(y, 8) + 0.5 * torch.randn(16, 8))
        hits = torch.zeros(5).index_add_(0, y, (out.argmax(1) == y).float())
        self.accuracy.copy_(hits / torch.bincount(y, minlength=5).float())
        return F.cross_entropy(out, y)


class Remembering(nn.Module):
    """Remembers the last error of each sample; the program forgets them by writing NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 1)
        self.register_buffer("last", torch.zeros(64))
        self.x = torch.randn(64, 6)

    def forward(self, number: int) -> Tensor:
        if number >= 50 and number % 40 == 30:
            self.last.fill_(math.nan)
        at = torch.randperm(64)[:8]
        errors = (self.body(self.x[at]).squeeze(1) - self.x[at, 0]).square()
        self.last[at] = errors.detach()
        return errors.mean()


class Searching(nn.Module):
    """Chooses among operations; the program prunes one by writing -Inf into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))
        self.choice = nn.Parameter(torch.zeros(4))

    def forward(self, number: int) -> Tensor:
        if number == 150:
            with torch.no_grad():
                self.choice[self.choice.argmin()] = -math.inf
        x, weights = torch.randn(32, 4), self.choice.softmax(0)
        out = sum(weights[i] * one(x) for i, one in enumerate(self.operations) if weights[i] > 0)
        return F.mse_loss(out.squeeze(1), x[:, 0])


def train(make: Callable[[], nn.Module], *, guarded: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    guard = Guard(model, optimizer) if guarded else None
    for number in range(420):
        if guard is not None:
            guard.step(model, number)
        else:
            optimizer.zero_grad()
            model(number).backward()
            optimizer.step()
    return [t.detach().nan_to_num(nan=-7.0) for t in (*model.parameters(), *model.buffers())], guard


@pytest.mark.parametrize("make", [Scored, Remembering, Searching])
def test_nan_that_no_step_reads_is_left_alone(make: Callable[[], nn.Module]) -> None:
    plain, _ = train(make, guarded=False)
    states, guard = train(make, guarded=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, states))
    assert [f for f in guard.findings if f.severity is not Severity.INFO] == []


def test_a_weight_that_the_program_made_infinite_is_saved_until_it_is_nan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Searching()
    with Guard(model, torch.optim.Adam(model.parameters(), 3e-3), run_dir=tmp_path) as guard:
        for number in range(300):
            guard.step(model, number)
        assert guard.health()["overall_healthy"]
        assert guard.save() is not None
        model.operations[0].weight.data.fill_(math.nan)
        assert not guard.health()["parameters_healthy"]
        assert guard.save() is None


class Carrying(nn.Module):
    """Carries a state in a buffer from step to step: NaN in it spoils the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x) + self.state
        self.state.copy_(0.9 * self.state + 0.1 * x.detach().mean(0))
        return out[:-1].square().mean()  # the sample that spoils the state is not in this loss


def test_nan_that_the_next_step_reads_is_taken_back() -> None:
    model = Carrying()
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.01))
    for number in range(12):
        x = torch.randn(8, 4)
        if number == 6:
            x[-1] = math.nan
        guard.step(model, x)
    assert guard.stats()["num_skipped"] == 1
    assert model.state.isfinite().all()
    assert all(p.isfinite().all() for p in model.parameters())
