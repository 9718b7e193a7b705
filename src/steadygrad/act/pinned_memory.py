"""PinnedMemory: blocks of host memory that hold one copy of a state after another, so that memory is pinned once.

Pinning 1.5 GB on the training thread costs 0.7 s. Here a thread maps the pages, touches them and registers them with
CUDA, a block at a time, ahead of the snapshot that needs them: on an H200 0.2 s, and the slowest step meanwhile took
1.2 times as long as usual. Many tensors share a block. Nothing is given out again before copies into it have arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a multiple of every element's size."""
BLOCK = 64 << 20
"""Bytes of a block that many tensors share; CUDA registers it in 1.5 ms, and a launch may have to wait so long."""
PAGE = 2 << 20
"""Bytes; huge pages where the system has them, which are touched and registered twice as fast."""


class PinnedMemory:
    """Blocks of host memory that hold one snapshot after another."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._sizes: list[int] = []  # of all blocks, those included that a thread is still pinning
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._layout: list[object] = []  # what room was made for last
        self._hosts: list[Tensor] = []
        self._places: list[tuple[int, int]] = []
        self.events: list[torch.cuda.Event] = []
        """Copies into it that may be under way."""

    @property
    def num_bytes(self) -> int:
        """Memory that it holds, or will in a moment."""
        return sum(self._sizes)

    def plan(self, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """For each size its (block, offset), and the sizes of the blocks that would have to be added."""
        return plan_blocks(tuple(self._sizes), tuple(sizes), self._pinned)

    def prepare(self, sizes: Sequence[int]) -> None:
        """Have a thread make the blocks for tensors of these sizes, so that `make_room` need not wait for them."""
        self._finish()
        added = self.plan(sizes)[1]
        if added:
            self._sizes += added
            self._thread = threading.Thread(target=self._add, args=(added,), name="steadygrad-pin", daemon=True)
            self._thread.start()

    def make_room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A host tensor like each of these; raises RuntimeError or MemoryError where there is no memory for them."""
        for event in self.events:
            if not event.query():  # a snapshot that was discarded at once may still be on its way in
                event.synchronize()
        self.events = []
        self._finish()
        layout: list[object] = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
        if layout == self._layout and layout:
            return list(self._hosts)
        places, added = self.plan([count_bytes(tensor) for tensor in tensors])
        self._sizes += added
        self._add(added)
        if self._error is not None:
            raise self._error
        views = zip(places, tensors)
        self._layout, self._places = layout, places
        self._hosts = [make_view(self._blocks[block], offset, tensor) for (block, offset), tensor in views]
        return list(self._hosts)

    def make_mirror(self, tensors: Sequence[Tensor], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """Blocks on the device like those here, and a view for each tensor that room was made for, in that order."""
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in self._sizes]
        # One view a tensor, of the block in its dtype: half the time of cutting out the bytes first.
        typed = {(b, d): blocks[b].view(d) for b, d in {(b, t.dtype) for (b, _), t in zip(self._places, tensors)}}
        views = [
            typed[block, host.dtype].as_strided(host.shape, host.stride(), offset // host.element_size())
            for (block, offset), host in zip(self._places, self._hosts)
        ]
        return blocks, views

    def fetch(self, mirror: Sequence[Tensor]) -> None:
        """Queue the copy of a mirror's blocks to the host: a few large copies for any number of tensors."""
        for host, block in zip(self._blocks, mirror):
            host.copy_(block, non_blocking=True)

    def _add(self, sizes: Sequence[int]) -> None:
        try:
            for size in sizes:
                self._blocks.append(pin(size) if self._pinned else torch.empty(size, dtype=torch.uint8))
        except (RuntimeError, MemoryError, OSError) as error:  # told by `make_room`, on the thread that asks for it
            self._error = RuntimeError(str(error))

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@functools.lru_cache(maxsize=16)  # a state has the same layout from one snapshot to the next
def plan_blocks(
    blocks: tuple[int, ...], sizes: tuple[int, ...], pinned: bool
) -> tuple[list[tuple[int, int]], list[int]]:
    """For each size its (block, offset), the first that has room; and the sizes of the blocks that must be added."""
    capacity, used = list(blocks), [0] * len(blocks)
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    remaining = sum(map(_aligned, sizes))
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = _aligned(sizes[i])
        block = next((b for b in range(len(used)) if used[b] + size <= capacity[b]), None)
        if block is None:
            block = len(used)
            wanted = max(size, min(BLOCK, remaining))
            capacity.append(-(-wanted // PAGE) * PAGE if pinned else wanted)
            used.append(0)
        places[i] = (block, used[block])
        used[block] += size
        remaining -= size
    return places, capacity[len(blocks) :]


def pin(size: int) -> Tensor:
    """Pinned bytes; a multiple of `PAGE`. May run beside training, a CUDA graph that is being recorded included."""
    if not _relax_capture():
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, size, **private)  # shared pages are never huge ones
    with contextlib.suppress(AttributeError, OSError):  # not on this system
        pages.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(pages, dtype=torch.uint8)
    block[:: mmap.PAGESIZE].fill_(0)  # CUDA would touch them one by one, and hold up every launch meanwhile
    cudart = torch.cuda.cudart()
    if int(cudart.cudaHostRegister(block.data_ptr(), size, 0)) != 0:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # `pages` is held by the finaliser, so that they are not unmapped while CUDA knows them; at exit all goes anyway.
    weakref.finalize(block.untyped_storage(), _unpin, cudart.cudaHostUnregister, block.data_ptr(), pages).atexit = False
    return block


def _unpin(unregister: Callable[[int], object], address: int, pages: mmap.mmap) -> None:
    unregister(address)
    del pages


def _relax_capture() -> bool:
    """Allow this thread to register memory while another records a CUDA graph, as torch's own allocator does."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    try:
        library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
        exchange = library.cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    relaxed = ctypes.c_int(2)
    return bool(exchange(ctypes.byref(relaxed)) == 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def count_bytes(tensor: Tensor) -> int:
    """Size in bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def make_view(block: Tensor, offset: int, like: Tensor) -> Tensor:
    """Memory of `block` in dtype, shape and, where it has no gaps, strides of `like`: the copy is then one memcpy."""
    strides = like.stride() if like.is_contiguous() else torch.empty_like(like, device="meta").stride()
    return block[offset : offset + count_bytes(like)].view(like.dtype).as_strided(like.shape, strides)
