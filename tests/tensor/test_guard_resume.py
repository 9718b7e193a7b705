"""restore(save(x)) == x: an interrupted and resumed run equals an uninterrupted one, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from listening import last_of
from training import assert_same, loss_of, make_batches, make_model, snapshot

from steadygrad import (
    AdaGC,
    FixedNorm,
    Guard,
    GuardConfig,
    StepRecord,
    ZClip,
)
from steadygrad.config import ClipStrategy
from steadygrad.testing import poison_batches


class Run:
    """Everything in a training that can be saved and loaded."""

    def __init__(self, clip: ClipStrategy) -> None:
        self.model = make_model(norm=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.guard = Guard(self.model, self.optimizer, config=GuardConfig(clip=clip), scheduler=self.scheduler)

    def train(self, batches: Iterable[Any]) -> list[StepRecord]:
        records = []
        for batch in batches:
            self.guard.step(loss_of(self.model), batch)
            records.append(last_of(self.guard))
        return records

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "guard": self.guard,
        }

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        state = torch.load(io.BytesIO(data), weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def as_story(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    """Return records without the clock, and with NaN spelled so that it equals itself."""
    return [(r.step, str(r.loss), str(r.grad_norm), r.clip_coefficient, r.skipped, r.learning_rates) for r in records]


STRATEGIES: list[ClipStrategy] = [
    FixedNorm(max_norm=0.5),
    ZClip(warmup=3, z=1.0, max_norm=None),
    AdaGC(warmup=3, relative=1.0),
]


@pytest.mark.parametrize("stop", [0, 2, 3, 9])
@pytest.mark.parametrize("clip", STRATEGIES, ids=lambda clip: clip.kind)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(clip: ClipStrategy, stop: int) -> None:
    batches = list(poison_batches(make_batches(16), at={2, 11}))
    whole, first, second = Run(clip), Run(clip), Run(clip)

    story = whole.train(batches)
    begun = first.train(batches[:stop])
    second.load(first.save())
    resumed = second.train(batches[stop:])

    assert as_story(begun + resumed) == as_story(story)
    assert any(record.clipped for record in story[9:])
    assert [r.step for r in story if r.skipped] == [2, 11]
    for name, part in whole.parts.items():
        if name != "guard":
            assert_same(snapshot(part), snapshot(second.parts[name]))
    assert_same(snapshot(whole.guard), snapshot(second.guard))
    ours, theirs = whole.guard.stats(), second.guard.stats()
    same = ("num_steps", "num_skipped", "num_clipped", "mean_gradient_norm", "max_gradient_norm", "epoch")
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


def test_without_its_clip_state_a_resumed_run_would_differ() -> None:
    batches = make_batches(16)
    clip = STRATEGIES[1]
    whole, first, second = Run(clip), Run(clip), Run(clip)
    whole.train(batches)
    first.train(batches[:9])
    for name, part in first.parts.items():
        if name != "guard":
            second.parts[name].load_state_dict(part.state_dict())
    second.train(batches[9:])
    assert not torch.equal(whole.model[0].weight, second.model[0].weight)


@pytest.mark.parametrize("form", ["fn", "loss"])
def test_a_bad_step_right_after_loading_leaves_the_loaded_state(form: str) -> None:
    first, second = Run(FixedNorm()), Run(FixedNorm())
    batches = make_batches(6)
    first.train(batches[:4])
    second.train(batches[4:5])
    second.load(first.save())
    [bad] = poison_batches(batches[5:], at={0})
    if form == "fn":
        second.guard.step(loss_of(second.model), bad)
    else:
        second.guard.step(loss_of(second.model)(bad))
    assert last_of(second.guard).skipped
    assert_same(snapshot(first.model, first.optimizer), snapshot(second.model, second.optimizer))
