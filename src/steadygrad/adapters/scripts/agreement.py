"""Agreement: what each rank has found -> one decision for all of them: take the step, or skip it.

Ranks without DistributedDataParallel have different gradients until the script averages them, often inside
`optimizer.step()`: a rank that skips alone leaves the others waiting in that collective. So every rank says what it
found and waits for the others' word. This goes through the store by which the ranks met, never through a collective: a
rank that does not train, or is not guarded, must not stop the others. When one does not answer in time, this is
reported once, and from then on nothing is skipped on any rank. With DistributedDataParallel all gradients are the
same: only the first step is agreed on, to learn whether every rank is guarded.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from steadygrad.state.live_objects import list_live

PATIENCE = datetime.timedelta(seconds=60)
"""How long a rank waits for the others; once, since nothing is agreed on afterwards."""
KEPT = 4
"""Decisions that stay in the store for slower ranks to read."""


class Word(enum.StrEnum):
    """What was decided about a step."""

    TAKE = "take"
    SKIP = "skip"
    APART = "apart"
    """A rank did not answer: each takes its step, whatever it found."""


class Agreement:
    """One optimizer's decisions, in the order of its steps."""

    def __init__(self, name: str, *, same_everywhere: bool, report: Callable[[str], None]) -> None:
        """`name` is the same on every rank; `same_everywhere`: the ranks' gradients are equal when they step."""
        distributed = torch.distributed
        # Private: the store by which the ranks met. It works with every backend, and without a collective.
        store: Any = distributed.distributed_c10d._get_default_store()
        self._store = distributed.distributed_c10d.PrefixStore(f"steadygrad/{name}", store)
        self._num_ranks = distributed.get_world_size()
        self._same_everywhere, self._report = same_everywhere, report
        self._number = 0
        self.is_apart = False
        """Whether a rank has not answered: nothing is skipped any more."""

    def decide(self, is_bad: bool) -> bool:
        """Return whether all ranks skip this step. Every rank that trains must call it, in the same order."""
        if self.is_apart:
            return False
        if self._same_everywhere and self._number > 0:
            return is_bad
        word = self._agree(str(self._number), is_bad)
        self._number += 1
        if word is Word.APART:
            self.is_apart = True
            self._report(
                f"not all of the {self._num_ranks} ranks are guarded, or they do not step together: bad steps are "
                "reported and NOT skipped, because a rank that skips alone would drift away from the others"
            )
        return word is Word.SKIP

    def _agree(self, key: str, is_bad: bool) -> Word:
        """Say what this rank found; the last rank to speak decides, or the first whose patience is at its end."""
        store = self._store
        # Before the count: the rank that completes it reads `bad` at once, and must find every vote there.
        if is_bad:
            store.add(f"{key}/bad", 1)
        if store.add(f"{key}/ranks", 1) == self._num_ranks:
            # add(..., 0) reads a count that may be absent; get() would wait for it.
            self._say(key, Word.SKIP if store.add(f"{key}/bad", 0) else Word.TAKE)
            # Not the last ones: a slower rank may not have read its decision yet.
            self._forget(self._number - KEPT)
        else:
            try:
                # Waits for the slowest rank; for all of PATIENCE only once, since `is_apart` then ends all agreement.
                store.wait([f"{key}/word"], PATIENCE)
            except Exception:  # DistStoreError in recent versions of torch, RuntimeError in earlier ones
                self._say(key, Word.APART)
        # Read back, also by the rank that spoke: where two of them decided at once, the first one's word counts.
        return Word(store.get(f"{key}/word").decode())

    def _say(self, key: str, word: Word) -> None:
        self._store.compare_set(f"{key}/word", "", word.value)  # whoever comes second changes nothing

    def _forget(self, number: int) -> None:
        if number >= 0:
            for part in ("bad", "ranks", "word"):
                self._store.delete_key(f"{number}/{part}")


def is_averaged(parameters: set[int]) -> bool:
    """Whether DistributedDataParallel averages the gradients of all of these parameters; `parameters` are ids."""
    wrappers = list_live(DistributedDataParallel)
    covered = {id(p) for wrapper in wrappers for p in wrapper.parameters()}
    return bool(wrappers) and parameters <= covered


def count_ranks() -> int:
    """Return how many ranks train together."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def list_trained(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that get gradients."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
