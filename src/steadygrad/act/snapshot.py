"""Snapshot: one copy of the training state in host memory, and what is known about it.

`Copier` fills it, `Snapshots` takes, keeps and restores it. Whether every number is finite is read once the copies have
arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steadygrad.act.pinned_memory import PinnedMemory
from steadygrad.state.collect import Source, State


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of the state before step `step`."""

    step: int
    state: State
    pinned_memory: PinnedMemory
    hosts: list[Tensor]
    devices: list[torch.device]
    largest: Tensor
    """Largest absolute value of each checked tensor: not finite where the tensor is not."""
    labels: list[tuple[str, bool] | None] = field(default_factory=list)
    """Name of each tensor in `largest`, and whether it must be finite; None if it was not to be checked."""
    finite: bool | None = None
    settings: tuple[tuple[float, float], ...] = ()
    """Learning rate and weight decay of each group when it was taken."""
    num_healthy: int = 0
    good: bool = False
    num_again: int = 0
    """Steps repeated from that state to reach this one; 0 for a copy of the run itself."""

    def note_largest(self, sources: Sequence[Source], largest: Tensor) -> None:
        """Queue the copy of the largest absolute value of each source; of finite ones, any size will do."""
        start = len(self.labels)
        self.largest[start : start + len(sources)].copy_(largest, non_blocking=True)
        self.labels += [(source.name, source.must_be_finite) if source.is_looked_at else None for source in sources]

    @property
    def has_been_checked(self) -> bool:
        """Whether the check of all values is on the host; the copies may still be on their way."""
        return all(event.query() for event in self.pinned_memory.events)

    def wait(self) -> None:
        """Wait until all copies have reached the host."""
        self.pinned_memory.wait()

    def values(self) -> Iterator[tuple[str, bool, bool]]:
        """Yield each checked tensor's name, whether it must be finite, and whether it is."""
        # The copies into `largest` are queued before these events too.
        for event in self.pinned_memory.events:
            event.synchronize()
        for label, largest in zip(self.labels, self.largest.tolist()):
            if label is not None:
                yield *label, math.isfinite(largest)
