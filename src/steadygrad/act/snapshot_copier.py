"""Copier: tensors -> a snapshot's host memory, beside training.

Where the device has room, the state is copied there first, which takes 1 ms for GPT-2 124M, and fetched during the
following steps. Otherwise what only an optimizer changes is copied on a side stream while the next forward runs, and
that optimizer waits for it on the device. The host never waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.pinned_memory import PinnedMemory
from steadygrad.act.snapshot import Snapshot
from steadygrad.measure.meter import triton_is_usable
from steadygrad.state.collect import Source

ROOM = 8
"""Free device memory required before the state is copied there, as a multiple of the state's size."""
MIN_BLOCKS = 2
"""Blocks fetched to the host in one step at least: 128 MiB, 2.5 ms of the copy engine."""
MAX_STEPS = 24
"""Steps after which all blocks are fetched."""
Pairs = list[tuple[Source, Tensor]]
"""Tensors, and where in host memory they go."""


class Copier:
    """Copies one snapshot after another."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: list[tuple[torch.device, torch.cuda.Event, list[Source]]] = []
        self._staged: list[tuple[PinnedMemory, Any]] = []  # device copies not yet on the host
        self._layout: list[object] = []
        self._kernels: Any = None

    def copy(self, snapshot: Snapshot, pairs: Pairs) -> None:
        """Queue the copies of a snapshot."""
        devices = list(dict.fromkeys(s.tensor.device for s, _ in pairs))
        # At step 0 it is not known yet how much device memory training will need.
        if snapshot.step > 0 and len(devices) == 1 and self._stage(snapshot, [s for s, _ in pairs], devices[0]):
            return
        # What a forward may change, such as buffers, is copied on the forward's own stream, before it.
        copy_and_look(snapshot, [(s, h) for s, h in pairs if not (s.late and s.tensor.is_cuda)])
        for device in devices:
            if device.type == "cuda":
                late = [(s, h) for s, h in pairs if s.late and s.tensor.device == device]
                self._copy_beside(snapshot, late, device)

    @torch.no_grad()
    def compile(self, device: torch.device) -> None:
        """Load the kernels of a snapshot and open its stream now, so that no step waits for them."""
        self._find_stream(device)
        sample = torch.zeros(16, device=device)
        torch.stack(torch._foreach_norm([sample, sample], math.inf)).double()
        if triton_is_usable():
            from steadygrad.act import triton_copy

            counts = triton_copy.StateCopy([sample]).copy([sample], [torch.zeros_like(sample).data_ptr()])
            torch.where(counts > 0, math.inf, 0.0).double()

    def _stage(self, snapshot: Snapshot, sources: list[Source], device: torch.device) -> bool:
        """Copy the sources on the device now, and to the host during the following steps; False if that cannot be.

        The copy to the host takes longer than a small step, 30 ms for GPT-2 124M, and the optimizer would have to wait
        for it; the copy on the device takes 1 ms.
        """
        memory = snapshot.pinned_memory
        if device.type != "cuda" or not has_room(memory, device) or not self._has_kernels(sources, memory.layout):
            return False
        current, side = torch.cuda.current_stream(device), self._find_stream(device)
        with torch.cuda.stream(side):  # where `make_reserve` had the allocator keep them
            blocks = memory.make_blocks(device)
        current.wait_stream(side)  # the allocator hands out memory in this stream's order
        targets = [blocks[block].data_ptr() + offset for block, offset in memory.places]
        counts = self._kernels.copy([source.tensor for source in sources], targets)
        side.wait_stream(current)  # blocks and counts are written there
        with torch.cuda.stream(side):
            snapshot.note_largest(sources, torch.where(counts > 0, math.inf, 0.0).double())
        memory.plan_fetch(blocks, side)
        memory.fetch_some(MIN_BLOCKS)  # its event also says that the check has arrived
        self._staged.append((memory, (blocks, counts)))
        return True

    def _has_kernels(self, sources: list[Source], layout: list[object]) -> bool:
        """Prepare the kernel for sources of this layout; return whether it can copy them all."""
        if layout != self._layout:
            self._layout, self._kernels = layout, None
            if triton_is_usable():
                from steadygrad.act import triton_copy

                if all(triton_copy.fits(source.tensor) for source in sources):
                    self._kernels = triton_copy.StateCopy([source.tensor for source in sources])
        return self._kernels is not None

    def before_optimizer(self) -> None:
        """Make the device, not the host, wait for pending copies before it changes what is being copied."""
        for device, event, _ in self._under_way:
            torch.cuda.current_stream(device).wait_event(event)
        self._under_way = []

    def advance(self) -> None:
        """Fetch the next part of a copy from the device, once a step; release its device memory when all is here."""
        for memory, _ in self._staged:
            memory.fetch_some(max(MIN_BLOCKS, -(-memory.num_blocks // MAX_STEPS)))
        if self._staged:
            self._staged = [(memory, held) for memory, held in self._staged if not memory.has_arrived]

    def make_reserve(self, memory: PinnedMemory, model: nn.Module) -> Callable[[], None]:
        """Return a function for another thread, which has torch's allocator keep device memory for the next copy.

        The first allocation of 1.5 GB takes 0.1 s; a later one finds it in the allocator's cache.
        """
        device = next((p.device for p in model.parameters() if p.is_cuda), None)
        if device is None:  # the model was moved to the host
            return lambda: None
        side = self._find_stream(device)

        def reserve() -> None:
            with torch.cuda.stream(side):
                if has_room(memory, device):
                    memory.make_blocks_slowly(device)

        return reserve

    def _copy_beside(self, snapshot: Snapshot, late: Pairs, device: torch.device) -> None:
        """Copy on a side stream what only an optimizer step can change; that step will wait for the copy."""
        current, side = torch.cuda.current_stream(device), self._find_stream(device)
        if late:
            side.wait_stream(current)  # the last optimizer step must have written what is copied
            with torch.cuda.stream(side):
                copy_and_look(snapshot, late)
            event = torch.cuda.Event()
            event.record(side)
            # Held until the device is ordered after the copy: freed memory could be reused at once and overwritten.
            self._under_way.append((device, event, [s for s, _ in late]))
            snapshot.pinned_memory.events.append(event)
        done = torch.cuda.Event()
        # Covers what was copied on the forward's own stream.
        done.record(current)
        snapshot.pinned_memory.events.append(done)

    def _find_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def has_room(memory: PinnedMemory, device: torch.device) -> bool:
    """Return whether the device has enough to spare for a copy: training must not run out of memory because of us."""
    return torch.cuda.mem_get_info(device)[0] >= ROOM * memory.num_bytes


def copy_and_look(snapshot: Snapshot, pairs: list[tuple[Source, Tensor]]) -> None:
    """Queue the copies and one pass that finds non-finite values, on the current stream."""
    if pairs:
        torch._foreach_copy_([h for _, h in pairs], [s.tensor for s, _ in pairs], non_blocking=True)
        look(snapshot, [(s, s.tensor) for s, _ in pairs])


def look(snapshot: Snapshot, pairs: list[tuple[Source, Tensor]]) -> None:
    """Queue one pass that finds non-finite values in the tensors that hold the sources' values."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Source, Tensor]]] = {}
    for source, tensor in pairs:
        if source.is_looked_at:
            groups.setdefault((tensor.device, tensor.dtype), []).append((source, tensor))
    for group in groups.values():
        snapshot.note_largest([source for source, _ in group], _measure([_as_real(tensor) for _, tensor in group]))


def _measure(tensors: list[Tensor]) -> Tensor:
    """Return a number for each tensor that is finite if all its elements are: float64 [N]."""
    if tensors[0].device.type == "cpu":
        # The norm for 2 takes a twentieth of the time there; it may overflow where the largest element does not.
        norms = torch.stack(torch._foreach_norm(tensors)).double()
        if norms.isfinite().all():
            return norms
    return torch.stack(torch._foreach_norm(tensors, math.inf)).double()


def _as_real(tensor: Tensor) -> Tensor:
    """Return the same values in a dtype that supports norms; float8 does not."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor
