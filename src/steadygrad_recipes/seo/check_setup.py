"""`steadygrad train seo --check`: the original's five tests, on a small model.

Each check measures what must hold, and is printed with its result; the number of failures is returned. They take
seconds, and need no data.
"""

from __future__ import annotations

import math
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
    device="cpu", num_synthetic=60, epochs=2, hidden=16, num_layers=1, text_dim=8, num_buckets=64, max_words=16
)


def check_setup(say: Callable[[str], Any] = print) -> int:
    """Run all checks, print the results, and return the number of failures."""
    num_failed = 0
    for name, check in CHECKS.items():
        fault = check()
        num_failed += fault is not None
        say(f"✓ {name}" if fault is None else f"✗ {name}: {fault}")
    say("All checks passed." if not num_failed else f"{num_failed} checks failed.")
    return num_failed


def test_gradient_clipping() -> str | None:
    """Check that no norm above the threshold is left."""
    trainer = _make_trainer()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = trainer._get_gradient_norm()
    trainer._clip_gradients(0.5)
    after = trainer._get_gradient_norm()
    return None if before > 1 and abs(after - 0.5) < 1e-3 else f"the norm was {before:.3g} and is {after:.3g}, not 0.5"


def test_nan_inf_handling() -> str | None:
    """Check that NaN and Inf are found, and replaced without touching the rest."""
    trainer = _make_trainer()
    bad = torch.tensor([1.0, math.nan, math.inf, -2.0])
    found, clean = trainer._check_nan_inf(bad, "example"), trainer._handle_nan_inf(bad)
    fits = found and not trainer._check_nan_inf(clean) and clean.tolist() == [1.0, 0.0, 0.0, -2.0]
    return None if fits else f"found {found}, became {clean.tolist()}"


def test_training_stability_monitoring() -> str | None:
    """Check that an exploded loss divides the learning rate by ten."""
    trainer = _make_trainer()
    trainer.train_history.extend([{"loss": 0.5}, {"loss": 50.0}])
    before = trainer._find_setting("lr")
    trainer._check_training_stability(50.0, 0.5)
    after = trainer._find_setting("lr")
    return None if abs(after / before - 0.1) < 1e-6 else f"the rate was {before:g} and is {after:g}"


def test_checkpoint_safety() -> str | None:
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
    return None if loaded and not bad else f"loaded: {loaded}, not finite: {bad}"


def test_full_training_cycle() -> str | None:
    """Check that a short training lowers the loss and leaves a healthy model."""
    trainer, data = _make_trainer(), load_data(SMALL)
    trainer.train(*data.make_loaders(SMALL.batch_size))
    losses = [entry["loss"] for entry in trainer.train_history]
    healthy = trainer.monitor_training_health()["overall_healthy"]
    return None if healthy and losses[-1] < losses[0] else f"healthy: {healthy}, losses {losses}"


CHECKS: dict[str, Callable[[], str | None]] = {
    "test_gradient_clipping": test_gradient_clipping,
    "test_nan_inf_handling": test_nan_inf_handling,
    "test_training_stability_monitoring": test_training_stability_monitoring,
    "test_checkpoint_safety": test_checkpoint_safety,
    "test_full_training_cycle": test_full_training_cycle,
}


def _make_trainer() -> UltraOptimizedSEOTrainer:
    return UltraOptimizedSEOTrainer(build_model(SMALL, load_data(SMALL)), SMALL, tell=lambda _: None)
