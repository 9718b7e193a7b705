"""Old import paths that still work for one release: each name is looked up where it is now, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def look_up_in(new: str, *, old: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for the module `old`, whose contents are now in the module `new`."""

    def look_up(name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for; answering would make `old` a package
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(
            f"{old}.{name} is now {new}.{name}; the old path will be removed in the next release.",
            DeprecationWarning,
            stacklevel=2,
        )
        return value

    return look_up
