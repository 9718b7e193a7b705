"""Whose modules an import finds: the script its own, and steadygrad those that it was written for.

A script's folder comes first in `sys.path`, and may hold a `statistics.py`. The script must get that one even where
steadygrad has imported the library's already; steadygrad, which imports most of itself only after torch has arrived,
must not run it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

LOADED_FIRST = ("encodings",)
"""Imported before any script can come first; other such modules are built in or frozen."""
_path: list[str] = []
"""`sys.path` before the script had a place in it."""


def note_path(path: list[str]) -> None:
    """Note the path that steadygrad's own imports use."""
    _path[:] = path


@contextlib.contextmanager
def own_path() -> Iterator[None]:
    """Look in the noted places first, and in those of the script last."""
    theirs = sys.path[:]
    sys.path[:] = [*_path, *(place for place in theirs if place not in _path)]
    try:
        yield
    finally:
        sys.path[:] = theirs


def give_way(folder: Path) -> None:
    """Forget the modules that were imported from elsewhere and that the script's folder has too."""
    files, packages = folder.glob("*.py"), folder.glob("*/__init__.py")
    held = {path.stem for path in files} | {path.parent.name for path in packages}
    for name in held - {"__main__", "steadygrad", *LOADED_FIRST}:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None or not spec.has_location or Path(spec.origin or "").is_relative_to(folder):
            continue
        for loaded in [one for one in sys.modules if one == name or one.startswith(f"{name}.")]:
            del sys.modules[loaded]
