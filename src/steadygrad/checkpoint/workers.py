"""What travels with a DataLoader's worker processes, so that a pass can resume in the middle.

Each batch returns with the random state of the worker that made it; a resumed worker gets that state before its next
batch. Index batches that were already used are left out of the sampler's stream; the few needed to keep each batch with
its worker are sent empty, and no data is loaded for them. What the user's functions return is not changed. Everything
here can be pickled, since workers may be spawned.
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
"""Worker id, and its random state after the batch. torch's state is sent as bytes: tensors would use open files."""


@dataclass
class TaggingCollate:
    """The user's collate function, whose batches carry a tag; None in place of an empty batch."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[Any, Tag | None]:
        info = get_worker_info()
        assert info is not None
        if isinstance(samples, list) and not samples:  # what `SkippingSampler` sends for a batch to leave out
            return None, None
        batch = self.collate(samples)
        # After collate, which may draw too; no devices: a forked worker must not touch CUDA
        state = capture_random(())
        return batch, (info.id, state | {"torch": bytes(state["torch"].tolist())})


@dataclass
class ResumingInit:
    """Runs the user's worker_init_fn, and then restores the worker's random state."""

    init: Callable[[int], Any] | None
    states: Mapping[int, Mapping[str, Any]]

    def __call__(self, worker: int) -> None:
        leave_signals_to_parent()
        if self.init is not None:
            # Before the restore: a worker_init_fn usually seeds, and would undo it
            self.init(worker)
        if worker in self.states:
            if "numpy" in self.states[worker] and "numpy" not in sys.modules:
                # A spawned worker may not have imported it yet, and `restore_random` takes it from sys.modules
                import numpy  # noqa: F401
            restore_random(self.states[worker])


def read_tag(tag: Tag) -> tuple[int, dict[str, Any]]:
    """Return the worker, and its state as `restore_random` takes it."""
    worker, state = tag
    return worker, state | {"torch": torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8)}


def leave_signals_to_parent() -> None:
    """Ignore signals sent to the whole group: workers end with their parent, after its last step, not before."""

    def obey_the_second(number: int, _: Any) -> None:
        # Not for good: torch and multiprocessing end a worker that hangs with SIGTERM
        signal.signal(number, signal.SIG_DFL)

    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, obey_the_second)


@dataclass
class Skip:
    """What the next pass of a SkippingSampler skips, and the callbacks around it."""

    num_skipped: int
    num_empty: int
    """Empty batches in place of the last skipped ones."""
    before: Callable[[], None]
    """Called right before the sampler's first index is drawn."""
    after: Callable[[], None]
    """Called right before the first index that is not skipped is drawn."""


class SkippingSampler:
    """A batch sampler, one pass of which may begin in the middle."""

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
        # Indices only, no data; the sampler draws the random numbers that it drew then
        for _ in itertools.islice(drawn, skip.num_skipped):
            pass
        yield from ([] for _ in range(skip.num_empty))
        skip.after()
        yield from drawn

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Copy a loader with other attributes. The user's own is unchanged; dataset and sampler are shared."""
    # Through `__dict__`, since DataLoader.__setattr__ refuses to change a sampler after construction
    made = object.__new__(type(loader))
    made.__dict__.update(loader.__dict__)
    made.__dict__.update(changes)
    made.__dict__["_iterator"] = None  # persistent workers of the user's own pass stay the user's
    return made
