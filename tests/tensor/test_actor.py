"""What a rollback does to the learning rate: keeps it, restores it with the weights, or lowers it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steadygrad.act.actor import Actor
from steadygrad.act.rates import Rates
from steadygrad.act.snapshots import Snapshots
from steadygrad.config import Policy, SnapshotConfig
from steadygrad.facts import Action, Outcome, Verdict


class Bench:
    """One weight at 1 with a snapshot of it, then moved to 7 with the rate halved."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.weight = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.weight.weight)
        self.optimizer = torch.optim.SGD(self.weight.parameters(), lr=0.8)
        self.rates = Rates([self.optimizer])
        self.snapshots = Snapshots(
            self.weight, [self.optimizer], extras={"rates": self.rates}, config=SnapshotConfig(enabled=enabled)
        )
        self.actor = Actor(Policy(), rates=self.rates, snapshots=self.snapshots)
        self.snapshots.take(0)
        nn.init.constant_(self.weight.weight, 7.0)
        self.rates.scale_lr(0.5)

    def roll_back(self, factor: float | None) -> Outcome:
        verdict = Verdict(action=Action.ROLLBACK, reason="for the test", factor=factor)
        return self.actor.carry_out(verdict, None, step=7)

    @property
    def lr(self) -> float:
        return self.rates.learning_rates()[0]


@pytest.mark.parametrize(("factor", "lr"), [(None, 0.4), (1.0, 0.8), (0.1, 0.04)])
def test_a_rollback_keeps_restores_or_lowers_the_rate(factor: float | None, lr: float) -> None:
    bench = Bench()

    outcome = bench.roll_back(factor)

    assert outcome.action is Action.ROLLBACK
    assert bench.weight.weight.item() == 1.0
    assert bench.lr == pytest.approx(lr)


def test_the_outcome_says_what_happened_to_the_rate() -> None:
    outcome = Bench().roll_back(0.1)

    assert outcome.before == {"step": 8, "lr": 0.4}
    assert outcome.after == {"step": 0, "lr": pytest.approx(0.04)}
    assert "the learning rate is now 0.05 times its schedule" in outcome.message


def test_without_a_snapshot_the_rate_is_still_lowered() -> None:
    bench = Bench(enabled=False)

    outcome = bench.roll_back(0.1)

    assert outcome.action is Action.SCALE_LR
    assert bench.weight.weight.item() == 7.0
    assert bench.lr == pytest.approx(0.04)


def test_without_a_snapshot_a_plain_rollback_changes_nothing() -> None:
    bench = Bench(enabled=False)

    assert bench.roll_back(None).action is Action.NONE
    assert bench.lr == 0.4


@pytest.mark.parametrize(
    ("step", "expected"), [(7, "the next batch is left out"), (99, "the next 5 batches are left out")]
)
def test_the_number_of_omitted_batches_is_reported_in_plain_words(step: int, expected: str) -> None:
    bench = Bench()
    verdict = Verdict(action=Action.ROLLBACK, reason="for the test")
    assert expected in bench.actor.carry_out(verdict, None, step=step).message
