"""Imports of optional libraries, or an error that names the extra to install."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def import_extra(extra: str, *modules: str, what: str, error: type[Exception] = ImportError) -> Any:
    """Return the first of `modules` that is installed, preferring one already loaded. `what` needs it.

    >>> import_extra("view", "json", what="this line").__name__
    'json'
    """
    failure: Exception | None = None
    for name in sorted(modules, key=lambda name: name not in sys.modules):  # False sorts first; else the given order
        try:
            return importlib.import_module(name)
        # A library that is installed but broken may raise anything: torchvision a RuntimeError beside another torch.
        except Exception as failed:
            failure = failure or failed
    raise error(
        f"{what} needs {' or '.join(modules)}, which cannot be imported ({failure}). "
        f"Install it with: pip install 'steadygrad[{extra}]'"
    ) from failure
