"""Looking at a model runs none of its code: a parametrized weight is computed when it is read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from steadygrad import Guard


@pytest.mark.parametrize("form", ["function", "backward"])
def test_spectral_norm_iterates_as_often_as_without_a_guard(form: str) -> None:
    states = []
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 8), parametrizations.spectral_norm(nn.Linear(8, 8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer) if guarded else None
        for _ in range(12):
            ids = torch.randint(8, (16,))
            if guard is not None and form == "function":
                guard.step(lambda ids, model=model: model(ids).square().mean(), ids)
                continue
            model(ids).square().mean().backward()
            (optimizer if guard is None else guard).step()
            optimizer.zero_grad()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
