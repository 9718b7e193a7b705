"""Lazy modules, whose parameters the first forward makes, are guarded from their first step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training import assert_same, loss_of, make_batches, snapshot

from steadygrad import Guard, GuardConfig, Severity
from steadygrad.testing import poison_batches

Batch = tuple[Tensor, Tensor]


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(16, 8), nn.LazyLinear(3))
    torch.manual_seed(1)  # the first forward draws the weights
    return model


def train_plain(model: nn.Module, batches: list[Batch], *, bad: int) -> dict[str, Tensor]:
    """Train without the bad batch, which makes the weights if it is the first."""
    optimizer, fn = torch.optim.AdamW(model.parameters(), lr=0.01), loss_of(model)
    for step, batch in enumerate(batches):
        loss = fn(batch) if step != bad or step == 0 else None
        if step == bad:
            model[1].reset_running_stats() if step == 0 else None
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return snapshot(model, optimizer)


@pytest.mark.parametrize("way", ["function", "loss", "own backward"])
@pytest.mark.parametrize("bad", [-1, 0, 4])
def test_a_lazy_model_trains_as_in_the_plain_loop_without_its_bad_batch(way: str, bad: int) -> None:
    batches = make_batches(8)
    expected = train_plain(make(), batches, bad=bad)
    model = make()
    optimizer, fn = torch.optim.AdamW(model.parameters(), lr=0.01), loss_of(model)
    with Guard(model, optimizer) as guard:
        for batch in poison_batches(batches, at={bad}):
            if way == "function":
                guard.step(fn, batch)
            elif way == "loss":
                guard.step(fn(batch))
            else:
                optimizer.zero_grad()
                fn(batch).backward()
                guard.step()
        guard.flush()
        assert_same(snapshot(model, optimizer), expected)
        found = {finding.step for finding in guard.findings if finding.severity != Severity.INFO}
        assert found == ({bad} if bad >= 0 else set())


def test_a_lazy_model_is_trained_in_the_autocast_of_the_settings() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=GuardConfig(autocast="bf16")) as guard:
        for batch in make_batches(3):
            guard.step(loss_of(model), batch)
        assert guard.last is None or not guard.last.skipped
