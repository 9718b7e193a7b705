"""PinnedMemory: blocks of host memory that hold one copy of a state after another, so that memory is pinned once.

Many tensors share a block: torch rounds pinned memory up to a power of two, and a block for each would waste a third.
It knows which copies into it may be under way, and gives nothing out again before they have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a multiple of every element's size."""
BLOCK = 64 << 20
"""Bytes of a block that many tensors share."""


class PinnedMemory:
    """Blocks of host memory that hold one snapshot after another."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self.events: list[torch.cuda.Event] = []
        """Copies into it that may be under way."""

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return sum(block.numel() for block in self._blocks)

    def plan(self, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """For each size its (block, offset), and the sizes of the blocks that would have to be added."""
        used = [0] * len(self._blocks)
        capacity = [block.numel() for block in self._blocks]
        places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
        remaining = sum(map(_aligned, sizes))
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            size = _aligned(sizes[i])
            block = next((b for b in range(len(used)) if used[b] + size <= capacity[b]), None)
            if block is None:
                block = len(used)
                wanted = max(size, min(BLOCK, remaining))
                capacity.append(1 << (wanted - 1).bit_length() if self._pinned else wanted)
                used.append(0)
            places[i] = (block, used[block])
            used[block] += size
            remaining -= size
        return places, capacity[len(self._blocks) :]

    def make_room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A host tensor like each of these."""
        for event in self.events:
            if not event.query():  # a snapshot that was discarded at once may still be on its way in
                event.synchronize()
        self.events = []
        places, added = self.plan([count_bytes(tensor) for tensor in tensors])
        self._blocks += [torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for size in added]
        return [_view(self._blocks[block], offset, tensor) for (block, offset), tensor in zip(places, tensors)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def count_bytes(tensor: Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()


def _view(block: Tensor, offset: int, like: Tensor) -> Tensor:
    """Memory of `block` in dtype, shape and, where it has no gaps, strides of `like`: the copy is then one memcpy."""
    strides = torch.empty_like(like, device="meta").stride()
    return block[offset : offset + count_bytes(like)].view(like.dtype).as_strided(like.shape, strides)


def fits_a_block(tensor: Tensor) -> bool:
    """Whether a copy of it can live in a block; sparse and other unusual tensors cannot."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and tensor.numel() > 0
