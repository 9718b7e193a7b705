"""The forecast in a real training whose rising learning rate makes it unstable: reported ahead, acted on, recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from steadygrad import Action, Guard, GuardConfig, Policy
from steadygrad.config import DetectConfig, ForecastConfig

ACTS = Policy(actions={"instability_forecast": Action.SCALE_LR})
FORECAST = ForecastConfig(enabled=True, threshold=0.2)
pytestmark = pytest.mark.filterwarnings("ignore:.*fused=True")


def train(
    policy: Policy,
    *,
    run_dir: Path | None = None,
    num_steps: int = 270,
    growth: float = 1.02,
    forecast: ForecastConfig = FORECAST,
) -> Guard:
    """Momentum on a regression; the rate grows by `growth` per step, without clipping."""
    torch.manual_seed(0)
    teacher, model = nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, growth)
    config = GuardConfig(clip=None, policy=policy, detect=DetectConfig(forecast=forecast))
    guard = Guard(model, optimizer, config=config, scheduler=scheduler, run_dir=run_dir)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = 3.0 * teacher(x)
        return (model(x) - target).square().mean()

    with guard:
        for _ in range(num_steps):
            guard.step(loss, torch.randn(16, 8))
    return guard


@pytest.fixture(scope="module")
def watched() -> Guard:
    """The unguarded run."""
    return train(Policy.observe())


def first_step(guard: Guard, kind: str) -> int:
    return next(finding.step for finding in guard.findings if finding.kind == kind)


def test_the_forecast_precedes_the_instability(watched: Guard) -> None:
    assert first_step(watched, "instability_forecast") + 8 <= first_step(watched, "loss_explosion")


def test_acting_on_the_forecast_saves_a_run_that_watching_does_not(watched: Guard) -> None:
    acted = train(ACTS)

    assert any(finding.kind == "loss_explosion" for finding in watched.findings)
    assert not any(finding.kind == "loss_explosion" for finding in acted.findings)
    assert acted.last is not None
    assert watched.last is not None
    assert acted.last.loss < 0.5 * watched.last.loss


def test_a_policy_lowers_the_rate_at_the_forecast_and_the_ledger_records_it(tmp_path: Path) -> None:
    guard = train(ACTS, run_dir=tmp_path / "run")

    incident = next(i for i in guard.incidents if i.finding.kind == "instability_forecast")
    assert incident.outcome.action is Action.SCALE_LR
    assert incident.outcome.after["lr"] == pytest.approx(0.5 * incident.outcome.before["lr"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()]
    (written,) = [line for line in lines if line["step"] == incident.step and "forecast" in str(line["finding"])]
    assert written["finding"]["kind"] == "instability_forecast"
    assert written["finding"]["message"].startswith("forecast:")
    assert "instability_forecast" in written["verdict"]["reason"]


def test_a_forecast_that_is_only_reported_changes_nothing(watched: Guard) -> None:
    """Bit for bit: 30 steps after the forecast, loss and gradient equal those of a run without it."""
    without = train(Policy.observe(), forecast=ForecastConfig(enabled=False))

    assert first_step(watched, "instability_forecast") < 260
    assert not any(finding.kind == "instability_forecast" for finding in without.findings)
    assert watched.last is not None
    assert without.last is not None
    assert (watched.last.loss, watched.last.grad_norm) == (without.last.loss, without.last.grad_norm)


def test_a_constant_rate_gets_no_forecast() -> None:
    guard = train(ACTS, growth=1.0, num_steps=150)

    assert [finding.kind for finding in guard.findings if finding.kind == "instability_forecast"] == []
