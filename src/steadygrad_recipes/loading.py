"""`module:function` or `file.py:function` -> the function: how a recipe's settings name code of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from steadygrad.errors import ConfigError


def load_function(name: str, field: str) -> Callable[..., Any]:
    """Return the function; ConfigError, which names `field`, if there is none. Modules are also found in the folder."""
    place, _, function = name.rpartition(":")
    advice = "Give module:function, or file.py:function."
    if not place or not function:
        raise ConfigError(f"{field}: {name!r} names no function. {advice}")
    try:
        found = getattr(_load_module(place), function)
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError) as error:
        raise ConfigError(f"{field}: {name} cannot be loaded ({error}). {advice}") from None
    if not callable(found):
        raise ConfigError(f"{field}: {name} is {type(found).__name__}, not a function. {advice}")
    checked: Callable[..., Any] = found
    return checked


def _load_module(place: str) -> Any:
    if not place.endswith(".py"):
        if os.getcwd() not in sys.path:
            # Stays there: a module of the user's may import its neighbours later
            sys.path.insert(0, os.getcwd())
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(os.path.basename(place).removesuffix(".py"), place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Runs the user's file: the name comes from their own settings, never from data or a checkpoint
    spec.loader.exec_module(module)
    return module
