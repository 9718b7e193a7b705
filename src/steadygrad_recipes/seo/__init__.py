"""The recipe `seo`: web pages -> the scores used in search engine optimisation.

`steadygrad train seo` trains it, `steadygrad train seo --predict page.html` scores a page. torch is imported only when
needed, so that the command line can list the fields without it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad_recipes.seo.config import UltraOptimizedConfig

if TYPE_CHECKING:
    from steadygrad.tune.target import Target

Config = UltraOptimizedConfig
SUMMARY = "score web pages for search engines: several metrics from HTML features and text"
_CLASSES = {
    "UltraOptimizedSEOMetricsModule": "model",
    "UltraOptimizedSEOTrainer": "trainer",
    "test_checkpoint_safety": "check_setup",
    "test_full_training_cycle": "check_setup",
    "test_gradient_clipping": "check_setup",
    "test_nan_inf_handling": "check_setup",
    "test_training_stability_monitoring": "check_setup",
}
"""Name -> module, for `__getattr__`."""
ALIASES = {"lr": "learning_rate"}
PREDICT = "score an HTML page, a folder of them, or each row of a .csv or .jsonl table, with a trained run"
DESCRIBED_IN = ("seo.json",)
FIXED = ("seed", "num_synthetic", "val_share")
QUICK = {"epochs": 12, "num_synthetic": 400, "hidden": 64, "text_dim": 32, "num_buckets": 2048}


def train(config: UltraOptimizedConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train; returns the exit code."""
    from steadygrad_recipes.seo.program import train_seo

    return train_seo(config, run_dir=run_dir, resume=resume, console=console)


def predict(config: UltraOptimizedConfig, path: str, *, run_dir: Path, console: Any) -> int:
    """Print the scores of the page at `path`; returns the exit code."""
    from steadygrad_recipes.seo.program import predict_page

    return predict_page(config, path, run_dir=run_dir, console=console)


def open_target(config: UltraOptimizedConfig) -> Target:
    """Build the training, without starting it, for `steadygrad tune`."""
    from steadygrad_recipes.tuning import open_seo

    return open_seo(config)


def check(*, console: Any) -> int:
    """Run the checks of the document that this recipe follows; returns how many failed."""
    from steadygrad_recipes.seo.check_setup import check_setup

    return check_setup(console.say)


def __getattr__(name: str) -> Any:
    """Import a class of this recipe when it is asked for: the command line needs none of them."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
