"""RankWaits: a thread that notices when this rank waits for the others -> a RankWait, before the group's timeout.

A rank that skips a collective leaves the others waiting until the timeout ends the job, with a message that names no
line. The thread looks at the main thread's stack periodically: if that has stood in one collective for half of the
shortest timeout of all groups, it says where, and where the other ranks are. A rank that still computes (a validation,
a long save) is not waiting. Costs one look at a stack every few seconds; the training thread only notes each step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from steadygrad.facts import RankWait
from steadygrad.measure.rank_board import RankBoard, open_board
from steadygrad.measure.suspicious_ops import OUR_FOLDERS

DEFAULT_TIMEOUT = 600.0
"""Seconds assumed for a group that does not report its own: the shortest default of torch's backends."""
LOOKS = 10
"""Looks at the stack within the time after which a wait is reported."""
COLLECTIVES = "distributed_c10d.py"
BACKWARD = "_engine_run_backward"
OWN_WAITS = {"ranks.py": "the exchange of losses", "transfer.py": "a wait for the device"}
"""Files of this package in which a step waits for others."""


class RankWaits:
    """Watches the thread that makes it. `report` is called from another thread, once for each wait."""

    def __init__(
        self,
        board: RankBoard,
        find_step: Callable[[], int],
        report: Callable[[RankWait], None],
        *,
        after_seconds: float | None = None,
    ) -> None:
        """`find_step` returns the number of the step under way; a wait is reported `after_seconds`.

        With None, that is half of the shortest timeout. Neither callable may keep a model alive (see `call_weakly`): if
        this thread were the last to drop one, it would end the model's process group too, and a gloo group that
        ends while its own threads still clear up a collective may deadlock with them.
        """
        self._stop = threading.Event()
        arguments = (self._stop, threading.get_ident(), board, find_step, report, after_seconds)
        # A daemon: a thread that waits for minutes must not hold up the end of the program.
        threading.Thread(target=_watch, args=arguments, name="steadygrad-ranks", daemon=True).start()
        # Bound to the event: a method of self would keep self alive, and with it the thread.
        weakref.finalize(self, self._stop.set)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()


def call_weakly(owner: Any, function: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """Return a function that calls `function(owner, ...)` while `owner` lives, and returns `otherwise` later."""
    here = weakref.ref(owner)

    def call(*args: Any) -> Any:
        held = here()
        return otherwise if held is None else function(held, *args)

    return call


def watch_ranks(group: Any, find_step: Callable[[], int], report: Callable[[RankWait], None]) -> RankWaits | None:
    """Watch for waits among the ranks of `group`, all by default; return None for a single process."""
    board = open_board(group)
    return None if board is None else RankWaits(board, find_step, report)


def _watch(
    stop: threading.Event,
    thread: int,
    board: RankBoard,
    find_step: Callable[[], int],
    report: Callable[[RankWait], None],
    after_seconds: float | None,
) -> None:
    """Look at `thread` until stopped. A failure here ends the watch, never the training."""
    since, last, reported = time.monotonic(), None, None
    while True:
        # Read each time: the program may create groups later, with shorter timeouts.
        limit = find_timeout() / 2 if after_seconds is None else after_seconds
        if stop.wait(limit / LOOKS):
            return
        if not board.is_open:
            return
        try:
            step = find_step()
            place = _find_place(thread)
            now = time.monotonic()
            if place is None or (step, place) != last:
                since, last = now, None if place is None else (step, place)
                continue
            seconds = now - since
            # A note from half of the time on, so that those of the other ranks are there when one reports.
            if seconds < limit / 2 or reported == last:
                continue
            board.write("waits", 0, json.dumps({"step": step, "place": place}))
            if seconds >= limit:
                reported = last
                report(_describe(board, step, place, seconds))
        except Exception:
            return


def _describe(board: RankBoard, step: int, place: str, seconds: float) -> RankWait:
    notes = {rank: json.loads(note) for rank, note in board.read_newest("waits").items() if rank != board.rank}
    return RankWait(
        step=step,
        rank=board.rank,
        num_ranks=board.num,
        seconds=seconds,
        place=place,
        others={rank: note["place"] for rank, note in notes.items() if abs(note["step"] - step) <= 1},
        timeout_seconds=find_timeout(),
    )


def _find_place(thread: int) -> str | None:
    """Return where the thread waits for other ranks, as 'in all_reduce at file:line'; None if it does not."""
    # The thread runs on while its stack is walked, so the place may be slightly out of date.
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    innermost = frame.f_code
    call = OWN_WAITS.get(os.path.basename(innermost.co_filename), "") if _is_ours(innermost.co_filename) else ""
    if innermost.co_name == BACKWARD:  # with a frame of Python inside it, it computes
        call = "backward"
    # lookup_lines=False: no source file is read.
    for summary in traceback.StackSummary.extract(traceback.walk_stack(frame), limit=64, lookup_lines=False):
        if not call and summary.filename.endswith(COLLECTIVES):
            call = summary.name
        elif not _is_ours(summary.filename):
            return f"in {call} at {summary.filename}:{summary.lineno}" if call else None
    return None


def _is_ours(path: str) -> bool:
    return path.startswith(OUR_FOLDERS)


def find_timeout() -> float:
    """Return the shortest timeout of all process groups, in seconds."""
    shortest = DEFAULT_TIMEOUT
    try:
        # Private: torch has no public list of all groups.
        for group in list(dist.distributed_c10d._world.pg_map):
            for device in {*_list_devices(group)}:
                options: Any = group._get_backend(device).options
                shortest = min(shortest, options._timeout.total_seconds())
    except Exception:  # another backend, or another version of torch
        return shortest
    return shortest


def _list_devices(group: Any) -> list[torch.device]:
    return list(getattr(group, "_device_types", ()))
