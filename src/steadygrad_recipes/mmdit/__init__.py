"""mmdit: text and latents by diffusion, learned together by one multimodal diffusion transformer.

Text is hidden by masks, latents by noise; one transformer with a stream for each recovers both. `Config` does not need
torch, so that settings can be shown and checked before anything heavy is loaded.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad_recipes.mmdit.config import QUICK, MMDiTConfig

if TYPE_CHECKING:
    from steadygrad.tune.target import Target

Config = MMDiTConfig
SUMMARY = "text and latent diffusion trained jointly by a multimodal transformer"
DESCRIBED_IN = ("mmdit.json",)
FIXED = ("training.seed", "data.num_synthetic", "data.val_fraction")
_CLASSES = {"MMDiT": "model", "MMDiTTrainer": "trainer"}
"""Name -> module, for `__getattr__`."""

__all__ = ["DESCRIBED_IN", "FIXED", "QUICK", "SUMMARY", "Config", "MMDiTConfig", "open_target", "sample", "train"]


def train(config: MMDiTConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train; see `steadygrad_recipes.mmdit.program`."""
    from steadygrad_recipes.mmdit.program import train as run

    return run(config, run_dir=run_dir, resume=resume, console=console)


def sample(config: MMDiTConfig, *, run_dir: Path, console: Any) -> int:
    """Sample texts and latents from a run; see `steadygrad_recipes.mmdit.program`."""
    from steadygrad_recipes.mmdit.program import sample as run

    return run(config, run_dir=run_dir, console=console)


def open_target(config: MMDiTConfig) -> Target:
    """Build the training, without starting it, for `steadygrad tune`."""
    from steadygrad_recipes.tuning import open_mmdit

    return open_mmdit(config)


def __getattr__(name: str) -> Any:
    """Import a class of this recipe when it is asked for: the command line needs none of them."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
