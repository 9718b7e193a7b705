"""ReaderPool: work on many stretches of files -> its results in order, on as many threads as there are processors.

torch gets one thread a call meanwhile, and its own number back at the end: the parallel ones are ours, each with
buffers that stay in its processor's cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from steadygrad.scan.readers.chunks import ChunkReader

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
        torch.set_num_threads(self._torch_threads)

    def _open(self) -> None:
        torch.set_num_threads(1)
        self._local.readers = (ChunkReader(), ChunkReader())
        self._opened.append(self._local.readers)

    def map(self, work: Callable[[Readers, Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in the order of the items; the first error ends it."""
        return self._pool.map(lambda item: work(self._local.readers, item), items)


def count_cpus() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
