"""Places: which folder the record of an optimizer goes to, in the process, rank and trial that it belongs to.

`DIR` for the first optimizer of the script, `DIR/optimizer-1` for one that trains beside it, `DIR/trial-2` for the
first one of a later training in the same process (a sweep), `DIR/rank-1` for the second rank, `DIR/process-1` for a
process that the script has started. Decided at the first step: only then are ranks and trials known.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

MOST_PROCESSES = 10_000
MOST_TRIALS = 100
"""Trainings of one process that get a folder: meta-learning begins tens of thousands."""


class Places:
    """Hands out folders, in order of first steps."""

    def __init__(self, run_dir: Path | None, *, is_child: bool) -> None:
        self._run_dir, self._is_child = run_dir, is_child
        self._base: Path | None = None
        self._num_here = 0
        self._trial = 1
        self._num_chosen = 0

    def become_child(self) -> None:
        """Start again in a forked process."""
        self.__init__(self._run_dir, is_child=True)  # type: ignore[misc]

    @property
    def is_full(self) -> bool:
        """Whether the present training gets no folder, because so many before or beside it did."""
        return self._num_chosen > MOST_TRIALS

    def choose(self, *, trains_beside_others: bool) -> Path | None:
        """Return the folder of an optimizer at its first step; None when nothing is recorded."""
        if self._run_dir is None:
            return None
        if self._base is None:
            self._base = self._find_base(self._run_dir)
        # All optimizers before this one were freed: another trial of a sweep begins.
        if not trains_beside_others and self._num_here:
            self._trial, self._num_here = self._trial + 1, 0
        self._num_chosen += 1
        if self.is_full:
            return None
        folder = self._base if self._trial == 1 else self._base / f"trial-{self._trial}"
        folder = folder / f"optimizer-{self._num_here}" if self._num_here else folder
        self._num_here += 1
        return folder

    def _find_base(self, run_dir: Path) -> Path:
        rank = find_rank()
        if rank is not None:
            return run_dir / f"rank-{rank}" if rank else run_dir
        return _claim(run_dir) if self._is_child else run_dir


def spell_folder(folder: Path, started_in: Path) -> str:
    """Return the folder as the user can type it: relative to where the run was started, where it lies inside."""
    return str(folder.relative_to(started_in) if folder.is_relative_to(started_in) else folder)


def find_rank() -> int | None:
    """Return the number of this rank; None when it trains alone. Launchers' variables count before a group is made."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() if distributed.get_world_size() > 1 else None
    if not os.environ.get("WORLD_SIZE", "1").isdigit() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", ""))
    return int(rank) if rank.isdigit() else None


def _claim(run_dir: Path) -> Path:
    """Return a new folder `process-1`, `process-2`, …: creating it is what claims it."""
    for number in range(1, MOST_PROCESSES):
        folder = run_dir / f"process-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    return run_dir / f"process-{os.getpid()}"
