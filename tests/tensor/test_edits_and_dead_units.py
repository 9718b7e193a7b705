"""Units that die are reported though the program swaps averaged weights in and out."""

from __future__ import annotations

import copy

import torch
from torch import nn

from steadygrad import Guard, GuardConfig


def test_units_that_die_between_two_edits_are_reported() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    average = copy.deepcopy(model)
    with Guard(model, torch.optim.AdamW(model.parameters(), 3e-3), config=GuardConfig(clip=None)) as guard:
        for step in range(300):
            x = torch.randn(16, 4)
            guard.step(lambda x: (model(x).squeeze(1) - x.sin().sum(1)).square().mean(), x)
            if step % 50 == 49:  # evaluated with the averaged weights, then back
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(average.state_dict())
                model.load_state_dict(own)
            if step == 230:
                model[0].bias.data[:30] = -1e3  # a write that torch does not count, as a bad update is none
    (found,) = [one for one in guard.findings if one.kind == "dead_units"]
    assert found.severity.value == "warning"
    assert 231 <= found.step <= 240
