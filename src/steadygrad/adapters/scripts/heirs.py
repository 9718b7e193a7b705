"""Heirs: a new optimizer for the same parameters -> it goes on with the Watch of the one before it.

Some programs create their optimizer for each epoch, or by mistake for each step. It is one training all the same:
one record, one history. At its first step the new one takes over if the old one is gone by then; otherwise both train.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer

if TYPE_CHECKING:
    from steadygrad.adapters.scripts.watch import Watch


class Heirs:
    """Optimizers that have not stepped yet, and whom each may succeed."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Optimizer, tuple[Watch, weakref.ref[Optimizer]]] = (
            weakref.WeakKeyDictionary()
        )

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._waiting

    def admit(self, optimizer: Optimizer, known: Mapping[Optimizer, Watch | None]) -> bool:
        """Let a new optimizer wait if a `known` one has trained the same parameters in the same groups."""
        groups = _list_groups(optimizer)
        for earlier, watch in known.items():
            is_like = watch is not None and watch.has_stepped and watch.process == os.getpid()
            if is_like and watch is not None and type(earlier) is type(optimizer) and _list_groups(earlier) == groups:
                self._waiting[optimizer] = watch, weakref.ref(earlier)
                return True
        return False

    def succeed(self, optimizer: Optimizer) -> Watch | None:
        """Return the Watch that an optimizer takes over at its first step; None if it needs one of its own."""
        watch, earlier = self._waiting.pop(optimizer, (None, None))
        if watch is None or earlier is None or watch.process != os.getpid():
            return None
        if earlier() is not None:
            gc.collect()  # a scheduler and its optimizer refer to each other
        if earlier() is not None:
            return None
        watch.succeed(optimizer)
        return watch


def share(optimizer: Optimizer) -> Optimizer:
    """Return another object of the same class with the very same attributes, now and later: all but its identity."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__ = optimizer.__dict__
    return twin


def _list_groups(optimizer: Optimizer) -> list[list[int]]:
    """Return the ids of an optimizer's parameters, group by group."""
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]
