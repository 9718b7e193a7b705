"""The recipes, and one recipe with its fields -> the lines of `steadygrad train --help`. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from steadygrad.cli.recipe_fields import Field, spell_value
from steadygrad.cli.recipes import Recipe, list_recipes

WIDTH = 92
INDENT = " " * 23
"""Where the text of an option begins."""


def describe_recipes() -> list[str]:
    """Which there are, and how one is run."""
    recipes = list_recipes()
    width = max((len(recipe.name) for recipe in recipes), default=0)
    return [
        "Usage: steadygrad train RECIPE [OPTIONS]",
        "",
        "  Run one of the five trainings, guarded, with its record, checkpoints and report.",
        "",
        "Recipes:",
        *(f"  {recipe.name.ljust(width)}  {recipe.summary}" for recipe in recipes),
        "",
        "steadygrad train RECIPE --help lists the fields of one.",
        "",
        "Example:",
        "  steadygrad train seo --quick",
        "  steadygrad train seo --config my.yaml --learning-rate 1e-4 --run-dir runs/mine",
        "  steadygrad train seo --resume latest",
    ]


def describe_recipe(recipe: Recipe, package: Any, fields: Sequence[Field]) -> list[str]:
    """The help of one recipe: how it is called, and every field with type and default."""
    lines = [f"Usage: steadygrad train {recipe.name} [OPTIONS]", "", f"  {recipe.summary}", "", "Options:"]
    quick = ", ".join(f"{name}={spell_value(value)}" for name, value in package.QUICK.items())
    lines += [
        "  --config FILE        fields from a YAML or TOML file",
        "  --resume WHERE       go on exactly: latest, best, a run directory, or one of its checkpoints",
        "  --run-dir DIR        where the run is written  [default: runs/" + recipe.name + "-<time>]",
        *_wrap(f"smaller: {quick}", "  --quick".ljust(len(INDENT)), INDENT),
    ]
    if hasattr(package, "predict"):
        what = getattr(package, "PREDICT", "use the trained model of a run on PATH")
        lines += _wrap(what, "  --predict PATH".ljust(len(INDENT)), INDENT)
    if hasattr(package, "sample"):
        lines.append("  --sample             draw samples from the trained model of a run")
    lines += ["", "Fields:"]
    for item in fields:
        lines.append(f"  {item.flag} {item.kind}  [default: {spell_value(item.default)}]")
        lines += _wrap(item.help, "      ", "      ")
    return [*lines, "", "Example:", f"  steadygrad train {recipe.name} --quick"]


def _wrap(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)
