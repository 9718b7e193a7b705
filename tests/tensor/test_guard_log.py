"""Input from the program: `guard.log`, numbers besides the loss; `guard.scale_lr`, a changed rate."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Action, Guard, UsageError
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
        total = guard.step(loss, torch.ones(4, 3))
        guard.step(lambda x: model(x).square().mean(), torch.ones(4, 3))
    first, second = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert first["extra"].keys() == {"text", "image", "weight"}
    assert first["extra"]["text"] + 2 * first["extra"]["image"] == pytest.approx(float(total))
    assert "extra" not in second, "values of one step must not appear in the next"
    assert " weight=2" in (tmp_path / "train.log").read_text().splitlines()[0]


def test_values_of_the_same_name_from_several_microbatches_are_averaged() -> None:
    model, guard = make()
    for value in (1.0, torch.tensor(4.0)):
        guard.backward(model(torch.ones(1, 3)).mean() / 2)
        guard.log(accuracy=value)
    guard.step()
    assert guard.last is not None
    assert guard.last.extra == {"accuracy": 2.5}
    assert list_step(guard.last)["extra/accuracy"] == 2.5


def test_values_logged_again_in_a_replay_are_not_counted(tmp_path: Path) -> None:
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


def test_a_rate_lowered_by_the_program_stays_lowered_under_its_schedule_and_is_in_the_ledger() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    guard = Guard(model, optimizer, scheduler=scheduler)
    guard.step(lambda x: model(x).mean(), torch.ones(2, 3))
    guard.scale_lr(0.1, "the loss exploded")
    guard.scale_weight_decay(1.5, "it overfits")
    guard.step(lambda x: model(x).mean(), torch.ones(2, 3))
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    assert guard.stats()["current_learning_rate"] == pytest.approx(0.1 * 0.5**2 * 0.1)
    assert guard.stats()["weight_decay_factor"] == 1.5
    changes = [(i.finding.kind, i.verdict.reason, i.outcome.action) for i in guard.incidents]
    assert changes == [
        ("asked_for", "the loss exploded", Action.SCALE_LR),
        ("asked_for", "it overfits", Action.SCALE_WEIGHT_DECAY),
    ]


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "half"])
def test_an_invalid_factor_is_refused(factor: float) -> None:
    _, guard = make()
    with pytest.raises(UsageError, match=r"for the lr\. Give a number above 0"):
        guard.scale_lr(factor, "no reason")
