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
    failure: ImportError | None = None
    for name in sorted(modules, key=lambda name: name not in sys.modules):  # False sorts first; else the given order
        try:
            return importlib.import_module(name)
        # Also raised by an installed library that is broken, hence its text goes into the message
        except ImportError as failed:
            failure = failure or failed
    raise error(
        f"{what} needs {' or '.join(modules)}, which cannot be imported ({failure}). "
        f"Install it with: pip install 'steadygrad[{extra}]'"
    ) from failure
