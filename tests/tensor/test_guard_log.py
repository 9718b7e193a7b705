"""`guard.log`: numbers that a program tells beside the loss reach the record of their own step."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard, UsageError
from steadygrad.record.series import list_step


def make(run_dir: Path | None = None) -> tuple[nn.Module, Guard]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=run_dir)


def test_the_terms_of_a_loss_are_in_the_record_of_their_step(tmp_path: Path) -> None:
    model, guard = make(tmp_path)

    def loss(x: Tensor) -> Tensor:
        text, image = model(x).square().mean(), model(x).abs().mean()
        guard.log(text=text, image=image, weight=2)
        return text + 2 * image

    with guard:
        told = guard.step(loss, torch.ones(4, 3))
        guard.step(lambda x: model(x).square().mean(), torch.ones(4, 3))
    first, second = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert first["extra"].keys() == {"text", "image", "weight"}
    assert first["extra"]["text"] + 2 * first["extra"]["image"] == pytest.approx(float(told))
    assert "extra" not in second, "what was told of one step is not told of the next"
    assert " weight=2" in (tmp_path / "train.log").read_text().splitlines()[0]


def test_microbatches_that_tell_the_same_name_are_averaged() -> None:
    model, guard = make()
    for value in (1.0, torch.tensor(4.0)):
        guard.backward(model(torch.ones(1, 3)).mean() / 2)
        guard.log(accuracy=value)
    guard.step()
    assert guard.last is not None
    assert guard.last.extra == {"accuracy": 2.5}
    assert list_step(guard.last)["extra/accuracy"] == 2.5


def test_what_a_replay_tells_again_is_not_counted(tmp_path: Path) -> None:
    model, guard = make(tmp_path)

    def loss(x: Tensor) -> Tensor:
        root = model(x).square().mean().sqrt() + x.sqrt().mean()
        guard.log(root=root)
        return root

    guard.step(loss, -torch.ones(2, 3))
    assert guard.incidents[0].cause is not None, "the step was replayed"
    assert guard.last is not None
    assert math.isnan(guard.last.extra["root"])
    guard.step(lambda x: model(x).mean(), torch.ones(2, 3))
    assert guard.last.extra == {}


def test_a_tensor_of_several_numbers_is_refused_by_name() -> None:
    _, guard = make()
    with pytest.raises(UsageError, match=r"guard\.log got losses of shape \(3,\).*losses\.mean\(\)"):
        guard.log(losses=torch.ones(3))
