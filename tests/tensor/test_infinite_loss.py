"""A loss of Inf whose gradients are finite: skipped, since nothing tells a harmless one from a harmful one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard, NonFiniteError
from steadygrad.facts import Severity


class Half(nn.Module):
    """A layer in float16; a sum over its outputs passes 65504."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 64).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.half())  # type: ignore[no-any-return]


def add_up(model: nn.Module, x: Tensor) -> Tensor:
    """Return a sum that overflows: its gradient, twice the error, does not."""
    return (model(x) - 50).square().sum()  # type: ignore[no-any-return]


def find_gradient(loss: Tensor, model: nn.Module) -> list[float]:
    return [float(g.abs().max()) for g in torch.autograd.grad(loss, list(model.parameters()))]


def run_away(model: Half) -> Tensor:
    """Weights far too large, and errors that count by their sign: gradients are those of a healthy step."""
    with torch.no_grad():
        model.layer.bias.fill_(2000.0)
    return (model(torch.ones(8, 6)) - 1).abs().sum()


def aim_at_infinity(model: Half) -> Tensor:
    """A target of Inf, the code for a missing value: the gradient pushes every output towards it."""
    return (model(torch.ones(8, 6)) - math.inf).abs().float().mean()


@pytest.mark.parametrize("harm", [run_away, aim_at_infinity])
def test_gradients_of_the_usual_size_do_not_show_that_an_infinite_loss_is_harmless(
    harm: Callable[[Half], Tensor],
) -> None:
    model = Half()
    guard = Guard(model, torch.optim.SGD(model.parameters(), 1e-3))
    usual = find_gradient((model(torch.ones(8, 6)) - 1).abs().sum(), model)
    loss = harm(model)
    assert loss == math.inf
    assert max(find_gradient(harm(model), model)) <= max(usual)
    before = [p.clone() for p in model.parameters()]

    guard.step(loss)
    guard.flush()

    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    assert guard.findings[0].message.endswith("the loss is Inf, and all gradients are finite")


def test_a_loss_that_the_guard_is_not_given_may_overflow() -> None:
    plain, model = Half(), Half()
    plain_optimizer, optimizer = (torch.optim.SGD(one.parameters(), 1e-6) for one in (plain, model))
    guard = Guard(model, optimizer)
    for _ in range(40):
        x = torch.randn(64, 6)
        for one in (plain_optimizer, optimizer):
            one.zero_grad()
        add_up(plain, x).backward()
        plain_optimizer.step()
        loss = add_up(model, x)
        loss.backward()
        guard.step()
        assert loss == math.inf
    guard.close()

    assert [f.kind for f in guard.findings if f.severity is not Severity.INFO] == []
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))


def test_a_run_that_ends_by_such_losses_says_that_its_gradients_are_finite() -> None:
    model = Half()
    guard = Guard(model, torch.optim.SGD(model.parameters(), 1e-6))

    def train() -> None:
        for _ in range(100):
            guard.step(add_up, model, torch.randn(64, 6))

    with pytest.raises(NonFiniteError, match=r"all gradients are finite.*in float32"):
        train()
