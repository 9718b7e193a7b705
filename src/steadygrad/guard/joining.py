"""Uneven inputs: ranks that run out of data shadow the collectives of the others (torch's Join), ours and DDP's.

The order of collectives must be the same on every rank: DDP's of one iteration, then ours. So inside this context the
exchange comes after backward, not before it. torch ends the context with a broadcast of the last rank's weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from steadygrad.errors import UnsupportedError
from steadygrad.measure.ranks import Ranks


@contextlib.contextmanager
def join_uneven(ranks: Ranks) -> Iterator[None]:
    """Let ranks leave the loop inside this context at different steps. Does nothing in a single process."""
    if not ranks.many:
        yield
        return
    if ranks.ddp is None:
        raise UnsupportedError(
            "join() needs a model in DistributedDataParallel: nothing else can do without a rank. Give every rank "
            "the same number of batches, as DistributedSampler does."
        )
    ranks.is_joining = True
    try:
        # DDP first: torch runs the hooks in this order, and lets only the first Joinable announce an iteration.
        with Join([ranks.ddp, _Companion(ranks)]):  # type: ignore[list-item]
            yield
    finally:
        ranks.is_joining = False


class _Companion(Joinable):
    """Our collectives of an iteration, for torch's Join."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def join_hook(self, **_: Any) -> JoinHook:
        return _Shadow(self._ranks)

    @property
    def join_device(self) -> torch.device:
        return self._ranks.ddp.join_device  # type: ignore[union-attr,return-value]

    @property
    def join_process_group(self) -> Any:
        return self._ranks.ddp.join_process_group  # type: ignore[union-attr]


class _Shadow(JoinHook):
    """What a rank without data does in each iteration of the others; DDP's hook runs before this one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def main_hook(self) -> None:
        ddp: Any = self._ranks.ddp
        if ddp.require_forward_param_sync:  # DDP's hook has just learned whether the others synchronise
            self._ranks.shadow()
