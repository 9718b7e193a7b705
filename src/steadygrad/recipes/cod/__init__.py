"""Two-stage segmentation of camouflaged objects: what `steadygrad train cod` loads.

torch is imported when something is trained or predicted, so that the command line can list the fields without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steadygrad.recipes.cod.config import QUICK, CodConfig

Config = CodConfig
PREDICT = "masks of a picture, or of a folder of them, by a trained run; written into its predictions"
TAKES_WEIGHTS = True
"""--resume may name a file of another program, as `best_model.pth` is."""

__all__ = ["PREDICT", "QUICK", "TAKES_WEIGHTS", "CodConfig", "Config", "predict", "train"]


def train(config: CodConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train both stages, or go on with them; the exit code."""
    from steadygrad.recipes.cod import recipe

    return recipe.train(config, run_dir=run_dir, resume=resume, console=console)


def predict(config: CodConfig, path: str | Path, *, run_dir: Path, console: Any) -> int:
    """Write the masks of the pictures at `path`; the exit code."""
    from steadygrad.recipes.cod import recipe

    return recipe.predict(config, path, run_dir=run_dir, console=console)
