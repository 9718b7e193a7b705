"""Snapshot: one copy of the training state in host memory, and what is known of it.

The copies and one look at all of it are queued together on a stream; whether every number is finite is read when they
have arrived. Taking, keeping and putting back are `Snapshots`'.
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
"""Times the state that must be free on the device before it is copied there."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of the state before step `step`."""

    step: int
    state: State
    pinned_memory: PinnedMemory
    hosts: list[Tensor]
    devices: list[torch.device]
    largest: Tensor
    """The largest absolute value of each tensor that was looked at: not finite where the tensor is not."""
    labels: list[tuple[str, bool]] = field(default_factory=list)
    """Of each of these tensors the name, and whether it must be finite."""
    finite: bool | None = None
    settings: tuple[tuple[float, float], ...] = ()
    """Learning rate and weight decay of each group at the time."""
    num_healthy: int = 0
    good: bool = False
    num_again: int = 0
    """Steps that were made again from there to come here; 0 for a copy of the run itself."""

    @property
    def has_arrived(self) -> bool:
        """Whether everything is on the host."""
        return all(event.query() for event in self.pinned_memory.events)

    def wait(self) -> None:
        """Wait for copies under way."""
        for event in self.pinned_memory.events:
            event.synchronize()

    def values(self) -> Iterator[tuple[str, bool, bool]]:
        """Each tensor that was looked at: its name, whether it must be finite, and whether it is."""
        self.wait()
        for (name, must_be_finite), largest in zip(self.labels, self.largest.tolist()):
            yield name, must_be_finite, math.isfinite(largest)


def copy_and_look(snapshot: Snapshot, pairs: list[tuple[Source, Tensor]]) -> None:
    """Queue the copies and one pass that finds what is not finite, on the stream that is current."""
    if pairs:
        torch._foreach_copy_([h for _, h in pairs], [s.tensor for s, _ in pairs], non_blocking=True)
        look(snapshot, [(s, s.tensor) for s, _ in pairs])


def stage_and_look(snapshot: Snapshot, sources: list[Source], side: torch.cuda.Stream) -> Any | None:
    """Copy the sources on the device now and to the host beside the steps that follow; None where there is no room.

    The copy to the host takes longer than a small step, 30 ms for GPT-2 124M, and the optimizer would have to wait for
    it; that on the device takes 1 ms. Only where `ROOM` times the state is free: training must not run out of memory
    because of us. The caller holds what this returns until the copy has arrived.
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
    """Queue one pass that finds what is not finite, in the tensors that hold the sources' values."""
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
    """The same values in a dtype that has a norm; float8 has none."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor
