"""Patches: attributes replaced on single objects, and put back.

For frameworks that call a method of their own at the moment we need, and offer no hook there. Only instances are ever
touched, never a class or a module: two trainers in one process do not see each other.
"""

from __future__ import annotations

import contextlib
from typing import Any

_ABSENT = object()


class Patches:
    """Remembers what stood there.

    >>> class Loop:
    ...     def step(self): return "theirs"
    >>> loop, patches = Loop(), Patches()
    >>> patches.replace(loop, "step", lambda: "ours")
    >>> loop.step()
    'ours'
    >>> patches.undo()
    >>> loop.step()
    'theirs'
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Put `value` on the instance; what it had of its own under this name comes back with `undo()`."""
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is replaced now."""
        return not self._replaced

    def undo(self) -> None:
        """Everything as it was, the last replaced first."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not _ABSENT:
                setattr(owner, name, before)
            else:
                with contextlib.suppress(AttributeError):  # somebody else has taken it off
                    delattr(owner, name)
