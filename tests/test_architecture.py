"""The structure of the package: imports go one way, some modules never import torch, exported names are pinned.

The source is read with `ast`, so that an import inside a function counts like one at the top. What only running can
show (torch blocked, nothing heavy loaded) runs in a separate process.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import steadygrad
import steadygrad_recipes

PACKAGE = Path(steadygrad.__file__).parent
RECIPES = Path(steadygrad_recipes.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("tune",),
    ("adapters", "testing"),
    ("trainer",),
    ("guard", "monitor"),
    ("judgement",),
    ("view",),
    ("prove",),
    ("diagnose", "checkpoint"),
    ("act",),
    ("clip",),
    ("measure", "detect", "decide", "record", "losses", "nn", "scan"),
    ("state", "disk"),
    ("stats",),
    ("config",),
    ("facts", "errors", "extras", "words", "moved", "recipes", "_version"),
)
"""Top to bottom: a part may import only from the lines below it."""

NEIGHBOURS_ALLOWED = {("errors", "facts")}
"""Exceptions carry Incidents."""

TORCH_FREE = ("facts", "words", "stats", "errors", "config", "detect", "decide", "view")

EXPORTED = [
    "Action",
    "ActivationMonitor",
    "AdaGC",
    "AdaptiveUnitClip",
    "AutoClip",
    "Cause",
    "CheckpointConfig",
    "CheckpointStore",
    "ClipValue",
    "ConfigError",
    "DetectConfig",
    "DiagnoseConfig",
    "Finding",
    "FixedNorm",
    "GradientHealthMonitor",
    "Guard",
    "GuardConfig",
    "Incident",
    "LoggerSink",
    "MeasureConfig",
    "MlflowSink",
    "NonFiniteError",
    "OutlierClip",
    "Policy",
    "Precision",
    "ProveConfig",
    "Reading",
    "RecordConfig",
    "Severity",
    "SnapshotConfig",
    "SteadygradError",
    "StepRecord",
    "TensorBoardSink",
    "TrackioSink",
    "Trainer",
    "TrainerConfig",
    "TrainingHalted",
    "UnsupportedError",
    "UsageError",
    "WandbSink",
    "ZClip",
    "__version__",
    "check_nan_inf",
    "choose_precision",
    "conservative_scaler",
    "diagnose",
    "handle_nan_inf",
    "load_checkpoint",
    "losses",
    "nn",
]


# --- reading the source -------------------------------------------------------------------------------------------


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Dotted name -> parsed source, for every module of the package."""
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def recipe_modules() -> dict[str, ast.Module]:
    """Dotted name -> parsed source, for every module of steadygrad_recipes."""
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(RECIPES.rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(module: str) -> bool:
    return (PACKAGE.parent / Path(*module.split("."))).is_dir()


def find_imports(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything that `module` imports, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = resolve(module, node)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in modules() or inner in recipe_modules() else source


def resolve(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        assert node.module is not None
        return node.module
    above = module.split(".") if is_package(module) else module.split(".")[:-1]
    above = above[: len(above) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def own_imports(module: str) -> list[tuple[int, str]]:
    """Yield imports of this package only."""
    return [(line, name) for line, name in find_imports(module, modules()[module]) if is_own(name)]


def is_own(name: str) -> bool:
    return name == "steadygrad" or name.startswith("steadygrad.")


def part_of(module: str) -> str:
    """Return the folder or file directly under the package; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def layer_of(part: str) -> int:
    return next(i for i, line in enumerate(LAYERS) if part in line)


def may_import(importer: str, imported: str) -> bool:
    if importer == imported or (importer, imported) in NEIGHBOURS_ALLOWED:
        return True
    return layer_of(imported) > layer_of(importer)


def run_python(code: str) -> str:
    """Return the standard output of `code` in a new interpreter that imports this package."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the rules ----------------------------------------------------------------------------------------------------


def test_every_part_of_the_package_has_a_layer() -> None:
    known = {part for line in LAYERS for part in line}
    unknown = {part_of(module) for module in modules()} - known - {""}
    assert not unknown, f"put {sorted(unknown)} into LAYERS, and into the picture in docs/architecture.md"


def test_imports_go_down_only() -> None:
    wrong = [
        f"{module}:{line} imports {name}"
        for module in modules()
        if part_of(module)
        for line, name in own_imports(module)
        if not part_of(name) or not may_import(part_of(module), part_of(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_upwards_sideways_and_of_the_package_itself_are_found() -> None:
    assert not may_import("clip", "act")
    assert not may_import("measure", "record")
    assert not may_import("guard", "monitor")
    assert not may_import("facts", "errors")
    assert may_import("errors", "facts")
    assert may_import("act", "measure")
    source = "if True:\n    def f():\n        from steadygrad import Guard\n        from ..guard import Guard as G\n"
    found = {name for _, name in find_imports("steadygrad.clip.base", ast.parse(source))}
    assert found == {"steadygrad", "steadygrad.guard"}
    assert [part_of(name) for name in ("steadygrad", "steadygrad.clip.base")] == ["", "clip"]


def test_the_engine_never_imports_the_recipes() -> None:
    wrong = [
        f"{module}:{line} imports {name}"
        for module, tree in modules().items()
        for line, name in find_imports(module, tree)
        if name.partition(".")[0] == "steadygrad_recipes"
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_import_cycle() -> None:
    every = modules() | recipe_modules()
    graph = {module: {name for _, name in find_imports(module, tree)} & every.keys() for module, tree in every.items()}
    assert find_cycle(graph) is None


def test_find_cycle_finds_a_cycle() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "a"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the first cycle of `graph` as a closed path, or None."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        done.add(node)
        return next((c for following in sorted(graph[node]) if (c := walk(following, [*path, node]))), None)

    return next((cycle for node in sorted(graph) if (cycle := walk(node, []))), None)


@pytest.mark.parametrize("part", TORCH_FREE)
def test_a_torch_free_part_never_imports_torch(part: str) -> None:
    wrong = [
        f"{module}:{line} imports {name}"
        for module, tree in modules().items()
        if part_of(module) == part
        for line, name in find_imports(module, tree)
        if name.partition(".")[0] == "torch"
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_free_parts_import_without_torch() -> None:
    names = [module for module in modules() if part_of(module) in TORCH_FREE]
    assert {part_of(name) for name in names} == set(TORCH_FREE)
    code = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(sum(name.partition('.')[0] == 'torch' for name in sys.modules))\n"
    )
    assert run_python(code).split() == ["1"]  # the blocked import itself


def test_torch_is_really_blocked() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "try:\n    import steadygrad.guard\n"
        "except ImportError: print('blocked')\n"
    )
    assert run_python(code).split() == ["blocked"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, steadygrad\n"
        "print(*(name for name in ('torch', 'click', 'rich', 'numpy', 'yaml') if name in sys.modules), 'end')\n"
    )
    assert run_python(code).split() == ["end"]


def test_exported_names_are_pinned() -> None:
    assert list(steadygrad.__all__) == EXPORTED
    assert sorted(steadygrad.__all__) == list(steadygrad.__all__) == dir(steadygrad)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_name_can_be_imported(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from steadygrad import {name}", namespace)
    value = namespace[name]
    assert isinstance(value, str) if name == "__version__" else value.__name__.removeprefix("steadygrad.") == name  # type: ignore[attr-defined]


def test_a_star_import_gives_exactly_the_exported_names() -> None:
    code = "from steadygrad import *\nprint(*sorted(n for n in dir() if n == '__version__' or not n.startswith('__')))"
    assert run_python(code).split() == EXPORTED


def test_a_missing_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'steadygrad' has no attribute 'Gaurd'"):
        _ = steadygrad.Gaurd


def test_every_module_has_a_docstring() -> None:
    every = modules() | recipe_modules()
    silent = [module for module, tree in every.items() if not ast.get_docstring(tree)]
    assert not silent


def test_common_tasks_need_at_most_five_files_and_each_exists() -> None:
    text = (PACKAGE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## Where to begin\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) == 6
    for row in rows:
        for way in row.split("instead:"):  # two kinds of bug in one task have separate files
            paths = re.findall(r"`([\w/]+\.py)`", way)
            assert 3 <= len(paths) <= 5, row
            assert not [path for path in paths if not (PACKAGE / path).is_file()]


def test_no_part_of_the_guard_takes_more_than_seven_arguments() -> None:
    given = {
        f"{module}.{node.name}": len(init.args.args) + len(init.args.kwonlyargs) - 1
        for module, tree in modules().items()
        if part_of(module) == "guard"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name != "Guard"  # what users pass
        for init in node.body
        if isinstance(init, ast.FunctionDef) and init.name == "__init__"
    }
    assert given["steadygrad.guard.stepping.Stepper"] == 7
    assert not {name: num for name, num in given.items() if num > 7}


def test_no_module_is_a_catch_all() -> None:
    drawers = {"util", "utils", "utilities", "helper", "helpers", "common", "misc"}
    paths = [*PACKAGE.rglob("*"), *RECIPES.rglob("*")]
    found = [str(path) for path in paths if path.stem.lower() in drawers]
    assert not found
