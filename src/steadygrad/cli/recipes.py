"""The installed recipes by name, found by entry point, ours and third-party ones alike.

A recipe is a module that a distribution registers in the group `steadygrad.recipes`. It offers `SUMMARY` (a line),
`Config` (a frozen dataclass with a text below each field), `QUICK` (what `--quick` changes) and `train(config, *,
run_dir, resume, console) -> int`; if it can, `predict(config, path, *, run_dir, console)`, `sample(config, *, run_dir,
console)`, `check(*, console)`, which returns the number of failures, and `open_target(config)`, which `steadygrad tune`
needs. `ALIASES` gives a field a second name on the command line, `PREDICT` is the help of `--predict`, `LOOP` names a
framework that runs the loop, so that it cannot be tuned. `DESCRIBED_IN` names files that `train` writes into the run
directory about the model: they are put back if a resume cannot begin. `FIXED` names the fields that a resume cannot
change, because the model or the split into training and validation depends on them; a part (`model`) names all in it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from steadygrad.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from steadygrad.tune.target import Target

GROUP = "steadygrad.recipes"
OWN = "steadygrad_recipes"
"""The package of our own recipes, in the same wheel. Never imported by name: it is on top of this one."""
DEMO = "demo"
"""Registered like a recipe, but run by a separate command."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training program that can be run by name."""

    name: str
    module: str
    program: str = ""
    """How it is called, where that is not `steadygrad train NAME`."""

    @property
    def command(self) -> str:
        """What a user types to run it."""
        return self.program or f"steadygrad train {self.name}"

    def load(self) -> Any:
        """Import and return the module; it imports what it needs for training when it trains."""
        return importlib.import_module(self.module)

    @property
    def summary(self) -> str:
        """Return in one line what it trains, or why it cannot be run if importing it fails."""
        try:
            return str(getattr(self.load(), "SUMMARY", ""))
        except Exception as error:  # one broken plug-in must not hide the other recipes
            return f"cannot be loaded: {error}"


def list_recipes() -> list[Recipe]:
    """Return every installed recipe, by name."""
    return [Recipe(name, module) for name, module in sorted(_find_modules().items()) if name != DEMO]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; an error names the closest."""
    recipes = list_recipes()
    for recipe in recipes:
        if recipe.name == name:
            return recipe
    names = [recipe.name for recipe in recipes]
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
    raise UsageError(f"there is no recipe {name!r} to train. {meant}")


def load_demo() -> Any:
    """Return the demo's module, which offers `narrate_demo(console, *, run_dir, device, quick) -> int`."""
    module = _find_modules().get(DEMO)
    if module is None:
        raise UsageError(f"the demo is not installed: no package registers {DEMO!r} in the entry points {GROUP}.")
    return importlib.import_module(module)


def open_recipe(name: str, config: Any) -> Target:
    """Build a recipe's training without starting it."""
    package = find_recipe(name).load()
    if hasattr(package, "open_target"):
        target: Target = package.open_target(config)
        return target
    loop = getattr(package, "LOOP", "its own program")
    tunable = [recipe.name for recipe in list_recipes() if hasattr(recipe.load(), "open_target")]
    raise UnsupportedError(
        f"{name} cannot be tuned from here: {loop} runs its loop. Call guard.find_lr on its model, or "
        f"name your own function, script.py:function. These can: {', '.join(tunable)}."
    )


def _find_modules() -> dict[str, str]:
    """Map recipe names to modules."""
    found = {point.name: point.value for point in entry_points(group=GROUP)}
    if not any(module.partition(".")[0] == OWN for module in found.values()) and importlib.util.find_spec(OWN):
        # A checkout on the path, or an editable install older than these entry points: use the package's own table.
        found = {**importlib.import_module(OWN).RECIPES, **found}  # an installed entry point wins
    return found
