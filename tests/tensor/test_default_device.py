"""A guard works while torch's default device is another than the model's: what it keeps on the host stays there.

`meta` stands for any other device: a tensor that is made there by mistake cannot be read, pinned or copied from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import AdaGC, Guard, GuardConfig, ZClip
from steadygrad.config import ClipStrategy

NUM_STEPS, BAD_STEP = 110, 50  # with a periodic scan, and several snapshots


@contextlib.contextmanager
def default_device(name: str | None) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def train(run_dir: Path, device: str | None, config: GuardConfig) -> tuple[list[Tensor], str]:
    """Train with a NaN in one batch, save, go back by resume and by rollback; return the weights and the cause."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = torch.randn(NUM_STEPS, 16, 4)
    batches[BAD_STEP, 3] = torch.nan
    with default_device(device), Guard(model, optimizer, run_dir=run_dir, config=config) as guard:
        for step, batch in enumerate(batches):
            guard.log(number=step)
            guard.step(lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean(), batch)
            if step == NUM_STEPS // 2:
                save = guard.save()
                assert save is not None
                assert save.wait() is not None
        guard.validate(1.0)
        trained = [p.detach().clone() for p in model.parameters()]
        assert guard.resume() is not None
        assert guard._rollback.snapshots.restore() is not None
        assert [incident.step for incident in guard.incidents] == [BAD_STEP]
        cause = guard.incidents[0].cause
        assert cause is not None
        return trained + [p.detach().clone() for p in model.parameters()], cause.headline


@pytest.mark.parametrize("clip", [None, ZClip(), AdaGC()], ids=repr)
def test_a_training_is_the_same_with_another_default_device(tmp_path: Path, clip: ClipStrategy | None) -> None:
    config = GuardConfig(clip=clip)
    expected, cause = train(tmp_path / "usual", None, config)
    found, cause_found = train(tmp_path / "other", "meta", config)
    assert cause_found == cause
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_default_settings_work_with_another_default_device(tmp_path: Path) -> None:
    expected, cause = train(tmp_path / "usual", None, GuardConfig())
    found, cause_found = train(tmp_path / "other", "meta", GuardConfig())
    assert cause_found == cause
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
