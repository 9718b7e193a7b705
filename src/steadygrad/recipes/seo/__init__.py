"""The recipe `seo`: web pages -> scores that people who optimise for search engines know.

`steadygrad train seo` trains it, `steadygrad train seo --predict page.html` scores a page. torch is imported when it
is needed, so that the command line can list the fields without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steadygrad.recipes.seo.config import UltraOptimizedConfig

Config = UltraOptimizedConfig
ALIASES = {"lr": "learning_rate"}
PREDICT = "scores of an HTML page, or of a folder of them, by a trained run"
QUICK = {"epochs": 12, "num_synthetic": 400, "hidden": 64, "text_dim": 32, "num_buckets": 2048}


def train(config: UltraOptimizedConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train; the exit code."""
    from steadygrad.recipes.seo.program import train_seo

    return train_seo(config, run_dir=run_dir, resume=resume, console=console)


def predict(config: UltraOptimizedConfig, path: str, *, run_dir: Path, console: Any) -> int:
    """Print the scores of the page at `path`; the exit code."""
    from steadygrad.recipes.seo.scoring import predict_page

    return predict_page(config, path, run_dir=run_dir, console=console)
