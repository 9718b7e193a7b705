"""RankLogs: rank_0.jsonl, rank_1.jsonl, ... of a run -> when each rank was last seen, and what it alone reported.

Rank 0 records what is equal on all ranks, and every other rank repeats it in its own file. So an incident of a rank
waits until rank 0 is past its step, and is dropped if rank 0 reported the same. What a rank reports about its own
batches is always kept. The number of files is bounded; a corrupt line is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from steadygrad.detect.rank_rules import ABOUT_BATCHES
from steadygrad.view.read.incident_log import find_step, look
from steadygrad.view.read.tail import Row, Tail, as_number

MAX_RANKS = 256
"""Most files to read; for a larger job, the first ones."""
MAX_KEYS = 100_000
"""Most incidents of rank 0 to remember for recognising duplicates."""
NAME = re.compile(r"rank_(\d+)\.jsonl")

Key = tuple[int, str, str]


@dataclass
class RankLog:
    """One rank, as far as its file has been read."""

    rank: int
    tail: Tail
    node: str = ""
    process: int | None = None
    num_starts: int = 0
    last_step: int | None = None
    last_loss: float | None = None
    last_time: str = ""
    """When its newest line was written, by its own clock."""
    num_own: int = 0
    """Number of incidents that only this rank reported."""
    waiting: list[tuple[int, Row]] = field(default_factory=list)
    """(round in which it was read, incident), for those that rank 0 may still report."""

    def feed(self, row: Row, now: int) -> None:
        """Take one line."""
        self.last_time = str(row.get("time") or self.last_time)
        incident = row.get("incident")
        if isinstance(incident, dict):
            self.waiting.append((now, {**incident, "rank": self.rank}))
        elif type(row.get("step")) is int:
            self.last_step, self.last_loss = row["step"], as_number(row.get("loss"))
        elif "node" in row:
            self.num_starts += 1
            self.node, process = str(row["node"]), row.get("process")
            self.process = process if type(process) is int else None


class RankLogs:
    """The ranks of one run; empty for a single process."""

    def __init__(self, run: Path, *, within: Path | None = None) -> None:
        self._run, self._within = run, within
        self._logs: dict[int, RankLog] = {}
        self._shared: dict[Key, None] = {}
        self._round = 0
        self.num_left_out = 0
        """Number of files that are not read."""

    def find(self) -> None:
        """Look for new files."""
        self._round += 1
        if self._run.is_file() or not self._run.is_dir():
            return
        # Sorted as numbers: by name, rank_10 would come before rank_2
        found = sorted(int(match[1]) for one in self._run.iterdir() if (match := NAME.fullmatch(one.name)))
        self.num_left_out = max(0, len(found) - MAX_RANKS)
        for rank in found[:MAX_RANKS]:
            if rank not in self._logs:
                self._logs[rank] = RankLog(rank, Tail(self._run / f"rank_{rank}.jsonl", within=self._within))

    def note(self, incident: Row) -> Row:
        """Remember an incident that rank 0 reported; return it, with the rank added if it is about a batch."""
        if not self._logs:  # a single process: nothing to recognise
            return incident
        self._shared[_find_key(incident)] = None
        if len(self._shared) > MAX_KEYS:
            del self._shared[next(iter(self._shared))]  # the oldest: dicts keep their order
        return {**incident, "rank": 0} if _is_about_batch(incident) else incident

    def read(self, *, finish: bool = False) -> bool:
        """Read what is new in each file; return whether anything was."""
        fed = False
        for log in self._logs.values():
            before = log.tail.offset
            for row in [*log.tail.read(), *(log.tail.finish() if finish else ())]:
                log.feed(row, self._round)
            fed = fed or log.tail.offset > before
        return fed

    @property
    def is_replaced(self) -> bool:
        """Whether a file was replaced since it was read."""
        return any(log.tail.num_restarts for log in self._logs.values())

    def release(self, last_step: int, *, finish: bool = False) -> list[Row]:
        """Return incidents that only one rank reported: rank 0 is past their step, or wrote nothing for a round."""
        own: list[Row] = []
        for log in self._logs.values():
            # A rank may write an incident before rank 0 does, so it waits: one round at most, because rank 0 may be
            # dead
            is_due = [finish or find_step(one) < last_step or then < self._round for then, one in log.waiting]
            due = [one for (_, one), now in zip(log.waiting, is_due) if now]
            log.waiting = [pair for pair, now in zip(log.waiting, is_due) if not now]
            kept = [one for one in due if _is_about_batch(one) or _find_key(one) not in self._shared]
            log.num_own += len(kept)
            own += kept
        return own

    def __iter__(self) -> Iterator[RankLog]:
        return iter([self._logs[rank] for rank in sorted(self._logs)])

    def __len__(self) -> int:
        return len(self._logs)


def find_rank(incident: Row) -> int | None:
    """Return the rank that reported it; None if it applies to all ranks."""
    rank = incident.get("rank")
    return rank if type(rank) is int else None


def _find_key(incident: Row) -> Key:
    kind, message = look(incident, "finding", "kind"), look(incident, "finding", "message")
    return find_step(incident), str(kind), str(message)


def _is_about_batch(incident: Row) -> bool:
    return look(incident, "finding", "kind") in ABOUT_BATCHES
