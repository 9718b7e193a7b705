"""RankBoard: short notes that each rank leaves in the process group's store for the others to read.

Unlike a collective it never waits for a rank: what another has not written yet is read later, or never. So it may be
used where ranks are not in step, and when one of them is stuck. Each rank overwrites its own few notes, so the store
does not grow. A store that fails switches the board off.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist

NUM_SLOTS = 4
"""Notes of one rank that are kept at a time."""
_numbers = itertools.count()


class RankBoard:
    """Notes of the ranks of one process group."""

    def __init__(self, group: Any = None) -> None:
        """Every rank must make its boards in the same order."""
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank: int = members.index(dist.get_rank())
        self.num: int = len(members)
        # The count keeps apart boards that follow one another, the members those of different groups.
        name = f"steadygrad/{next(_numbers)}/{'-'.join(map(str, members[:2]))}/"
        self._store: Any = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())

    @property
    def is_open(self) -> bool:
        """Whether the store has worked so far."""
        return self._store is not None

    def write(self, topic: str, number: int, note: str) -> None:
        """Leave a note; it replaces the one of `NUM_SLOTS` numbers before."""
        try:
            if self._store is not None:
                self._store.set(f"{topic}/{number % NUM_SLOTS}/{self.rank}", f"{number}\n{note}")
        except Exception:  # the store may end before this rank does: the board is off from here on
            self._store = None

    def read(self, topic: str, number: int) -> dict[int, str] | None:
        """Return each rank's note of that number; None while one is missing or has been replaced."""
        try:
            keys = [f"{topic}/{number % NUM_SLOTS}/{rank}" for rank in range(self.num)]
            # check() answers at once; get() of a key that is missing waits for the store's timeout.
            if self._store is None or not self._store.check(keys):
                return None
            notes = [self._store.get(key).decode().split("\n", 1) for key in keys]
        except Exception:  # likewise
            self._store = None
            return None
        if any(int(when) != number for when, _ in notes):
            return None
        return {rank: note for rank, (_, note) in enumerate(notes)}

    def read_newest(self, topic: str) -> dict[int, str]:
        """Return the notes of number 0 that are there, by rank."""
        found: dict[int, str] = {}
        try:
            for rank in range(self.num):
                key = f"{topic}/0/{rank}"
                if self._store is not None and self._store.check([key]):
                    found[rank] = self._store.get(key).decode().split("\n", 1)[1]
        except Exception:  # likewise
            self._store = None
        return found


def open_board(group: Any = None) -> RankBoard | None:
    """Return a board for the ranks of `group`, all by default; None for a single process."""
    try:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) < 2:
            return None
        return RankBoard(group)
    except Exception:  # a store or group of a kind that we do not know
        return None
