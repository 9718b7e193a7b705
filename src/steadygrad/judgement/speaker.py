"""Speaker: which guard a line is about, in a process that has several.

A process with one training needs no name, and its lines have none. Guards that train the same parameters, such as those
of a rehearsal, count as one; those of one model that train different parts of it are named after these. Only text that
a person reads is concerned: records have a directory each.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

_live: weakref.WeakSet[Speaker] = weakref.WeakSet()


class Speaker:
    """One guard, by the name of its model's class; further ones of that name are numbered."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        # The guard holds model and optimizers longer than this: no id is used again before.
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._key = frozenset(id(p) for group in groups for p in group["params"])
        self._model = id(model)
        taken = {other.name for other in _live if other._key != self._key}
        kind = type(model).__name__
        names = (kind if number == 1 else f"{kind} {number}" for number in itertools.count(1))
        self.name: str = next(name for name in names if name not in taken)
        part = _find_part([name for name, p in model.named_parameters() if id(p) in self._key])
        self._part = f"{kind}.{part}" if part else self.name
        _live.add(self)

    @property
    def whose(self) -> str:
        """How a line begins: 'Generator: ', or nothing while nothing else is trained under guard."""
        others = [other for other in _live if other._key != self._key]
        if not others:
            return ""
        return f"{self._part if any(other._model == self._model for other in others) else self.name}: "

    def close(self) -> None:
        """The guard is closed: lines of others need no name for its sake."""
        _live.discard(self)


def _find_part(names: Sequence[str]) -> str:
    """Return the innermost module that has all these parameters; empty for the model itself.

    >>> _find_part(["critic.body.0.weight", "critic.body.2.weight"]), _find_part(["critic.weight", "actor.weight"])
    ('critic.body', '')
    """
    paths = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths))
    return ".".join(parts[0] for parts in shared)
