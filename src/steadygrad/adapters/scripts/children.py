"""Processes that a script starts with `torch.multiprocessing.spawn`, which begin as fresh interpreters.

What they are asked to do is wrapped, so that a Session begins in each before its first line. Workers of a DataLoader
are started in another way and are left alone; forked processes inherit ours, which then does nothing in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steadygrad.adapters.scripts.options import Options


class GuardedEntry:
    """The function that a started process calls with its number, inside of a Session."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self._function, self._options = function, options

    def __call__(self, number: int, *args: Any) -> Any:
        from steadygrad.adapters.scripts.session import Session

        session = Session(self._options, rank=number)
        session.begin()
        try:
            return self._function(number, *args)
        finally:
            session.close()  # such processes leave without running exit handlers
