"""PinnedMemory: blocks of host memory that hold one copy of a state after another, so that memory is pinned once.

Pinning 1.5 GB on the training thread costs 0.7 s. Here a background thread maps, touches and registers the pages with
CUDA, one block at a time, ahead of the snapshot that needs them: on an H200 this took 0.2 s, and the slowest step
meanwhile took 1.2 times as long as usual. Several threads pin without pauses before the first step, and whenever
training has to wait for the memory. Many tensors share a block. A block is reused only after pending copies into it
have finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from steadygrad.state.collect import Source

ALIGNMENT = 64
"""Bytes; a multiple of every element's size."""
BLOCK = 64 << 20
"""Bytes of a block that many tensors share. CUDA registers it in 1.5 ms, which a launch may have to wait for."""
PACE = 3.0
"""Pause after each block that a thread pins or allocates, as a multiple of the time it took, in which launches wait."""
NUM_THREADS = 4
"""Threads that pin while nothing is disturbed: most of the time goes into touching pages, which they do in parallel."""
PORTABLE = 1
"""CUDA's cudaHostRegisterPortable: pinned for every device, whichever of them the registering thread is on."""
PAGE = 2 << 20
"""Bytes of a huge page, used where the system has them: pinned memory is touched and registered twice as fast, and the
first copy of 120 MB on the CPU takes 10 ms instead of 50, most of which were page faults."""


class PinnedMemory:
    """Blocks of host memory that hold one snapshot after another."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []
        self._sizes: list[int] = []  # of all blocks, including those a thread is still pinning
        self._thread: threading.Thread | None = None
        self._is_awaited, self._is_stopped = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.layout: list[object] = []
        """Dtypes, shapes and strides that `make_room` made room for last."""
        self._hosts: list[Tensor] = []
        self.places: list[tuple[int, int]] = []
        """Block and offset of each tensor that `make_room` made room for."""
        self._left: list[tuple[Tensor, Tensor]] = []  # blocks still to be fetched, and where they are on the device
        self._stream: torch.cuda.Stream | None = None
        self.events: list[torch.cuda.Event] = []
        """Events of copies into these blocks that may still be running."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including those being pinned."""
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all blocks, including those being pinned."""
        return sum(self._sizes)

    def plan(self, sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return each size's (block, offset), and the sizes of the blocks that would have to be added."""
        return plan_blocks(tuple(self._sizes), tuple(sizes), self._pinned)

    @property
    def is_preparing(self) -> bool:
        """Whether the thread of `prepare` is at work: `make_room` would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, sizes: Sequence[int], then: Callable[[], None] | None = None, *, slowly: bool = True) -> None:
        """Have a thread allocate blocks for tensors of these sizes: `make_room` need not wait then.

        `slowly`: a little at a time, because a training runs. `then` is called in that thread afterwards; it may fail.
        """
        self._finish()
        added = self.plan(sizes)[1]
        if added:
            # Before the thread starts: from now on plan() counts these blocks as there.
            self._sizes += added
            add = functools.partial(self._add, added, then, slowly=slowly)
            self._thread = threading.Thread(target=add, name="steadygrad-pin", daemon=True)
            self._thread.start()
            # Called at exit, too: Python would end the thread inside a call of CUDA's, and that aborts the process.
            weakref.finalize(self, _stop, self._thread, self._is_stopped, self._is_awaited)

    def make_room(self, sources: Sequence[Source]) -> list[Tensor]:
        """Return a host tensor for each of these; raise RuntimeError or MemoryError if there is no memory for them."""
        for event in self.events:
            if not event.query():  # a snapshot discarded at once may still be copying
                event.synchronize()
        # In place: the finalizers of the blocks hold this very list.
        self.events.clear()
        self._left = []  # the rest of a discarded snapshot
        # The thread appends to the blocks until here.
        self._finish()
        layout: list[object] = [source.layout for source in sources]
        if layout == self.layout and layout:
            return list(self._hosts)
        places, added = self.plan([source.num_bytes for source in sources])
        self._sizes += added
        self._add(added)
        if self._error is not None:
            raise self._error
        self.layout, self.places = layout, places
        self._hosts = make_views(self._blocks, places, [source.tensor for source in sources])
        return list(self._hosts)

    def make_blocks(self, device: torch.device) -> list[Tensor]:
        """Return blocks on the device of the same sizes."""
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in self._sizes]

    def make_blocks_slowly(self, device: torch.device) -> None:
        """Have torch's allocator keep memory for such blocks, a little at a time. For `prepare`'s thread."""
        # All of them until the end: the allocator would hand out one that was freed again and again.
        held = []
        for size in self._sizes:
            if self._is_stopped.is_set():
                return
            began = time.monotonic()
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
            self._pause(time.monotonic() - began)

    def plan_fetch(self, mirror: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        """Have `fetch_some` copy a mirror's blocks to the host on `stream`."""
        self._stream, self._left = stream, list(zip(self._blocks, mirror))

    def fetch_some(self, num: int) -> None:
        """Queue the copies of the next `num` blocks.

        All at once would keep the copy engine busy for 30 ms with GPT-2 124M, and the numbers of the next step, for
        which the host waits, would queue behind them.
        """
        if not self._left:
            return
        now, self._left = self._left[:num], self._left[num:]
        with torch.cuda.stream(self._stream):
            for host, block in now:
                host.copy_(block, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.events.append(event)

    @property
    def has_arrived(self) -> bool:
        """Whether everything has reached the host."""
        return not self._left and all(event.query() for event in self.events)

    def wait(self) -> None:
        """Wait until everything has reached the host."""
        self.fetch_some(len(self._left))
        for event in self.events:
            event.synchronize()

    def _add(self, sizes: Sequence[int], then: Callable[[], None] | None = None, *, slowly: bool = False) -> None:
        try:
            if self._pinned and not slowly and len(sizes) > 1:
                with ThreadPoolExecutor(NUM_THREADS) as pool:
                    self._blocks += list(pool.map(self._add_one, sizes))
                sizes = ()
            for size in sizes:
                began = time.monotonic()
                self._blocks.append(self._add_one(size))
                self._pause(time.monotonic() - began)
            if then is not None:
                with contextlib.suppress(RuntimeError):  # no memory left on the device
                    then()
        except (RuntimeError, MemoryError, OSError) as error:  # `make_room` raises it on the calling thread
            self._error = RuntimeError(str(error))

    def _add_one(self, size: int) -> Tensor:
        if self._is_stopped.is_set():
            raise RuntimeError("the process ends")
        if self._pinned:
            return pin(size, self.events)
        return (
            torch.frombuffer(map_pages(size), dtype=torch.uint8)
            if size >= PAGE
            else torch.empty(size, dtype=torch.uint8, device="cpu")
        )

    def _pause(self, seconds: float) -> None:
        """Let training go on after `seconds` of work, unless it waits for this, or this is its own thread."""
        if threading.current_thread() is self._thread:
            self._is_awaited.wait(PACE * seconds)  # not sleep(): _finish() ends the pause at once

    def _finish(self) -> None:
        if self._thread is not None:
            self._is_awaited.set()
            self._thread.join()
            self._thread = None
            self._is_awaited.clear()


def _stop(thread: threading.Thread, is_stopped: threading.Event, is_awaited: threading.Event) -> None:
    """End a thread of `prepare`, after the block that it is at."""
    is_stopped.set()
    is_awaited.set()  # ends a pause
    if thread is not threading.current_thread():  # the last reference may go on that thread
        thread.join()


# The lists in the cache are shared by all callers, so none of them may change what it gets.
@functools.lru_cache(maxsize=16)  # a state has the same layout from one snapshot to the next
def plan_blocks(
    blocks: tuple[int, ...], sizes: tuple[int, ...], pinned: bool
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return each size's (block, offset), first fit, and the sizes of the blocks that must be added."""
    capacity, used = list(blocks), [0] * len(blocks)
    places: list[tuple[int, int]] = [(0, 0)] * len(sizes)
    remaining = sum(map(_aligned, sizes))
    # Large ones first: the small ones then fill the gaps.
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = _aligned(sizes[i])
        block = next((b for b in range(len(used)) if used[b] + size <= capacity[b]), None)
        if block is None:
            block = len(used)
            wanted = max(size, min(BLOCK, remaining))
            capacity.append(-(-wanted // PAGE) * PAGE if pinned or wanted >= PAGE else wanted)
            used.append(0)
        places[i] = (block, used[block])
        used[block] += size
        remaining -= size
    return places, capacity[len(blocks) :]


def pin(size: int, events: Sequence[torch.cuda.Event] = ()) -> Tensor:
    """Return pinned bytes, a multiple of `PAGE`. Safe to run during training, even while a CUDA graph is recorded.

    `events`: a live list of the copies into them. They are waited for before the pages go.
    """
    if not _relax_capture():
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
    pages = map_pages(size)
    block = torch.frombuffer(pages, dtype=torch.uint8)
    block[:: mmap.PAGESIZE].fill_(0)  # otherwise CUDA touches them one by one and blocks every launch meanwhile
    cudart = torch.cuda.cudart()
    with torch.cuda.device(find_used_device()):
        failure = int(cudart.cudaHostRegister(block.data_ptr(), size, PORTABLE))
    if failure:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")
    # The finalizer holds `pages`, so that they stay mapped while registered with CUDA; at exit the process frees all.
    unregister, address = cudart.cudaHostUnregister, block.data_ptr()
    # On the storage, not the tensor: views of the block keep the storage alive, not `block`.
    weakref.finalize(block.untyped_storage(), _unpin, unregister, address, pages, events).atexit = False
    return block


def map_pages(size: int) -> mmap.mmap:
    """Return new memory, in huge pages where the system has them."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, size, **private)  # shared pages are never huge pages
    with contextlib.suppress(AttributeError, OSError):  # not supported on this system
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _unpin(
    unregister: Callable[[int], object], address: int, pages: mmap.mmap, events: Sequence[torch.cuda.Event]
) -> None:
    # Unlike memory of torch's own allocator, these pages would be unmapped under a copy that is still running.
    for event in events:
        event.synchronize()
    with torch.cuda.device(find_used_device()):  # the last reference may go on any thread
        unregister(address)
    del pages


def find_used_device() -> int:
    """Return a CUDA device on which this process has a context; -1, torch's word for no choice, if there is none.

    Each new thread begins on device 0. A call of CUDA's there would create a context on it, half a gigabyte, in every
    process that trains on another device: with eight ranks, seven on the device of rank 0.
    """
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return -1
    return next((i for i in range(torch.cuda.device_count()) if has_context(i)), -1)


def _relax_capture() -> bool:
    """Allow this thread to register memory while another records a CUDA graph, as torch's own allocator does."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    try:
        library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
        exchange = library.cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return False
    relaxed = ctypes.c_int(2)  # cudaStreamCaptureModeRelaxed
    return bool(exchange(ctypes.byref(relaxed)) == 0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def make_views(blocks: Sequence[Tensor], places: Sequence[tuple[int, int]], like: Sequence[Tensor]) -> list[Tensor]:
    """View blocks like the tensors in `like`, with their strides if they have no gaps, so that a copy is one memcpy."""
    typed: dict[tuple[int, torch.dtype], Tensor] = {}
    views = []
    for (block, offset), tensor in zip(places, like):
        whole = typed.get((block, tensor.dtype))
        if whole is None:
            whole = typed[block, tensor.dtype] = blocks[block].view(tensor.dtype)
        strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        views.append(whole.as_strided(tensor.shape, strides, offset // tensor.element_size()))
    return views
