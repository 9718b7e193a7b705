"""The bytes of a StoredTensor, a chunk at a time: nothing larger than a chunk is ever held.

A ChunkReader belongs to one thread. It reads into one buffer of its own rather than mapping the file: memory stays flat
as the system counts it, and a file that shrinks meanwhile is an error and no crash. Only a saved view with gaps is
mapped, privately, since its elements lie anywhere.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from steadygrad.errors import CheckpointError, DamagedCheckpoint, UnsupportedError
from steadygrad.scan.stored import StoredTensor

CHUNK_BYTES = 1 << 20
"""Fits the second-level cache, and is long enough that the calls around it do not count."""


class ChunkReader:
    """Reads stretches of files into one buffer. What it gives is valid until the next read."""

    def __init__(self) -> None:
        self._files: dict[Path, FileIO] = {}
        self._buffer = bytearray(CHUNK_BYTES)
        self._view = memoryview(self._buffer)
        self._bytes = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read_bytes(self, path: Path, offset: int, length: int) -> Tensor:
        """Return at most CHUNK_BYTES of a file, as uint8."""
        if path not in self._files:
            self._files[path] = path.open("rb", buffering=0)
        file = self._files[path]
        file.seek(offset)
        done = 0
        while done < length:
            count = file.readinto(self._view[done:length])  # unbuffered: it may return less than it was asked for
            if not count:
                raise DamagedCheckpoint(path, f"it ended at byte {offset + done} while it was read")
            done += count
        return self._bytes[:length]

    def held(self, length: int) -> memoryview:
        """Return the first bytes of the buffer, as they are now."""
        return self._view[:length]

    def read_elements(self, tensor: StoredTensor, start: int, length: int) -> Tensor:
        """The elements in so many bytes, `start` bytes behind the tensor's first; flat, in the order of the file."""
        assert tensor.dtype is not None
        return self.read_bytes(tensor.path, tensor.offset + start, length).view(tensor.dtype)

    def iterate(self, tensor: StoredTensor, start: int = 0, length: int | None = None) -> Iterator[Tensor]:
        """Yield the tensor, or a stretch of it, in flat chunks."""
        if tensor.has_gaps:
            # `stored_layout`: elements that `expand` repeats are looked at once
            yield from (
                chunk.reshape(-1).contiguous() for chunk in split_view(map_tensor(tensor, *tensor.stored_layout))
            )
            return
        end = tensor.num_bytes if length is None else start + length
        step = CHUNK_BYTES if tensor.dtype is None else CHUNK_BYTES * min(4, tensor.dtype.itemsize) // 4
        for position in range(start, end, step):  # narrow elements are widened to float32 by who looks at them
            yield self.read_elements(tensor, position, min(step, end - position))


def map_tensor(
    tensor: StoredTensor, shape: tuple[int, ...], stride: tuple[int, ...], *, writable: bool = False
) -> Tensor:
    """Return a layout of the tensor's elements on a mapping of its file: private, or written through to the file."""
    assert tensor.dtype is not None
    with tensor.path.open("r+b" if writable else "rb") as file:
        first = tensor.offset - tensor.offset % mmap.ALLOCATIONGRANULARITY
        length = tensor.offset + tensor.num_bytes - first
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY  # torch wants a writable buffer
        # It outlives the closed file; the tensor made of it keeps it mapped
        mapping = mmap.mmap(file.fileno(), length, offset=first, access=access)
    stored = torch.frombuffer(mapping, dtype=torch.uint8, offset=tensor.offset - first)
    if stored.data_ptr() % tensor.dtype.itemsize:
        if writable:
            raise UnsupportedError(
                f"{tensor.path} holds a tensor of {tensor.dtype} from byte {tensor.offset} on, where elements cannot "
                "be written in place. Load the file, save it again with today's torch.save, and clean that."
            )
        stored = stored.clone()
    return stored.view(tensor.dtype).as_strided(shape, stride)


def split_view(view: Tensor) -> Iterator[Tensor]:
    """Yield parts of a tensor of any layout, none larger than a chunk; views, so that writing to one writes to it."""
    if view.dim() == 0 or view.numel() * view.element_size() <= CHUNK_BYTES:
        yield view
        return
    row_bytes = view.numel() // view.shape[0] * view.element_size()
    for part in view.split(max(1, CHUNK_BYTES // max(1, row_bytes))):
        if part.shape[0] == 1 and row_bytes > CHUNK_BYTES:
            yield from split_view(part[0])
        else:
            yield part


def read_tensor(stored: StoredTensor) -> Tensor:
    """Return the tensor itself, in memory."""
    assert stored.dtype is not None
    buffer = bytearray(stored.num_bytes)
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        if file.readinto(buffer) != stored.num_bytes:
            raise CheckpointError(f"{stored.path} ended while {stored.name} was read. Use another copy.")
    if not buffer:
        return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8).view(stored.dtype).as_strided(stored.shape, stored.stride)


# --- threads ------------------------------------------------------------------------------------------------------
# ReaderPool: work on many stretches of files -> its results in order, on as many threads as there are processors.
#
# torch gets one thread a call meanwhile, and its own number back at the end: the parallel ones are ours, each with
# buffers that stay in its processor's cache.


Item = TypeVar("Item")
Result = TypeVar("Result")
Readers = tuple[ChunkReader, ChunkReader]


class ReaderPool:
    """Threads with two ChunkReaders each, for work that compares."""

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads or count_cpus()
        self._local, self._opened = threading.local(), list[Readers]()
        self._torch_threads = torch.get_num_threads()

    def __enter__(self) -> ReaderPool:
        self._pool = ThreadPoolExecutor(self._num_threads, "steadygrad-read", self._open)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for reader in (reader for pair in self._opened for reader in pair):
            reader.close()
        torch.set_num_threads(self._torch_threads)  # parts of it are process-wide

    def _open(self) -> None:
        # In each thread of the pool: OpenMP keeps this number by thread, and threads times threads would be slower
        torch.set_num_threads(1)
        self._local.readers = (ChunkReader(), ChunkReader())
        self._opened.append(self._local.readers)  # closed by the main thread, since a thread's end closes nothing

    def map(self, work: Callable[[Readers, Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield results in the order of the items; the first error ends it."""
        return self._pool.map(lambda item: work(self._local.readers, item), items)


def count_cpus() -> int:
    """Return the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
