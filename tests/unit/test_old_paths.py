"""Former import paths work for one release, give the same objects, and warn."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import steadygrad_recipes
from steadygrad.cli import recipes

MOVED = {
    "steadygrad.checkpoint.scan.scan_checkpoint": "steadygrad.scan.checkpoint_scan",
    "steadygrad.checkpoint.clean.clean_checkpoint": "steadygrad.scan.clean",
    "steadygrad.checkpoint.diff.diff_checkpoints": "steadygrad.scan.diff",
    "steadygrad.checkpoint.foreign.load_checkpoint": "steadygrad.scan.foreign",
}


@pytest.mark.parametrize("path", MOVED)
def test_an_old_path_gives_the_same_object_and_warns(path: str) -> None:
    module, _, name = path.rpartition(".")
    expected = getattr(importlib.import_module(MOVED[path]), name)

    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now {MOVED[path]}.{name}"):
        found = getattr(importlib.import_module(module), name)

    assert found is expected


def test_a_name_that_never_existed_raises_an_attribute_error() -> None:
    old = importlib.import_module("steadygrad.checkpoint.diff")
    with pytest.raises(AttributeError, match=r"steadygrad\.scan\.diff"):
        _ = old.no_such_name


def test_the_old_path_of_the_recipes_gives_the_same_modules_and_warns() -> None:
    code = (
        "import importlib.util, warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from steadygrad.recipes.seo.config import UltraOptimizedConfig as old\n"
        "    import steadygrad.recipes.seo.reading as reading\n"
        "    import steadygrad.recipes\n"
        "    found = [importlib.util.find_spec(f'steadygrad.recipes.{name}') for name in steadygrad.recipes.RENAMED]\n"
        "    from steadygrad.recipes import cod\n"
        "import steadygrad_recipes.cod, steadygrad_recipes.seo.readers\n"
        "from steadygrad_recipes.seo.config import UltraOptimizedConfig as new\n"
        "assert all(found)\n"
        "assert old is new and cod is steadygrad_recipes.cod and reading is steadygrad_recipes.seo.readers\n"
        "assert steadygrad_recipes.cod.__spec__.name == 'steadygrad_recipes.cod'\n"
        "print(*[w.category.__name__ for w in caught])\n"
        "try:\n    import steadygrad.recipes.nothing\n"
        "except ModuleNotFoundError as error: print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["DeprecationWarning", "steadygrad.recipes.nothing"]


# --- recipes by entry point ---------------------------------------------------------------------------------------


def test_our_table_of_recipes_matches_the_entry_points() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"][recipes.GROUP] == steadygrad_recipes.RECIPES


@pytest.mark.parametrize("is_registered", [True, False])
def test_recipes_are_found_with_and_without_entry_points(is_registered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("theirs", "their_recipe", recipes.GROUP)]
    if is_registered:
        points += [EntryPoint(name, module, recipes.GROUP) for name, module in steadygrad_recipes.RECIPES.items()]
    monkeypatch.setattr(recipes, "entry_points", lambda group: [point for point in points if point.group == group])

    assert [recipe.name for recipe in recipes.list_recipes()] == ["clip6d", "cod", "mmdit", "seo", "sft", "theirs"]
    assert "cannot be loaded" in recipes.find_recipe("theirs").summary
    assert callable(recipes.load_demo().narrate_demo)
