"""All live objects -> the DataLoaders that are being iterated over.

Walks the garbage collector's list, which takes about 0.1 s: only when a suspicion is to be settled. Reads only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter


@dataclass(frozen=True, slots=True)
class Loader:
    """A DataLoader, as far as it explains the batches that it makes."""

    dataset: Any
    num_workers: int
    num_batches: int
    """0 if it has no length."""
    batch_size: int | None
    sampler: Any

    @property
    def is_distributed(self) -> bool:
        """Whether its order depends on `set_epoch`."""
        return hasattr(self.sampler, "set_epoch")

    @property
    def shuffles(self) -> bool:
        """Whether its sampler is meant to shuffle."""
        by_epoch = self.is_distributed and bool(getattr(self.sampler, "shuffle", False))
        return isinstance(self.sampler, RandomSampler) or by_epoch


def list_loaders(*, idle: bool = False) -> list[Loader]:
    """Return every DataLoader of this process that is being iterated over, by the iterators that are alive.

    One that merely exists says little about the batches of this training: it may be another's, or for validation.
    `idle`: include those too, for `next(iter(loader))`, whose iterator is gone at once.
    """
    return [*_find_loaders(idle=idle)]


def _find_loaders(*, idle: bool) -> Iterator[Loader]:
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance() would run the code of lazy proxies
        if issubclass(kind, _BaseDataLoaderIter):
            batches = thing._index_sampler
            sampler = getattr(batches, "sampler", batches)
            size = getattr(batches, "batch_size", None)
            yield Loader(thing._dataset, thing._num_workers, _count(batches), size, sampler)
        elif idle and issubclass(kind, DataLoader):
            yield Loader(thing.dataset, thing.num_workers, _count(thing), thing.batch_size, thing.sampler)


def _count(batches: Any) -> int:
    try:
        return len(batches)
    except Exception:  # an iterable dataset has no length
        return 0
