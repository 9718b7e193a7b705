"""The old path of `steadygrad_recipes`, for one release: every module below it is the very one that is there now.

Importing this, and only this, puts a finder in front of Python's own. Without it a second copy of each module would be
loaded under the old name, with classes that are not the new ones.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NEW = "steadygrad_recipes"
RENAMED = {
    "catalogue": "steadygrad.cli.recipes",
    "seo.reading": f"{NEW}.seo.readers",
    "seo.metrics": f"{NEW}.seo.trainer",
    "seo.scoring": f"{NEW}.seo.program",
    "clip6d.keeping": f"{NEW}.clip6d.saving",
    "clip6d.plain_logits": f"{NEW}.clip6d.module",
    "cod.unguarded": f"{NEW}.cod.trainer",
    "mmdit.description": f"{NEW}.mmdit.program",
    "demo.plain_record": f"{NEW}.demo.story",
}
"""Modules that were also renamed, or merged into another one."""

__path__: list[str] = []  # a package: modules below it are asked of the finder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds steadygrad.recipes.X as steadygrad_recipes.X."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called by the import system."""
        del path, target
        if not fullname.startswith(f"{__name__}.") or importlib.util.find_spec(_rename(fullname)) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Called by the import system, which then takes the module from sys.modules."""
        # The module under its new name, not a copy: isinstance must hold whichever path a class came by
        sys.modules[module.__name__] = importlib.import_module(_rename(module.__name__))


def _rename(old: str) -> str:
    tail = old.removeprefix(f"{__name__}.")
    return RENAMED.get(tail, f"{NEW}.{tail}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


warnings.warn(
    f"{__name__} is now the package {NEW}; the old path will be removed in the next release.",
    DeprecationWarning,
    stacklevel=2,
)
sys.meta_path.insert(0, _Finder())
