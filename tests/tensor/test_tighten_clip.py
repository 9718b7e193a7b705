"""`tighten_clip`, an action for policies: the fixed threshold is lowered, kept, reported and restored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import Action, FixedNorm, Guard, GuardConfig, Policy, ZClip
from steadygrad.config import ClipStrategy
from steadygrad.facts import Fact, Finding, Severity

TIGHTENS = Policy(actions={"trouble": Action.TIGHTEN_CLIP}, cooldown_steps=5)


class Trouble:
    """A custom rule that reports at certain steps."""

    name = "trouble"

    def __init__(self, at: set[int]) -> None:
        self._at = at

    def observe(self, fact: Fact) -> list[Finding]:
        step = getattr(fact, "step", -1)
        if type(fact).__name__ != "Reading" or step not in self._at:
            return []
        return [Finding(kind="trouble", severity=Severity.WARNING, step=step, message="trouble is coming")]

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: object) -> None: ...


def make(at: set[int], clip: ClipStrategy | None = None, run_dir: Path | None = None) -> tuple[nn.Module, Guard]:
    from steadygrad.config import DetectConfig

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    detect = DetectConfig(rules=(Trouble(at),))
    config = GuardConfig(clip=clip or FixedNorm(max_norm=1.0), policy=TIGHTENS, detect=detect)
    return model, Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config=config, run_dir=run_dir)


def step(model: nn.Module, guard: Guard) -> float:
    def loss(x: Tensor) -> Tensor:
        return 1000.0 * model(x).square().mean()

    guard.step(loss, torch.randn(8, 4))
    guard.flush()
    assert guard.last is not None
    return guard.last.clip_coefficient * guard.last.grad_norm


def test_the_threshold_is_halved_from_the_next_step_on_and_reported() -> None:
    model, guard = make({2})
    norms = [step(model, guard) for _ in range(5)]
    assert norms == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.5], rel=1e-5)
    (incident,) = guard.incidents
    assert incident.outcome.action is Action.TIGHTEN_CLIP
    assert (incident.outcome.before, incident.outcome.after) == ({"max_norm": 1.0}, {"max_norm": 0.5})
    assert "clip threshold went from 1 to 0.5" in incident.outcome.message
    assert "1 clip-threshold change" in guard.summary()


def test_it_has_a_cooldown_and_a_budget() -> None:
    model, guard = make(set(range(60)))
    norms = [step(model, guard) for _ in range(60)]
    changes = [i.step for i in guard.incidents if i.outcome.action is Action.TIGHTEN_CLIP]
    assert changes == [0, 5, 10]
    assert norms[-1] == pytest.approx(0.125, rel=1e-5)


def test_a_resumed_run_clips_like_the_interrupted_one(tmp_path: Path) -> None:
    model, guard = make({1}, run_dir=tmp_path)
    for _ in range(3):
        step(model, guard)
    guard.save()
    guard.close()
    model, guard = make(set(), run_dir=tmp_path)
    assert guard.resume() == 3
    assert step(model, guard) == pytest.approx(0.5, rel=1e-5)


def test_a_strategy_without_a_fixed_threshold_is_unchanged_and_this_is_reported() -> None:
    model, guard = make({1}, clip=ZClip())
    for _ in range(3):
        step(model, guard)
    (incident,) = [i for i in guard.incidents if i.finding.kind == "trouble"]
    assert incident.outcome.action is Action.NONE
    assert "no fixed threshold" in incident.outcome.message
