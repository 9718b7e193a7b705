"""Units that die are reported though the program edits weights or buffers; those that it shuts itself are not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

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


class Gated(nn.Module):
    """Its hidden units pass a gate of 0 or 1, a buffer; others count forwards, and steps outside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 32), nn.Linear(32, 1)
        self.register_buffer("gate", torch.ones(32))
        self.register_buffer("age", torch.zeros(()))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.last(self.first(x).relu() * self.gate)  # type: ignore[no-any-return]


def train_gated(
    *, shuts: bool = False, dies: bool = False, counts: bool = False, bad: bool = False
) -> list[tuple[str, int]]:
    torch.manual_seed(0)
    model = Gated()
    with Guard(model, torch.optim.AdamW(model.parameters(), 3e-3), config=GuardConfig(clip=None)) as guard:
        for step in range(200):
            if shuts and step in (60, 120):
                model.gate[: {60: 20, 120: 30}[step]] = 0
            if dies and step == 130:
                model.first.bias.data[:30] = -1e3
            if counts:
                model.age += 1
            x = torch.randn(16, 4) * (float("nan") if bad and step == 129 else 1)
            guard.step(lambda x: (model(x).squeeze(1) - x.sin().sum(1)).square().mean(), x)
    return [(one.kind, one.step) for one in guard.findings if one.severity.value != "info"]


def test_units_whose_gate_the_program_shuts_are_not_dead() -> None:
    assert train_gated(shuts=True) == []


@pytest.mark.parametrize(
    "settings", [{}, {"counts": True}, {"bad": True}], ids=["alone", "and one that counts", "after a step was replayed"]
)
def test_units_that_die_beside_a_buffer_are_reported(settings: dict[str, bool]) -> None:
    assert ("dead_units", 130) in train_gated(dies=True, **settings)
