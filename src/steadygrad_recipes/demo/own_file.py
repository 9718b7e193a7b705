"""The demo's model, copied as a file into the demo's folder and imported from there, as a user's own program would be.

A diagnosis never blames a line of this library. The demo stands for a user's program, so its model must be outside
the library; there it can also be opened and fixed.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType

NAME = "model.py"


def put_into(folder: Path) -> ModuleType:
    """Write model.py into `folder`, and import it."""
    path = folder.resolve() / NAME
    path.write_text(files("steadygrad_recipes.demo").joinpath(NAME).read_text(encoding="utf-8"), encoding="utf-8")
    # Not put into sys.modules: two demos in one process have a model each
    spec = importlib.util.spec_from_file_location("steadygrad_demo_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    dont_write, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # keep bytecode caches out of a run's folder
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = dont_write
    return module
