"""A NaN that makes a later function raise is traced to its line, and the error is passed on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from steadygrad import DiagnoseConfig, Guard, GuardConfig


class Logarithm(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x.log()))


def make(config: GuardConfig | None = None) -> tuple[Logarithm, Guard]:
    torch.manual_seed(0)
    model = Logarithm(4, 1)
    return model, Guard(model, torch.optim.AdamW(model.parameters()), config=config)


def make_batch(bad: bool) -> Tensor:
    x = torch.rand(8, 4) + 0.1
    if bad:
        x[3] = -1.0
    return x


def entropy(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: F.binary_cross_entropy(model(x), torch.ones(8, 1))


def likelihood(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: -Normal(model(x), 1.0, validate_args=True).log_prob(torch.ones(8, 1)).mean()


@pytest.mark.parametrize("make_loss", [entropy, likelihood])
def test_the_line_behind_a_failing_step_is_named(
    make_loss: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> None:
    model, guard = make()
    loss = make_loss(model)
    for _ in range(3):
        guard.step(loss, make_batch(False))
    with pytest.raises((RuntimeError, ValueError)):
        guard.step(loss, make_batch(True))
    weights = [p.clone() for p in model.parameters()]
    guard.step(loss, make_batch(False))

    (incident,) = guard.incidents
    assert incident.finding.kind == "exception"
    assert incident.step == 3
    assert incident.cause is not None
    assert incident.cause.op == "aten.log"
    assert [*incident.cause.samples] == [3]
    assert any(not torch.equal(a, b) for a, b in zip(weights, model.parameters())), "training continues"


def test_an_error_without_bad_numbers_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, guard = make()

    def wrong(x: Tensor) -> Tensor:
        return F.binary_cross_entropy(model(x), torch.ones(7, 1))

    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match="target size"):
        guard.step(wrong, make_batch(False))

    assert guard.incidents == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_program_that_raises_and_catches_its_own_errors_is_not_run_again() -> None:
    model, guard = make()
    calls = 0

    def raising(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        raise ValueError("this batch is not wanted")

    for _ in range(20):
        with pytest.raises(ValueError, match="not wanted"):
            guard.step(raising, make_batch(False))
    assert calls == 20
    guard.step(entropy(model), make_batch(False))
    assert guard.incidents == []


def test_with_diagnosis_off_nothing_is_replayed() -> None:
    model, guard = make(GuardConfig(diagnose=DiagnoseConfig(enabled=False)))
    with pytest.raises(RuntimeError):
        guard.step(entropy(model), make_batch(True))
    assert guard.incidents == []
