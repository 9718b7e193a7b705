"""The gradient of one sample is looked at once, and training never notices."""

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
    """Train layers that are recomputed with other random numbers; return the model and the next random number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = Guard(model, optimizer, config=GuardConfig(clip=None)) if guarded else None

    def compute_loss(x: Tensor, y: Tensor) -> Tensor:
        outputs = checkpoint(lambda inputs: model(inputs), x, use_reentrant=False, preserve_rng_state=False)
        return F.cross_entropy(outputs, y)

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


def test_weights_and_random_numbers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    differentiate = row_gradients._differentiate
    monkeypatch.setattr(
        row_gradients, "_differentiate", lambda *args, **more: looked.append(args) or differentiate(*args, **more)
    )
    (plain, plain_next), (guarded, guarded_next) = train(guarded=False), train(guarded=True)

    assert len(looked) == 1
    assert plain_next == guarded_next
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), guarded.parameters(), strict=True))
