"""Calls back when the script has imported torch, and not before: what a script sets up first must still count.

Never imports torch itself. A callback that fails is told, and the script goes on.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_torch_arrives(call: Callable[[], None]) -> None:
    """At once if torch is here already."""
    if "torch" in sys.modules:
        _tell_failure(call)
    else:
        sys.meta_path.insert(0, _Finder(call))


class _Finder(importlib.abc.MetaPathFinder):
    """Stands before all other finders until somebody asks for torch, and steps aside then."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        execute, call = spec.loader.exec_module, self._call

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _tell_failure(call)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader object
        return spec


def _tell_failure(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        print(f"steadygrad: the script runs unguarded: {error!r}", file=sys.stderr)
