"""mmdit: text and latents by diffusion, learned together by one multimodal diffusion transformer.

Text is hidden by masks, latents by noise; one transformer with a stream for each finds both again. `Config` is without
torch, so that settings can be shown and checked before anything heavy is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steadygrad.recipes.mmdit.config import QUICK, MMDiTConfig

Config = MMDiTConfig

__all__ = ["QUICK", "Config", "MMDiTConfig", "sample", "train"]


def train(config: MMDiTConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train; see `steadygrad.recipes.mmdit.program`."""
    from steadygrad.recipes.mmdit.program import train as run

    return run(config, run_dir=run_dir, resume=resume, console=console)


def sample(config: MMDiTConfig, *, run_dir: Path, console: Any) -> int:
    """Draw texts and latents from a run; see `steadygrad.recipes.mmdit.program`."""
    from steadygrad.recipes.mmdit.program import sample as run

    return run(config, run_dir=run_dir, console=console)
