"""What travels with a DataLoader's worker processes, so that a pass can go on in its middle.

Each batch comes back with the state of the random generators of the worker that made it; a resumed worker is given
that state before it makes its next. Index batches that were already used are left out of the sampler's stream; the
few that are needed to keep each batch with its worker are sent as empty ones, and no data is loaded for them. What the
user's functions return is not changed. Everything here can be pickled, since workers may be spawned.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from steadygrad.state.random_state import capture_random, restore_random

Tag = tuple[int, dict[str, Any]]
"""Worker, and its random state after the batch. torch's is bytes on the way: tensors would travel as open files."""


@dataclass
class TaggingCollate:
    """The user's collate function, whose batches carry a tag; None in place of an empty batch."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[Any, Tag | None]:
        info = get_worker_info()
        assert info is not None
        if isinstance(samples, list) and not samples:
            return None, None
        batch = self.collate(samples)
        state = capture_random(())
        return batch, (info.id, state | {"torch": bytes(state["torch"].tolist())})


@dataclass
class ResumingInit:
    """The user's worker_init_fn, and then the random state that the worker had."""

    init: Callable[[int], Any] | None
    states: Mapping[int, Mapping[str, Any]]

    def __call__(self, worker: int) -> None:
        leave_signals_to_parent()
        if self.init is not None:
            self.init(worker)
        if worker in self.states:
            if "numpy" in self.states[worker] and "numpy" not in sys.modules:
                import numpy  # noqa: F401
            restore_random(self.states[worker])


def read_tag(tag: Tag) -> tuple[int, dict[str, Any]]:
    """The worker, and its state as `restore_random` takes it."""
    worker, state = tag
    return worker, state | {"torch": torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8)}


def leave_signals_to_parent() -> None:
    """A signal to the whole group ends the workers with their parent, after its last step, not before."""

    def obey_the_second(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)

    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, obey_the_second)


@dataclass
class Skip:
    """What the next pass of a SkippingSampler leaves out, and what is done around it."""

    num_skipped: int
    num_empty: int
    """Empty batches in place of the last skipped ones."""
    before: Callable[[], None]
    """Called right before the sampler's first index is drawn."""
    after: Callable[[], None]
    """Called right before the first index that is not skipped is drawn."""


class SkippingSampler:
    """A sampler of batches, one pass of which may begin in its middle."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.skip: Skip | None = None

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, None  # here, not before: a DataLoader with workers opens a pass twice
        if skip is None:
            yield from self._batches
            return
        skip.before()
        drawn = iter(self._batches)
        for _ in itertools.islice(drawn, skip.num_skipped):
            pass
        yield from ([] for _ in range(skip.num_empty))
        skip.after()
        yield from drawn

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """The same loader with other attributes; the user's own stays as it is. It shares dataset and sampler."""
    made = object.__new__(type(loader))
    made.__dict__.update(loader.__dict__)
    made.__dict__.update(changes)
    made.__dict__["_iterator"] = None
    return made
