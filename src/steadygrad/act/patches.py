"""Patches: replace attributes of single objects, and put the originals back.

For frameworks that call one of their own methods at the moment we need and offer no hook there. Only instances are
patched, never a class or a module, so two trainers in one process do not affect each other.
"""

from __future__ import annotations

import contextlib
from typing import Any

_ABSENT = object()


class Patches:
    """Replaces attributes and remembers the originals.

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
        """Set `value` on the instance; `undo()` restores the instance's own attribute of this name, if it had one."""
        # Not getattr: a method of the class must come back as such, not as an attribute of the instance.
        self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is replaced now."""
        return not self._replaced

    def undo(self) -> None:
        """Restore everything, the last replacement first."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is not _ABSENT:
                setattr(owner, name, before)
            else:
                with contextlib.suppress(AttributeError):  # already removed by other code
                    delattr(owner, name)
