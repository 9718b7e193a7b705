"""Importing the framework that an adapter is for, or saying which extra to install."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def import_extra(extra: str, *modules: str) -> Any:
    """The first of `modules` that is there, one that is already loaded before the others."""
    error: ImportError | None = None
    for name in sorted(modules, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError as failed:
            error = error or failed
    raise ImportError(
        f"this adapter needs {' or '.join(modules)}, which cannot be imported ({error}). "
        f"Install it with: pip install 'steadygrad[{extra}]'"
    ) from error


def is_switched_off() -> bool:
    """Whether STEADYGRAD=off asks for the framework's plain loop."""
    return os.environ.get("STEADYGRAD", "").lower() == "off"
