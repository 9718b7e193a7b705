"""`steadygrad train seo --check`: the original's five tests, on a small model.

Each raises AssertionError, with what it measured, if something does not hold. They take seconds, and need no data.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import load_data
from steadygrad_recipes.seo.program import build_model
from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer

SMALL = UltraOptimizedConfig(
    device="cpu",
    num_synthetic=60,
    epochs=10,
    learning_rate=1e-2,
    hidden=16,
    num_layers=1,
    text_dim=8,
    num_buckets=64,
    max_words=16,
)


def check_setup(say: Callable[[str], Any] = print) -> int:
    """Run all checks, print the results, and return the number of failures."""
    num_failed = 0
    for check in CHECKS:
        try:
            check()
        except AssertionError as error:
            num_failed += 1
            say(f"✗ {check.__name__}: {error}")
        else:
            say(f"✓ {check.__name__}")
    say("All checks passed." if not num_failed else f"{num_failed} checks failed.")
    return num_failed


def test_gradient_clipping() -> None:
    """Check that no norm above the threshold is left."""
    trainer = _make_trainer()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = trainer._get_gradient_norm()
    trainer._clip_gradients(0.5)
    after = trainer._get_gradient_norm()
    _require(before > 1 and abs(after - 0.5) < 1e-3, f"the norm was {before:.3g} and is {after:.3g}, not 0.5")


def test_nan_inf_handling() -> None:
    """Check that NaN and Inf are found, and replaced without touching the rest."""
    trainer = _make_trainer()
    bad = torch.tensor([1.0, math.nan, math.inf, -2.0])
    found, clean = trainer._check_nan_inf(bad, "example"), trainer._handle_nan_inf(bad)
    fits = found and not trainer._check_nan_inf(clean) and clean.tolist() == [1.0, 0.0, 0.0, -2.0]
    _require(fits, f"found {found}, became {clean.tolist()}")


def test_training_stability_monitoring() -> None:
    """Check that an exploded loss divides the learning rate by ten."""
    trainer = _make_trainer()
    trainer.train_history.extend([{"loss": 0.5}, {"loss": 50.0}])
    before = trainer._find_setting("lr")
    trainer._check_training_stability(50.0, 0.5)
    after = trainer._find_setting("lr")
    _require(abs(after / before - 0.1) < 1e-6, f"the rate was {before:g} and is {after:g}")


def test_checkpoint_safety() -> None:
    """Check that no NaN gets into a file."""
    trainer = _make_trainer()
    with torch.no_grad():
        next(trainer.model.parameters())[0] = math.nan
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seo_model.pth"
        trainer.save_checkpoint(path)
        content = torch.load(path, weights_only=True)["model_state_dict"]
        loaded = trainer.load_checkpoint(path)
    bad = [name for name, value in content.items() if not bool(value.isfinite().all())]
    _require(loaded and not bad, f"loaded: {loaded}, not finite: {bad}")


def test_full_training_cycle() -> None:
    """Check that a short training lowers the loss and leaves a healthy model."""
    trainer, data = _make_trainer(), load_data(SMALL)
    trainer.train(*data.make_loaders(SMALL.batch_size))
    losses = [entry["loss"] for entry in trainer.train_history]
    healthy = trainer.monitor_training_health()["overall_healthy"]
    _require(healthy and losses[-1] < losses[0], f"healthy: {healthy}, losses {losses}")


CHECKS = (
    test_gradient_clipping,
    test_nan_inf_handling,
    test_training_stability_monitoring,
    test_checkpoint_safety,
    test_full_training_cycle,
)


def _require(fits: bool, fault: str) -> None:
    if not fits:
        raise AssertionError(fault)


def _make_trainer() -> UltraOptimizedSEOTrainer:
    return UltraOptimizedSEOTrainer(build_model(SMALL, load_data(SMALL)), SMALL, tell=lambda _: None)


if __name__ == "__main__":
    sys.exit(1 if check_setup() else 0)
