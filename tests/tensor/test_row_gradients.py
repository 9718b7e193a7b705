"""The gradient of one sample is checked once, and training is not affected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steadygrad import Guard, GuardConfig
from steadygrad.measure import row_gradients


def train(*, guarded: bool) -> tuple[nn.Module, float]:
    """Return a trained model and the next random number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = Guard(model, optimizer, config=GuardConfig(clip=None)) if guarded else None

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    for _ in range(4):
        x, y = torch.randn(16, 6), torch.randint(4, (16,))
        if guard is not None:
            guard.step(compute_loss, x, y)
        else:
            optimizer.zero_grad()
            compute_loss(x, y).backward()
            optimizer.step()
    if guard is not None:
        guard.close()
    return model, torch.rand(()).item()


def test_weights_and_random_numbers_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    differentiate = row_gradients._differentiate
    monkeypatch.setattr(
        row_gradients, "_differentiate", lambda *args, **more: looked.append(args) or differentiate(*args, **more)
    )
    (plain, plain_next), (guarded, guarded_next) = train(guarded=False), train(guarded=True)

    assert len(looked) == 1
    assert plain_next == guarded_next
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), guarded.parameters(), strict=True))


@pytest.mark.parametrize("way", ["hook", "retained", "checkpoint"])
@pytest.mark.parametrize("handed", ["a function", "a loss", "nothing"])
def test_a_program_that_counts_backward_passes_sees_none_added(way: str, handed: str) -> None:
    """Hooks on tensors fire as often, retained gradients are equal, and nothing is recomputed."""

    def train(*, guarded: bool) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = Counting(way)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        guard = Guard(model, optimizer, config=GuardConfig(clip=None)) if guarded else None
        for _ in range(5):
            x, y = torch.randn(16, 3, 10), torch.randint(4, (16,))
            if guard is not None and handed == "a function":
                guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            elif guard is not None and handed == "a loss":
                guard.step(F.cross_entropy(model(x), y))
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                (optimizer if guard is None else guard).step()
            if way == "retained":
                assert model.hidden.grad is not None
                model.seen.append(float(model.hidden.grad.norm()))
        return model.seen, model.num_calls

    assert train(guarded=True) == train(guarded=False)


class Counting(nn.Module):
    """Counts every backward through its middle."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.conv, self.head, self.way = nn.Conv1d(3, 8, 3, padding=1), nn.Linear(8, 4), way
        self.seen: list[float] = []
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "checkpoint":
            return self.head(checkpoint(self.encode, x, use_reentrant=False))
        self.hidden = self.encode(x)
        if self.way == "hook":
            self.hidden.register_hook(lambda gradient: self.seen.append(float(gradient.norm())))
        else:
            self.hidden.retain_grad()
        return self.head(self.hidden)

    def encode(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.conv(x).relu().mean(2)
