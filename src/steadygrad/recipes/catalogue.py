"""The recipes by name: which there are, and what each is, without loading one.

A recipe is a package beside this file that offers `Config` (a frozen dataclass with documented fields), `QUICK` (what
`--quick` changes) and `train(config, *, run_dir, resume, console) -> int`; if it can, `predict(config, path, *,
run_dir, console)` and `sample(config, *, run_dir, console)`. `ALIASES` gives a field a second name on the command line,
`PREDICT` is the help of `--predict`.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from steadygrad.errors import UsageError


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training program that can be run by name."""

    name: str
    summary: str

    def load(self) -> Any:
        """The package, imported now; what it needs to train it imports when it trains."""
        return importlib.import_module(f"steadygrad.recipes.{self.name}")


RECIPES = (
    Recipe("seo", "score web pages for search engines: several metrics from HTML features and text"),
    Recipe("clip6d", "contrastive learning over two to six modalities, by Lightning"),
    Recipe("cod", "two-stage segmentation of camouflaged objects"),
    Recipe("mmdit", "text and latent diffusion trained jointly by a multimodal transformer"),
    Recipe("sft", "supervised fine-tuning with LoRA, by transformers' Trainer"),
)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; an error names the nearest."""
    for recipe in RECIPES:
        if recipe.name == name:
            return recipe
    names = [recipe.name for recipe in RECIPES]
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
    raise UsageError(f"there is no recipe {name!r} to train. {meant}")
