"""Which values must be finite in a checkpoint: weights, moments, norm statistics. Infinities by design are saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard, GuardConfig, Severity
from steadygrad.config import CheckpointConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")


class Best:
    """A user's early stopping, which starts at infinity."""

    def __init__(self, value: float = math.inf) -> None:
        self.best = torch.full((2,), value)

    def state_dict(self) -> dict[str, Tensor]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.best = state["best"]


class Masked(nn.Module):
    """Creates its mask in each forward; finite at first."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("mask", torch.zeros(4), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.mask = torch.zeros(4).masked_fill(torch.tensor([True, False, True, False]), -math.inf)
        return self.norm(self.inner(x))


def train(model: nn.Module, guard: Guard, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))


def make(tmp_path: Path, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Guard]:
    model = model if model is not None else nn.Linear(4, 1)
    return model, Guard(model, torch.optim.Adam(model.parameters(), lr=0.01), run_dir=tmp_path, **options)


def find_findings(guard: Guard, kind: str) -> list[Any]:
    return [finding for finding in guard.findings if finding.kind == kind]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_extra_of_the_user_is_saved_unchanged_and_reported_once(tmp_path: Path, value: float) -> None:
    model, guard = make(tmp_path, extras={"early": Best(value)})
    for _ in range(3):
        train(model, guard, 1)
        save = guard.save()
        assert save is not None
        assert save.wait() is not None
    guard.close()
    assert [finding.severity for finding in find_findings(guard, "infinite_state")] == [Severity.INFO]
    assert "extras.early.best" in find_findings(guard, "infinite_state")[0].message
    early = Best(0.0)
    model, guard = make(tmp_path, extras={"early": early})
    assert guard.resume() == 3
    assert torch.equal(early.best.nan_to_num(), torch.full((2,), value).nan_to_num())
    guard.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_becomes_infinite_by_design_is_saved(tmp_path: Path, persistent: bool) -> None:
    model, guard = make(tmp_path, Masked(persistent=persistent))
    train(model, guard)
    save = guard.save()
    assert save is not None
    assert save.wait() is not None
    train(model, guard)
    assert guard.save() is not None
    guard.close()
    assert len(find_findings(guard, "infinite_state")) == 1
    model, guard = make(tmp_path, Masked(persistent=persistent))
    assert guard.resume() == 6
    assert torch.equal(model.get_buffer("mask").isinf(), torch.tensor([True, False, True, False]))
    guard.close()


def test_the_copy_of_such_a_buffer_in_an_average_is_saved_too(tmp_path: Path) -> None:
    model = Masked()
    ema = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    model, guard = make(tmp_path, model, ema=ema)
    train(model, guard)
    assert guard.save() is not None
    guard.close()


def test_cleaning_keeps_such_a_buffer(tmp_path: Path) -> None:
    model, guard = make(tmp_path, Masked(), config=GuardConfig(checkpoint=CheckpointConfig(clean=True)))
    train(model, guard)
    save = guard.save()
    assert save is not None
    save.wait()
    guard.close()
    assert guard.checkpoints.list()[0].cleaned == {}


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["inner.weight", "norm.running_var", "moment"])
def test_weights_moments_and_statistics_must_be_finite(tmp_path: Path, name: str, value: float) -> None:
    model, guard = make(tmp_path, Masked())
    train(model, guard)
    with torch.no_grad():
        if name == "moment":
            optimizer = guard._training.optimizers[0]
            optimizer.state[model.get_parameter("inner.weight")]["exp_avg"].fill_(value)
        else:
            dict(model.named_parameters())[name].fill_(value) if "weight" in name else model.get_buffer(name).fill_(
                value
            )
    assert guard.save() is None
    assert len(find_findings(guard, "checkpoint_failed")) == 1
    assert not find_findings(guard, "infinite_state")
    guard.close()


def test_a_nan_in_a_buffer_is_a_fault(tmp_path: Path) -> None:
    model, guard = make(tmp_path, Masked())
    train(model, guard)
    model.get_buffer("mask").fill_(math.nan)
    assert guard.save() is None
    guard.close()
