"""A loop that forgets zero_grad() gets a finding at its second step; a loop that clears its gradients never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from steadygrad import Guard
from steadygrad.measure.uncleared_gradients import NUM_STEPS, UnclearedGradientsWatch

Clear = Callable[[torch.optim.Optimizer], None]


def train(clear: Clear, *, num_steps: int = 6, num_microbatches: int = 1) -> Guard:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer)
    for _ in range(num_steps):
        for _ in range(num_microbatches):
            model(torch.randn(8, 4)).square().mean().backward()
        guard.step()
        clear(optimizer)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return guard


def kinds(guard: Guard) -> list[tuple[str, int]]:
    return [(finding.kind, finding.step) for finding in guard.findings if finding.kind == "stale_gradient"]


def test_a_forgotten_zero_grad_is_reported_at_the_second_step() -> None:
    guard = train(lambda optimizer: None)

    assert kinds(guard) == [("stale_gradient", 1)]
    finding = next(f for f in guard.findings if f.kind == "stale_gradient")
    assert finding.evidence["num_parameters"] == 4
    assert "zero_grad" in finding.advice


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_a_loop_that_clears_its_gradients_gets_no_finding(*, set_to_none: bool, num_microbatches: int) -> None:
    guard = train(lambda optimizer: optimizer.zero_grad(set_to_none=set_to_none), num_microbatches=num_microbatches)

    assert kinds(guard) == []


def test_the_hooks_are_removed_after_the_first_steps() -> None:
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    watched = []
    for _ in range(NUM_STEPS + 2):
        model(torch.ones(1, 2)).sum().backward()
        guard.step()
        model.zero_grad()
        watched.append(bool(model.weight._post_accumulate_grad_hooks))

    assert watched == [True] * NUM_STEPS + [False] * 2


def test_a_new_gradient_with_the_id_of_a_cleared_one_is_not_confused_with_it() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2)
    watch = UnclearedGradientsWatch([("weight", parameter)])
    watch.after_step()
    freed = id(parameter.grad)
    parameter.grad = None

    held = []  # the others stay, so that the freed address is reused sooner or later
    while id(new := torch.zeros(2)) != freed:
        held.append(new)
        assert len(held) < 10_000
    parameter.grad = new.add_(1)  # edited once, like a hook on the gradient would
    for hook in parameter._post_accumulate_grad_hooks.values():  # like a backward
        hook(parameter)

    assert watch.take() == ()


@pytest.mark.parametrize("how", ["close", "add_param_group"])
def test_no_hook_remains_when_the_guard_is_closed_or_watches_other_parameters(how: str) -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(nn.ModuleList([model, other]), optimizer)

    def step() -> None:
        (model(torch.ones(2, 4)) + other(torch.ones(2, 4))).square().mean().backward()
        guard.step()
        optimizer.zero_grad()

    step()
    assert len(model.weight._post_accumulate_grad_hooks) == 1
    if how == "close":
        guard.close()
        assert not model.weight._post_accumulate_grad_hooks
    else:
        optimizer.add_param_group({"params": list(other.parameters())})
        step()
        assert len(model.weight._post_accumulate_grad_hooks) == 1, "that of the new watch alone"
