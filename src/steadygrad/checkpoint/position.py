"""DataPositions: the position of each loader in its pass -> the same position again, in another process.

A loader with its own state saves and loads that. A plain DataLoader is restarted from the random state that its pass
began with, and its sampler is advanced without loading data: shuffling, generators and worker processes are as they
were. Anything else is iterated from its start, with a note to the user that its order cannot be guaranteed. Loaders are
identified by the order in which an epoch first uses them. Knows nothing about steps or weights.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from steadygrad.checkpoint.workers import ResumingInit, Skip, SkippingSampler, TaggingCollate, copy_loader, read_tag
from steadygrad.errors import MismatchError
from steadygrad.state.random_state import capture_random, restore_random

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Pass:
    """One pass over one loader."""

    source: _Source
    num_drawn: int = 0
    """Batches drawn from the loader."""
    exhausted: bool = False
    start: dict[str, Any] | None = None
    """State of the random generators when it began."""
    start_generators: list[torch.Tensor] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        source = self.source
        return {
            "num_drawn": self.num_drawn,
            "exhausted": self.exhausted,
            "length": source.length,
            "start": self.start,
            "start_generators": list(self.start_generators),
            "generators": [one.get_state() for one in source.generators],
            "workers": {worker: read_tag((worker, state))[1] for worker, state in source.workers.items()},
            "num_workers": source.num_workers,
            "is_first": source.num_passes == 1,
            "loader": source.loader.state_dict() if source.is_stateful else None,
        }


class _Source:
    """One loader, and what is remembered about it from pass to pass."""

    def __init__(self, loader: Any) -> None:
        self.original = self.loader = loader
        self.is_stateful = callable(getattr(loader, "state_dict", None)) and callable(
            getattr(loader, "load_state_dict", None)
        )
        self.num_passes = 0
        self.workers: dict[int, dict[str, Any]] = {}
        self.num_workers = loader.num_workers if isinstance(loader, DataLoader) else 0
        self.revives_workers = False
        """Whether its next pass continues for workers that lived in another process."""
        self.init: ResumingInit | None = None
        self.sampler: SkippingSampler | None = None
        if _can_skip(loader):
            self.sampler = SkippingSampler(loader.batch_sampler)
            self.loader = copy_loader(loader, batch_sampler=self.sampler)
        if self._has_known_workers(loader):
            self.init = ResumingInit(loader.worker_init_fn, {})
            changes = {"collate_fn": TaggingCollate(loader.collate_fn), "worker_init_fn": self.init}
            self.loader = copy_loader(self.loader, **changes)

    def _has_known_workers(self, loader: Any) -> bool:
        return self.num_workers > 0 and (_can_skip(loader) or _is_stateful_data_loader(loader))

    @property
    def length(self) -> int | None:
        try:
            return len(self.original)
        except TypeError:  # no length, or an IterableDataset without one
            return None

    @property
    def generators(self) -> list[torch.Generator]:
        """Return every generator that the loader owns, each once."""
        return find_generators(self.original)

    @property
    def keeps_workers(self) -> bool:
        """Whether its workers, and with them their random state, live from pass to pass."""
        return self.num_workers > 0 and bool(self.original.persistent_workers)

    @property
    def remembers_passes(self) -> bool:
        """Whether its own state holds more than the position in a pass.

        torchdata's loader reopens a finished pass before it begins a new one, and draws random numbers for it.
        """
        if _is_stateful_data_loader(self.original):
            return hasattr(self.original.dataset, "state_dict")
        return self.is_stateful

    def draw(self, iterator: Iterator[Any], now: _Pass) -> Iterator[Any]:
        """Yield the batches as the user's functions made them, and count them."""
        for item in iterator:
            if self.init is not None:
                batch, tag = item
                self.workers[tag[0]] = tag[1]  # only empty batches have no tag, and `_draw_empty` has taken those
            else:
                batch = item
            # Before the yield: a state saved while the batch is in use must not give the batch again
            now.num_drawn += 1
            yield batch
        now.exhausted = True


def find_generators(loader: Any) -> list[torch.Generator]:
    """Return every generator that a loader owns, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in (loader, *samplers)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class DataPositions:
    """The loaders of one training, in the order in which an epoch first uses them."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        self._order: list[_Source] = []
        self._passes: dict[int, _Pass] = {}
        self._resumed: dict[int, Mapping[str, Any]] = {}
        self._rested: dict[int, Mapping[str, Any]] = {}
        self._random: Mapping[str, Any] | None = None

    def iterate(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of one pass, or the rest of the pass that was interrupted when the state was saved."""
        # The source holds the loader, so the id cannot pass to another one
        source = self._sources.setdefault(id(loader), _Source(loader))
        if source not in self._order:
            self._order.append(source)
        place = self._order.index(source)
        now = self._passes[place] = _Pass(source)
        source.num_passes += 1
        resumed, rested = self._resumed.pop(place, None), self._rested.pop(place, None)
        if resumed is not None:
            yield from self._go_on(source, now, resumed)
            return
        if rested is not None:
            self._take_up(source, rested)
        # Before `iter`, where a DataLoader draws the base seed of its workers
        now.start = capture_random(())
        now.start_generators = [one.get_state() for one in source.generators]
        self._prepare_workers(source, now)  # before `iter` too: it starts the workers
        yield from source.draw(iter(source.loader), now)

    def end_epoch(self) -> None:
        """End the epoch: every loader's next pass starts from the beginning; forget loaders not used in this epoch."""
        self._sources = {id(source.original): source for source in self._order}
        # A pass that was resumed and never entered: the next one must find the loader as that one left it
        self._order, self._passes, self._resumed, self._rested = [], {}, {}, self._resumed

    # --- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return each loader's position. A position that was loaded but not used yet is passed on."""
        used = {place: now.state_dict() for place, now in self._passes.items()}
        passes = {**self._resumed, **used}
        resting = {
            place: _Pass(source).state_dict()
            for place, source in enumerate(self._sources.values())
            if source not in self._order
        }
        rested = {place: state for place, state in {**resting, **self._rested}.items() if place not in passes}
        return {"passes": passes, "rested": rested}

    def load_state_dict(self, state: Mapping[str, Any], random: Mapping[str, Any]) -> None:
        """Continue from a saved position; `random` holds the generators as they were when it was saved."""
        self.end_epoch()
        self._resumed, self._random = dict(state["passes"]), random
        self._rested = dict(state.get("rested", {}))  # missing in files of earlier versions

    def follow(self, before: DataPositions) -> None:
        """Begin the next epoch as `before`, which has ended its own, would have: another guard continues the run."""
        self.end_epoch()
        self._rested = dict(before.state_dict()["rested"])

    # --- between two passes ------------------------------------------------------------------------------------------

    def _take_up(self, source: _Source, saved: Mapping[str, Any]) -> None:
        """Before a pass from its start, restore what the loader remembered from passes in another process."""
        if source.remembers_passes and saved["loader"] is not None:
            source.loader.load_state_dict(saved["loader"])
        for generator, state in zip(source.generators, saved["generators"]):
            generator.set_state(state)
        if source.keeps_workers and saved["num_workers"] == source.num_workers:
            source.workers = {worker: _as_tag(state) for worker, state in saved["workers"].items()}
            source.revives_workers = True

    def _prepare_workers(self, source: _Source, now: _Pass) -> None:
        """Give new workers the random state of those they replace; persistent workers keep theirs."""
        revives, source.revives_workers = source.revives_workers, False
        if not source.keeps_workers:
            source.workers = {}
        if source.init is not None:
            states = source.workers.items() if revives else ()
            source.init.states = {worker: read_tag((worker, state))[1] for worker, state in states}
        if revives and source.sampler is not None:  # persistent workers would not have drawn a seed
            start = {"start": now.start, "start_generators": now.start_generators}
            source.sampler.skip = Skip(0, 0, before=lambda: _set_to_start(source, start), after=_do_nothing)

    # --- going on ---------------------------------------------------------------------------------------------------

    def _go_on(self, source: _Source, now: _Pass, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the rest of a pass."""
        if saved["length"] != source.length:
            raise MismatchError(
                f"the loader has {source.length} batches, and had {saved['length']} when the checkpoint was saved in "
                f"the middle of a pass, after {saved['num_drawn']}. Resume with the same data and batch size."
            )
        now.num_drawn, now.start = saved["num_drawn"], saved["start"]
        now.start_generators = list(saved["start_generators"])
        source.workers = {worker: _as_tag(state) for worker, state in saved["workers"].items()}
        if saved["exhausted"]:
            now.exhausted = True
            if source.is_stateful and saved["loader"] is not None:
                source.loader.load_state_dict(saved["loader"])
            self._set_to_saved(source, saved)
            source.revives_workers = source.keeps_workers and saved["num_workers"] == source.num_workers
            return
        yield from source.draw(self._reopen(source, now, saved), now)

    def _reopen(self, source: _Source, now: _Pass, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Return an iterator whose next item follows the last one drawn."""
        if source.init is not None:
            self._give_workers_their_state(source, saved)  # before `iter`, which starts them
        if source.is_stateful and saved["loader"] is not None:
            source.loader.load_state_dict(saved["loader"])
            iterator: Iterator[Any] = iter(source.loader)
        else:
            _set_to_start(source, saved)
            iterator = self._skip(source, now.num_drawn, saved)
        if source.sampler is None or source.num_workers:  # otherwise its sampler does, between the skipped and the next
            self._set_to_saved(source, saved)
        return iterator

    def _skip(self, source: _Source, num_drawn: int, saved: Mapping[str, Any]) -> Iterator[Any]:
        if source.sampler is not None:
            return self._skip_indices(source, source.sampler, num_drawn, saved)
        if isinstance(source.original, Sequence):
            return itertools.islice(iter(source.original), num_drawn, None)
        _warn_of_order(source.original)
        iterator: Iterator[Any] = iter(source.loader)
        for _ in itertools.islice(iterator, num_drawn):
            pass
        return iterator

    def _skip_indices(
        self, source: _Source, sampler: SkippingSampler, num_drawn: int, saved: Mapping[str, Any]
    ) -> Iterator[Any]:
        _warn_of_sampler(source.original)
        skip = sampler.skip = Skip(num_drawn, 0, before=_do_nothing, after=_do_nothing)
        if source.num_workers == 0:  # indices are drawn one by one, between the user's own random numbers
            skip.after = lambda: self._set_to_saved(source, saved)
            return iter(source.loader)
        skip.num_empty = num_drawn % source.num_workers
        if source.keeps_workers and not saved["is_first"]:
            # A later pass of persistent workers draws no seed; new workers draw one before the sampler's first index.
            skip.before = lambda: _set_to_start(source, saved)
        return _draw_empty(iter(source.loader), skip.num_empty)

    def _give_workers_their_state(self, source: _Source, saved: Mapping[str, Any]) -> None:
        assert source.init is not None
        if saved["num_workers"] != source.num_workers:
            warnings.warn(
                f"the loader has {source.num_workers} workers, and had {saved['num_workers']} when the checkpoint was "
                "saved: the order of the data is the same, random numbers drawn in workers are not.",
                stacklevel=2,
            )
            source.workers = {}
            return
        source.init.states = {worker: read_tag((worker, state))[1] for worker, state in source.workers.items()}

    def _set_to_saved(self, source: _Source, saved: Mapping[str, Any]) -> None:
        """Set every generator to its saved state, so that it continues as it would have."""
        for generator, state in zip(source.generators, saved["generators"]):
            generator.set_state(state)
        if self._random is not None:
            restore_random(self._random)


def _do_nothing() -> None:
    """Do nothing; for a skip that needs no callback."""


def _set_to_start(source: _Source, saved: Mapping[str, Any]) -> None:
    """Set every generator to its state when the pass began."""
    restore_random(saved["start"])
    for generator, state in zip(source.generators, saved["start_generators"]):
        generator.set_state(state)


def _draw_empty(iterator: Iterator[Any], num_empty: int) -> Iterator[Any]:
    """Draw the empty batches now: each lets one more index be drawn, as the batch it replaces did."""
    for _ in range(num_empty):
        next(iterator)
    return iterator


def _as_tag(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "torch": bytes(state["torch"].tolist())}


def _is_stateful_data_loader(loader: Any) -> bool:
    # By name: torchdata is optional, and not imported here
    return type(loader).__module__.startswith("torchdata.stateful_dataloader") and isinstance(loader, DataLoader)


def _can_skip(loader: Any) -> bool:
    """Whether this is a DataLoader whose sampler determines its batches and their order."""
    plain = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)  # a subclass may differ
    # in_order=False (torch 2.6) yields batches as workers finish them
    return plain and loader.batch_sampler is not None and getattr(loader, "in_order", True)


def _warn_of_order(loader: Any) -> None:
    warnings.warn(
        f"a {type(loader).__name__} of this kind is brought to its position by reading it from the start; the order "
        "of its data is not guaranteed. Use torchdata's StatefulDataLoader, or give it state_dict() and "
        "load_state_dict().",
        stacklevel=2,
    )


def _warn_of_sampler(loader: DataLoader[Any]) -> None:
    known = ("torch.utils.data.", "torchdata.", "steadygrad.trainer.")
    samplers = (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    unknown = [type(one).__name__ for one in samplers if one is not None and not _module_of(one).startswith(known)]
    if unknown:
        warnings.warn(
            f"{unknown[0]} was read again up to its position. Its order is the same if it draws its random numbers "
            "when a pass begins; if it draws them along the way, the order is not guaranteed.",
            stacklevel=2,
        )


def _module_of(thing: object) -> str:
    return f"{type(thing).__module__}."
