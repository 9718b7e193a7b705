"""All live objects -> the DataLoaders that are being iterated over.

Only when a suspicion is to be settled, since all objects of the process are searched. Reads only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from steadygrad.state.live_objects import list_live


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
    read = [_describe(one) for one in list_live(_BaseDataLoaderIter) if "_index_sampler" in vars(one)]
    rest = list_live(DataLoader) if idle else []
    return [*read, *(Loader(one.dataset, one.num_workers, _count(one), one.batch_size, one.sampler) for one in rest)]


def _describe(one: _BaseDataLoaderIter) -> Loader:
    batches: Any = one._index_sampler
    sampler = getattr(batches, "sampler", batches)
    return Loader(one._dataset, one._num_workers, _count(batches), getattr(batches, "batch_size", None), sampler)


def _count(batches: Any) -> int:
    try:
        return len(batches)
    except Exception:  # an iterable dataset has no length
        return 0
