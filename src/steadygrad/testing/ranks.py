"""A function -> what it returned on each of n ranks: real processes that talk over gloo, on one machine.

For tests of trainings on several ranks. A rank that fails is reported with its own traceback, and the others are ended
at once; ranks that deadlock are ended after a time limit, and reported with the line at which each of them waits.
Nothing outlives the call. The function must be importable (no lambda), and its result picklable.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch._dynamo.convert_frame",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "steadygrad.guard",
]
"""What the server that ranks are forked from imports once for all."""
MARGIN_SECONDS = 2.0
"""Before the end of the time limit, in which the ranks write down where they stand."""
PATIENCE_SECONDS = 5.0
"""For the other ranks' words after one has failed."""
LATER_SECONDS = 60.0
"""After the time limit a collective gives up: a hang is reported with the line of each rank, not as its failure."""


class RanksFailed(AssertionError):
    """A rank failed, or the ranks hung. The message has the ranks' own words."""


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: BaseProcess
    pipe: Connection
    stack: Path


def run_ranks(
    function: Callable[..., Any], num_ranks: int = 2, *args: Any, time_limit_seconds: float = 300.0, **kwargs: Any
) -> list[Any]:
    """Call `function(*args, **kwargs)` on each rank, inside a process group; what it returned, by rank."""
    context = _choose_context()
    # Handed to the ranks too: the processes of a machine share this clock.
    deadline = time.monotonic() + time_limit_seconds  # no correction of the date moves this clock
    with tempfile.TemporaryDirectory(prefix="steadygrad-ranks-") as folder:
        call = (function, args, kwargs, num_ranks, folder, deadline)
        ranks = [_start(context, number, call) for number in range(num_ranks)]
        try:
            return _collect(ranks, deadline, time_limit_seconds)
        finally:
            _end(ranks)


def _choose_context() -> BaseContext:
    """Forks of a server that has imported torch: a rank starts in milliseconds, and inherits no thread."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Only has an effect before the server starts, at the first process.
    context.set_forkserver_preload(PRELOADED)
    return context


# --- in this process ----------------------------------------------------------------------------------------------


def _start(context: BaseContext, number: int, call: tuple[Any, ...]) -> _Rank:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    stack = Path(call[4]) / f"stack_{number}.txt"
    process = context.Process(target=_become_rank, args=(number, sending, stack, *call), daemon=True)  # type: ignore[attr-defined]
    process.start()
    # This process's copy of the writing end: while it is open, a rank that dies causes no EOF.
    sending.close()
    return _Rank(number, process, receiving, stack)


def _collect(ranks: list[_Rank], deadline: float, limit: float) -> list[Any]:
    """Return what each rank sent; RanksFailed as soon as one failed, or when the time is over."""
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(results) + len(failures) < len(ranks):
        waiting = [rank for rank in ranks if rank.number not in {**results, **failures}]
        ready = wait([rank.pipe for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in waiting:
            if rank.pipe in ready:
                returned, value = _receive(rank)
                (results if returned else failures)[rank.number] = value
        if failures:  # those who have lost their peer say so in a moment; the first cause may be among them
            deadline = min(deadline, time.monotonic() + PATIENCE_SECONDS)
    if failures:
        raise RanksFailed("\n".join(f"rank {number} {failures[number]}" for number in sorted(failures)))
    if len(results) < len(ranks):
        raise RanksFailed(_describe_hang(waiting, len(ranks), limit))
    return [results[number] for number in sorted(results)]


def _receive(rank: _Rank) -> tuple[bool, Any]:
    """Return (whether it returned, what it returned or how it failed)"""
    try:
        # Unpickled because our own child wrote it.
        returned, value = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        # The pipe closes before the exit code is known.
        rank.process.join(PATIENCE_SECONDS)
        return False, f"died with exit code {rank.process.exitcode}."
    return returned, value if returned else f"failed:\n{value}"


def _describe_hang(hanging: list[_Rank], num_ranks: int, limit: float) -> str:
    lines = [f"{len(hanging)} of {num_ranks} ranks had not ended after {limit:g} seconds:"]
    for rank in hanging:
        where = rank.stack.read_text() if rank.stack.exists() else ""
        lines.append(f"rank {rank.number} stands at\n{where or '(unknown)'}")
    return "\n".join(lines)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.pipe.close()


# --- in the ranks -------------------------------------------------------------------------------------------------


def _become_rank(
    number: int,
    pipe: Connection,
    stack: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_ranks: int,
    folder: str,
    deadline: float,
) -> None:
    limit = max(1.0, deadline - time.monotonic())
    with stack.open("w") as file:
        # A C thread writes it, without the GIL, so a rank that is stuck in C++ is dumped too. The file must stay open.
        faulthandler.dump_traceback_later(max(0.1, limit - MARGIN_SECONDS), file=file)
        try:
            with _process_group(number, num_ranks, folder, limit):
                # Pickled inside the try: a result that cannot be pickled is reported with its traceback.
                answer = pickle.dumps((True, function(*args, **kwargs)))
        # SystemExit too: a rank that exits without an answer would be reported as a crash.
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(answer)
    pipe.close()
    # os._exit flushes nothing.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a process group that failed would be waited for


@contextlib.contextmanager
def _process_group(number: int, num_ranks: int, folder: str, limit: float) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # ranks share the machine
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(number)}
    dist.init_process_group(
        "gloo",
        # A file in the folder of this call: no port to clash over, no store left from an earlier call.
        init_method=f"file://{folder}/meeting",
        rank=number,
        world_size=num_ranks,
        timeout=timedelta(seconds=limit + LATER_SECONDS),
    )
    try:
        yield
    finally:
        # After a failure the group may be broken; the function's own error is the one to report.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
