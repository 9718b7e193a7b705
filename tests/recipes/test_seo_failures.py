"""How the SEO training broke, injected: without protection it ends as its story tells, with it well.

A standardised loss of 1 is that of the mean of the scores: a model above it has learnt less than nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from seo_trainings import make_training, rows, train

from steadygrad.facts import Action
from steadygrad.testing import poison_batches
from steadygrad.trainer import load_trained
from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer


class RateSetWrongly(UltraOptimizedSEOTrainer):
    """For ten steps somebody's learning rate is 300 times too high."""

    num_calls = 0

    def compute_loss(self, batch: Any) -> Any:
        if torch.is_grad_enabled():
            self.num_calls += 1
            if self.num_calls in (101, 111):
                for group in self._param_groups:
                    group["lr"] *= 300.0 if self.num_calls == 101 else 1.0 / 300.0
        return super().compute_loss(batch)


def test_a_loss_that_explodes_stays_high_without_protection_and_comes_back_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="steadygrad.recipes.seo")
    ends = {}
    for protect in (False, True):
        trainer, data = make_training(kind=RateSetWrongly, epochs=18, protect=protect)
        train(trainer, data)
        before, after = trainer.val_history[9]["loss"], trainer.val_history[-1]["loss"]
        assert before < 0.1
        ends[protect] = after

    assert ends[False] > 1.0
    assert ends[True] < 0.15
    actions = {incident.outcome.action for incident in trainer.incidents}
    assert {Action.SCALE_LR, Action.ROLLBACK} <= actions
    assert "loss_explosion: the guard has already changed the lr in this epoch" in caplog.messages
    assert trainer.get_training_stats()["current_learning_rate"] == pytest.approx(1e-4)  # a tenth, once


def test_a_rate_that_is_too_high_from_the_start_is_lowered() -> None:
    ends = {}
    for protect in (False, True):
        trainer, data = make_training(epochs=10, learning_rate=0.3, protect=protect)
        stats = train(trainer, data)
        ends[protect] = trainer.val_history[-1]["loss"]

    assert ends[False] > 3 * ends[True]
    assert ends[True] < 0.2
    assert stats["current_learning_rate"] < 0.1


def test_overfitting_goes_on_without_protection_and_is_answered_and_stopped_with_it(tmp_path: Path) -> None:
    draw = random.Random(1)
    noisy = [
        dataclasses.replace(row, scores={name: score + draw.gauss(0.0, 40.0) for name, score in row.scores.items()})
        for row in rows()[:80]
    ]
    settings: dict[str, Any] = {"epochs": 30, "dropout": 0.0, "learning_rate": 3e-3, "hidden": 64, "patience": 6}
    without, data = make_training(noisy, protect=False, **settings)
    train(without, data)
    protected, data = make_training(noisy, run_dir=tmp_path, **settings)
    train(protected, data)
    load_trained(tmp_path, protected.model)
    with torch.no_grad():
        kept = protected.model.eval() and protected.evaluate(data.make_loaders(16)[1])["loss"]

    assert len(without.val_history) == 30
    assert without.val_history[-1]["loss"] > 1.2
    assert without.train_history[-1]["loss"] < 0.05
    assert len(protected.val_history) < 15
    assert protected._weight_decay > 2 * protected.config.weight_decay
    assert kept == pytest.approx(min(entry["loss"] for entry in protected.val_history))
    assert kept < 0.95


def test_a_batch_with_a_nan_kills_the_unprotected_training_only() -> None:
    ends = {}
    for protect in (False, True):
        trainer, data = make_training(epochs=2, protect=protect)
        loader, val_loader = data.make_loaders(16)
        trainer.train(list(poison_batches([tuple(batch) for batch in loader], at={4})), val_loader)
        ends[protect] = trainer.val_history[-1]["loss"]

    assert math.isnan(ends[False])
    assert ends[True] < 0.9
    assert trainer.get_training_stats()["num_skipped"] == 2
