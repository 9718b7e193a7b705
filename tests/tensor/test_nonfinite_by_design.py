"""A parameter that is -inf by design is trained beside, saved, resumed and rolled back; one that does harm is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Action, Guard, GuardConfig, SnapshotConfig, TrainingHalted


class Transitions(nn.Module):
    """Scores of what may follow, -inf where something cannot; trained by the optimizer like the rest."""

    def __init__(self, impossible: float) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)
        self.allowed = nn.Parameter(torch.tensor([0.0, impossible, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scores(x) + self.allowed).logsumexp(1)


def make(impossible: float, folder: Path) -> tuple[Transitions, Guard]:
    torch.manual_seed(0)
    model = Transitions(impossible)
    config = GuardConfig(clip=None, snapshots=SnapshotConfig(every=5, good_after=2))
    return model, Guard(model, torch.optim.Adam(model.parameters(), 1e-2), run_dir=folder, config=config)


def test_a_parameter_that_is_infinite_by_design_is_saved_and_rolled_back(tmp_path: Path) -> None:
    model, guard = make(-math.inf, tmp_path)

    def compute_loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    for _ in range(20):
        guard.step(compute_loss, torch.randn(8, 4))
    assert guard.health()["overall_healthy"]
    assert all(one.severity.rank == 0 for one in guard.findings)
    guard.save()
    saved = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(12):
        guard.step(lambda x: compute_loss(x) * math.nan, torch.randn(8, 4))
    assert Action.ROLLBACK in {one.outcome.action for one in guard.incidents}
    assert model.allowed[1] == -math.inf
    guard.close()

    model, guard = make(-math.inf, tmp_path)
    assert guard.resume() is not None
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    guard.close()


def test_a_parameter_that_makes_the_loss_bad_is_neither_saved_nor_returned_to(tmp_path: Path) -> None:
    model, guard = make(math.nan, tmp_path)
    with pytest.raises(TrainingHalted):
        guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
    assert not guard.health()["parameters_healthy"]
    assert guard.save() is None
    assert "checkpoint_failed" in {one.kind for one in guard.findings}
    guard.close()
