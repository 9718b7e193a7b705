"""Libraries that only some views need -> the module, or an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from steadygrad.errors import UsageError


def import_extra(module: str, *, purpose: str) -> Any:
    """The module; `purpose` is what it is needed for: 'a report'."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise UsageError(
            f"{purpose} needs {library}, which cannot be imported ({error}). "
            "Install it with: pip install 'steadygrad[view]'"
        ) from error
