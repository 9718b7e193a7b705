"""The script imports torch -> a callback, right after torch has run and before anything uses it.

Not earlier: what a script sets up before it imports torch must still take effect, so torch is never imported here. A
finder stays in front of all others until torch has been executed: libraries ask whether torch is installed
(`importlib.util.find_spec("torch")`) long before they import it, and such a question changes nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_torch_arrives(call: Callable[[], None]) -> None:
    """Call back when torch has been imported; at once if it already is. A failing callback is reported."""
    if "torch" in sys.modules:
        _report_failure(call)
    else:
        sys.meta_path.insert(0, _Finder(call))


def stop_waiting() -> None:
    """Forget every callback that has not been made yet."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def is_waiting() -> bool:
    """Whether a callback has not been made yet."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch where the other finders do, with a loader that calls back after the import."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        # Without any of ours: they would ask each other for ever.
        others = (finder for finder in list(sys.meta_path) if not isinstance(finder, _Finder))
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)  # when this raises, the script may try again: the finder stays
            # Gone if stop_waiting() was called since, or if another spec of ours was executed first.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _report_failure(self._call)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader object
        return spec


def _report_failure(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # an import of torch must succeed, guarded or not
        print(f"steadygrad: the script runs unguarded: {error!r}", file=sys.stderr)
