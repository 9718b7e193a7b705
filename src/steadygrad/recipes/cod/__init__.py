"""Two-stage segmentation of camouflaged objects: what `steadygrad train cod` loads.

`Config` and `QUICK` need no torch; `train` and `predict` are loaded when they are first asked for.
"""

from __future__ import annotations

from typing import Any

from steadygrad.recipes.cod.config import QUICK, CodConfig

Config = CodConfig

__all__ = ["QUICK", "CodConfig", "Config", "predict", "train"]


def __getattr__(name: str) -> Any:
    if name in ("train", "predict"):
        from steadygrad.recipes.cod import recipe

        return getattr(recipe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
