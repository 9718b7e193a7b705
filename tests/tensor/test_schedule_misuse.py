"""A scheduler that the rates do not follow, or that moves twice, is reported; others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from listening import QUIET
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR
from training import loss_of, make_batches, make_model

from steadygrad import Guard, GuardConfig
from steadygrad.config import Interval

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler")
ABOUT_SCHEDULES = {"foreign_schedule", "doubled_schedule"}


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, with the same groups, as SAM is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def train(
    make: Callable[[torch.optim.Optimizer], Any],
    after_step: Callable[[Any, int], None] = lambda scheduler, step: None,
    *,
    config: GuardConfig = QUIET,
    wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
) -> list[str]:
    """Train twelve steps in epochs of two; return what was found about the schedule."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = make(optimizer)
    guard = Guard(model, wrap(optimizer), scheduler=scheduler, config=config)
    for step, batch in enumerate(make_batches(12)):
        guard.step(loss_of(model), batch)
        after_step(scheduler, step)
        if step % 2:
            guard.validate(1.0)
            guard.end_epoch()
    guard.close()
    return [finding.kind for finding in guard.findings if finding.kind in ABOUT_SCHEDULES]


def step_too(scheduler: LRScheduler, step: int) -> None:
    scheduler.step()


def make_step(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 3)


def test_a_scheduler_of_a_replaced_optimizer_is_reported_before_the_first_step() -> None:
    model = make_model()
    scheduler = make_step(torch.optim.SGD(model.parameters(), lr=0.1))

    guard = Guard(model, torch.optim.AdamW(model.parameters()), scheduler=scheduler, config=QUIET)

    assert [finding.kind for finding in guard.findings if finding.kind in ABOUT_SCHEDULES] == ["foreign_schedule"]


def test_a_scheduler_that_the_program_steps_too_is_reported_once() -> None:
    assert train(make_step, step_too) == ["doubled_schedule"]


def test_a_scheduler_stepped_twice_in_each_epoch_is_reported() -> None:
    config = GuardConfig(scheduler_interval=Interval.EPOCH, clip=None)

    assert train(make_step, lambda s, step: s.step() if step % 2 else None, config=config) == ["doubled_schedule"]


@pytest.mark.parametrize(
    "make", [make_step, ReduceLROnPlateau, lambda o: SequentialLR(o, [make_step(o), make_step(o)], [4])]
)
def test_a_scheduler_that_only_the_guard_steps_is_left_alone(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    assert train(make) == []


@pytest.mark.parametrize("steps", [{0}, {2, 5}, {0, 1, 4, 5}])
def test_a_scheduler_that_the_program_moves_now_and_then_is_left_alone(steps: set[int]) -> None:
    assert train(make_step, lambda s, step: s.step() if step in steps else None) == []


@pytest.mark.parametrize("outside", [False, True])
def test_a_scheduler_of_a_wrapped_optimizer_is_its_own(outside: bool) -> None:
    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        return make_step(Wrapper(optimizer) if outside else optimizer)

    assert train(make, wrap=(lambda o: o) if outside else Wrapper) == []


def test_a_schedule_without_an_optimizer_is_left_alone() -> None:
    class Schedule:
        def step(self) -> None:
            pass

    assert train(lambda optimizer: Schedule()) == []
