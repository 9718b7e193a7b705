"""A step fails but its replay succeeds: only code that the replay leaves out, and that could fail, is suspected."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard
from steadygrad.diagnose import is_replaying
from steadygrad.diagnose.investigator import MOST_CAPTURES
from steadygrad.facts import Cause

CHANGED = "changed by the program between backward() and the step"


def make(**settings: Any) -> tuple[nn.Linear, Guard]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), **settings)


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (model(x) * x[:, :1]).square().mean()


def fail_once(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Like a bit flip in backward: gradients are NaN in the step itself, and never in a replay."""

    def fn(x: Tensor) -> Tensor:
        out = model(x)
        out.register_hook(lambda grad: grad if is_replaying() else grad * torch.nan)
        return out.mean()

    return fn


def clip_by_hand(model: nn.Module, *, in_place: bool) -> None:
    """Divides by a norm that may be 0."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    coefficient = 1.0 / torch.stack([gradient.norm() for gradient in gradients]).norm()
    for parameter in model.parameters():
        assert parameter.grad is not None
        if in_place:
            parameter.grad.mul_(coefficient)
        else:
            parameter.grad = parameter.grad * coefficient


def get_cause(guard: Guard) -> Cause:
    guard.close()
    cause = guard.incidents[-1].cause
    assert cause is not None
    return cause


@pytest.mark.parametrize("in_place", [True, False])
def test_a_custom_clip_that_divides_by_zero_is_named(in_place: bool) -> None:
    model, guard = make()
    for step in range(4):
        guard.backward(loss_of(model), torch.zeros(8, 4) if step == 2 else torch.randn(8, 4))
        clip_by_hand(model, in_place=in_place)
        guard.step()

    cause = get_cause(guard)
    assert [incident.step for incident in guard.incidents] == [2]
    assert CHANGED in cause.headline
    assert "all gradients are 0 in the replay" in cause.explanation
    assert cause.fixes[0].startswith("torch.nn.utils.clip_grad_norm_(")
    assert "hardware" not in str(cause)


def test_a_failure_inside_one_call_is_not_attributed_to_code_between_calls() -> None:
    model, guard = make()
    guard.step(fail_once(model), torch.randn(8, 4))

    cause = get_cause(guard)
    assert "suspect the hardware" in cause.note
    assert "between backward()" not in str(cause)


def test_unchanged_gradients_are_not_reported_as_changed() -> None:
    model, guard = make()
    guard.backward(fail_once(model), torch.randn(8, 4))
    guard.step()

    cause = get_cause(guard)
    assert "changed by the program" not in str(cause)
    assert "suspect code that changes the gradients between backward() and the step; if there is none" in cause.note


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_nan_from_backward_is_not_attributed_to_the_clip_after_it() -> None:
    model, guard = make()
    guard.backward(lambda x: (model(x) * 0).square().sum().sqrt(), torch.randn(8, 4))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    guard.step()

    assert get_cause(guard).op == "aten.sqrt"


def test_a_bad_loss_is_not_attributed_to_the_clip_after_it() -> None:
    model, guard = make()
    guard.backward(lambda x: model(x).mean() * (1.0 if is_replaying() else torch.nan), torch.randn(8, 4))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    guard.step()

    cause = get_cause(guard)
    assert "changed by the program" not in str(cause)
    assert "code that changes the gradients" not in str(cause)


def test_a_nondeterministic_step_is_reported_as_such_whatever_follows() -> None:
    model, guard = make()

    def fn(x: Tensor) -> Tensor:
        noise = 1.0 + int.from_bytes(os.urandom(4), "little") / 2**33
        out = model(x) * noise
        out.register_hook(lambda grad: grad if is_replaying() else grad * torch.nan)
        return out.mean()

    guard.backward(fn, torch.randn(8, 4))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    guard.step()

    cause = get_cause(guard)
    assert "not deterministic" in cause.note
    assert "changed by the program" not in str(cause)


def test_a_released_microbatch_is_reported_as_missing() -> None:
    model, guard = make()
    num = MOST_CAPTURES + 4
    for place in range(num):
        x = torch.randn(8, 4)
        guard.backward(
            lambda x: (model(x).sqrt() if x.sum().isnan() else model(x)).mean(), x * torch.nan if not place else x
        )
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    guard.step()

    cause = get_cause(guard)
    assert cause.note.startswith(f"the last {MOST_CAPTURES} of {num} microbatches were replayed, and are healthy")
    assert "hardware" not in str(cause)


def test_a_hook_that_replays_skip_is_suspected() -> None:
    model, guard = make()

    def normalise(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(parameter.grad.norm())

    model.weight.register_post_accumulate_grad_hook(normalise)
    guard.step(loss_of(model), torch.randn(8, 4))
    guard.step(loss_of(model), torch.zeros(8, 4))

    assert "suspect the hook on the gradient of weight, which no replay runs" in get_cause(guard).note


def test_an_overflow_of_the_loss_scale_is_not_attributed_to_unscaling() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    model, guard = make(scaler=scaler)
    guard.backward(lambda x: (model(x) * 100).square().mean(), torch.randn(8, 4))
    guard.step()
    guard.close()

    assert all("changed by the program" not in str(incident.cause) for incident in guard.incidents)
