"""Speaker: which guard a line is about, in a process that has several.

A process with one model needs no name, and its lines have none. Guards of the same model, such as those of a rehearsal,
count as one. Only text that a person reads is concerned: records have a directory each.
"""

from __future__ import annotations

import itertools
import weakref

_live: weakref.WeakSet[Speaker] = weakref.WeakSet()


class Speaker:
    """One guard, by the name of its model's class; further ones of that name are numbered."""

    def __init__(self, model: object) -> None:
        # The guard holds the model longer than this: the id is not used again before.
        self._key = id(model)
        taken = {other.name for other in _live if other._key != self._key}
        kind = type(model).__name__
        names = (kind if number == 1 else f"{kind} {number}" for number in itertools.count(1))
        self.name: str = next(name for name in names if name not in taken)
        _live.add(self)

    @property
    def whose(self) -> str:
        """How a line begins: 'Generator: ', or nothing while no other model is guarded."""
        return f"{self.name}: " if any(other._key != self._key for other in _live) else ""

    def close(self) -> None:
        """The guard is closed: lines of others need no name for its sake."""
        _live.discard(self)
