"""Two-stage segmentation of camouflaged objects: what `steadygrad train cod` loads.

torch is imported only to train or predict, so that the command line can list the fields without it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad_recipes.cod.config import QUICK, CodConfig

if TYPE_CHECKING:
    from steadygrad.tune.target import Target

Config = CodConfig
SUMMARY = "two-stage segmentation of camouflaged objects"
_CLASSES = {"CamouflageNet": "model", "CodTrainer": "trainer"}
"""Name -> module, for `__getattr__`."""
PREDICT = "segment a picture, or a folder of them, with a trained run; the masks go into its predictions folder"
TAKES_WEIGHTS = True
FIXED = ("seed", "num_made")
"""--resume may name a file from another program, such as `best_model.pth`."""

__all__ = ["PREDICT", "QUICK", "SUMMARY", "TAKES_WEIGHTS", "CodConfig", "Config", "open_target", "predict", "train"]


def train(config: CodConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train both stages, or resume them; returns the exit code."""
    from steadygrad_recipes.cod import recipe

    return recipe.train(config, run_dir=run_dir, resume=resume, console=console)


def predict(config: CodConfig, path: str | Path, *, run_dir: Path, console: Any) -> int:
    """Write the masks of the pictures at `path`; returns the exit code."""
    from steadygrad_recipes.cod import recipe

    return recipe.predict(config, path, run_dir=run_dir, console=console)


def open_target(config: CodConfig) -> Target:
    """Build the training, without starting it, for `steadygrad tune`."""
    from steadygrad_recipes.tuning import open_cod

    return open_cod(config)


def __getattr__(name: str) -> Any:
    """Import a class of this recipe when it is asked for: the command line needs none of them."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
