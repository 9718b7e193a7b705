"""Lineage: which events wrote what a tensor holds, followed by storage, without keeping a tensor alive.

A storage is known by its address, which a weak reference keeps from being used again. A write to all of it forgets the
writes before, a write to a part (a slice, an index) adds to them. A storage without a recorded write came from outside
the step: a weight, a batch, a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

MAX_WRITERS = 64
"""Partial writes that are remembered of one storage; a loop that fills a long buffer keeps its last ones."""


def find_storages(tensor: Tensor) -> list[Any]:
    """Return the storages behind a tensor: those of the values first; none where there is no such thing."""
    try:
        if tensor.layout is torch.strided:
            return [tensor.untyped_storage()]
        if tensor.layout is torch.sparse_coo:
            return [tensor._values().untyped_storage(), tensor._indices().untyped_storage()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            return [tensor.values().untyped_storage()]
    except (NotImplementedError, RuntimeError):
        pass
    return []


class Lineage:
    """The writers of every storage that was seen."""

    def __init__(self) -> None:
        self._writers: dict[int, tuple[int, ...]] = {}
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}

    def find_keys(self, tensor: Tensor) -> tuple[int, ...]:
        """Return what the storages of `tensor` are known by from now on."""
        keys = []
        for storage in find_storages(tensor):
            key = storage._cdata
            if key not in self._alive:
                self._alive[key] = StorageWeakRef(storage)
                self._sizes[key] = storage.nbytes()
            keys.append(key)
        return tuple(keys)

    def writers(self, key: int) -> tuple[int, ...]:
        """Return the events that wrote what the storage holds now, oldest first; empty when it came from outside."""
        return self._writers.get(key, ())

    def write(self, key: int, event: int, *, everything: bool) -> None:
        """Record that `event` wrote to the storage."""
        before = () if everything else self._writers.get(key, ())
        self._writers[key] = (*before, event)[-MAX_WRITERS:]

    def covers(self, key: int, tensor: Tensor) -> bool:
        """Whether `tensor` is all of the storage."""
        if tensor.layout is not torch.strided:
            return True
        # By size, not by strides: exact for a dense tensor; an expanded one counts as all of its storage.
        return tensor.numel() * tensor.element_size() >= self._sizes[key]
