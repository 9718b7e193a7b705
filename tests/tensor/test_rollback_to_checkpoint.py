"""With a state too large for snapshots, a rollback uses the newest good checkpoint and keeps the user's objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard, GuardConfig
from steadygrad.config import CheckpointConfig, SnapshotConfig
from steadygrad.facts import Action

CONFIG = GuardConfig(
    snapshots=SnapshotConfig(max_bytes=100, skip_batches=2),
    checkpoint=CheckpointConfig(every=10, good_after=3),
)


class Training:
    """A small regression whose batches come from the global generator, with a scheduler of the user."""

    def __init__(self, run_dir: Path | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.99)
        self.guard = Guard(self.model, self.optimizer, config=CONFIG, run_dir=run_dir)
        self.seen: list[float] = []

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            x = torch.randn(16, 4)
            self.seen.append(x[0, 0].item())
            self.guard.step(self.loss, x)
            self.schedule.step()
        self.guard.flush()


def test_broken_weights_are_restored_from_the_newest_good_checkpoint(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    training.train(38)
    training.model[0].weight.data[0, 0] = float("nan")  # like a failing memory chip: no version changes
    training.train(6)
    went_back = [i for i in training.guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert [i.outcome.after["step"] for i in went_back] == [30], [i.outcome.message for i in training.guard.incidents]
    assert "to the checkpoint before step 30" in went_back[0].outcome.message
    assert all(p.isfinite().all() for p in training.model.parameters())
    training.train(30)
    assert training.guard.last is not None
    assert not training.guard.last.skipped
    # The user's schedule has moved on, and no batch was repeated.
    assert training.optimizer.param_groups[0]["lr"] == training.schedule.get_last_lr()[0]
    assert abs(training.optimizer.param_groups[0]["lr"] - 0.01 * 0.99**74) < 1e-12
    assert len(set(training.seen)) == len(training.seen)
    training.guard.close()


def test_the_saved_state_is_restored_exactly(tmp_path: Path) -> None:
    training = Training(tmp_path / "run")
    training.train(30)
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    moments = {p: {k: v.clone() for k, v in s.items()} for p, s in training.optimizer.state.items()}
    training.train(8)
    restored = training.guard._saver.checkpoints.roll_back(lambda _: False)
    assert restored == (30, [])
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for parameter, state in training.optimizer.state.items():
        for key, value in state.items():
            assert torch.equal(value, moments[parameter][key]), key
    training.guard.close()


def test_it_is_reported_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(tmp_path / "run")
    training.train(1)
    said = [record.getMessage() for record in caplog.records if "no snapshots" in record.getMessage()]
    assert len(said) == 1
    assert "A rollback goes to the newest good checkpoint" in said[0]
    training.guard.close()


def test_without_a_checkpoint_the_run_halts_as_before() -> None:
    training = Training(None)
    training.train(20)
    assert training.guard._saver.checkpoints.roll_back(lambda _: False) is None
    training.guard.close()
