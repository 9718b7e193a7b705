"""Snapshot: one copy of the training state in host memory, and what is known about it.

The copies and one check of all values are queued together on a stream; whether every number is finite is read once they
have arrived. `Snapshots` takes, keeps and restores them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steadygrad.act.pinned_memory import PinnedMemory
from steadygrad.state.collect import Source, State

ROOM = 8
"""Free device memory required before the state is copied there, as a multiple of the state's size."""


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
    labels: list[tuple[str, bool]] = field(default_factory=list)
    """Name of each checked tensor, and whether it must be finite."""
    finite: bool | None = None
    settings: tuple[tuple[float, float], ...] = ()
    """Learning rate and weight decay of each group when it was taken."""
    num_healthy: int = 0
    good: bool = False
    num_again: int = 0
    """Steps repeated from that state to reach this one; 0 for a copy of the run itself."""

    @property
    def has_arrived(self) -> bool:
        """Whether all copies have reached the host."""
        return all(event.query() for event in self.pinned_memory.events)

    def wait(self) -> None:
        """Wait for pending copies."""
        for event in self.pinned_memory.events:
            event.synchronize()

    def values(self) -> Iterator[tuple[str, bool, bool]]:
        """Yield each checked tensor's name, whether it must be finite, and whether it is."""
        self.wait()
        for (name, must_be_finite), largest in zip(self.labels, self.largest.tolist()):
            yield name, must_be_finite, math.isfinite(largest)


def copy_and_look(snapshot: Snapshot, pairs: list[tuple[Source, Tensor]]) -> None:
    """Queue the copies and one pass that finds non-finite values, on the current stream."""
    if pairs:
        torch._foreach_copy_([h for _, h in pairs], [s.tensor for s, _ in pairs], non_blocking=True)
        look(snapshot, [(s, s.tensor) for s, _ in pairs])


def stage_and_look(snapshot: Snapshot, sources: list[Source], side: torch.cuda.Stream) -> Any | None:
    """Copy the sources on the device now, and to the host during the following steps; None if there is no room.

    The copy to the host takes longer than a small step, 30 ms for GPT-2 124M, and the optimizer would have to wait for
    it; the copy on the device takes 1 ms. It is made only where `ROOM` times the state is free: training must not run
    out of memory because of us. The caller holds the returned object until the copy has arrived.
    """
    memory, device = snapshot.pinned_memory, sources[0].tensor.device
    if torch.cuda.mem_get_info(device)[0] < ROOM * memory.num_bytes:
        return None
    tensors = [source.tensor for source in sources]
    blocks, copies = memory.make_mirror(tensors, device)
    torch._foreach_copy_(copies, tensors)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        memory.fetch(blocks)
        look(snapshot, list(zip(sources, copies)))
    return blocks


def look(snapshot: Snapshot, pairs: list[tuple[Source, Tensor]]) -> None:
    """Queue one pass that finds non-finite values in the tensors that hold the sources' values."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Source, Tensor]]] = {}
    for source, tensor in pairs:
        if source.is_looked_at:
            groups.setdefault((tensor.device, tensor.dtype), []).append((source, tensor))
    for group in groups.values():
        norms = torch.stack(torch._foreach_norm([_as_real(tensor) for _, tensor in group], math.inf)).double()
        start = len(snapshot.labels)
        snapshot.largest[start : start + len(group)].copy_(norms, non_blocking=True)
        snapshot.labels += [(source.name, source.must_be_finite) for source, _ in group]


def _as_real(tensor: Tensor) -> Tensor:
    """Return the same values in a dtype that supports norms; float8 does not."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor
