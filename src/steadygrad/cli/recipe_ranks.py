"""`steadygrad train` under torchrun: the processes join, rank 0 chooses the folder, prints and writes the report."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

from steadygrad.cli.console import Console

T = TypeVar("T")


def is_launched() -> bool:
    """Whether torchrun has started this process beside others. Does not import torch."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


def is_first() -> bool:
    """Whether this process prints and writes what belongs to the whole run."""
    return not is_launched() or os.environ["RANK"] == "0"


def choose_together(choose: Callable[[], T]) -> T:
    """Return rank 0's choice on every rank; its error is every rank's. A single process chooses for itself."""
    if not is_launched():
        return choose()
    from steadygrad.trainer.ranks import join_ranks, share_from_first

    # Before the broadcast below, which needs the process group
    join_ranks()
    return share_from_first(choose)


@contextlib.contextmanager
def on_first_rank(context: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Enter the context on rank 0 before any rank goes on; the others have none."""
    if not is_launched():
        with context:
            yield
        return
    from steadygrad.trainer.ranks import share_from_first

    with contextlib.ExitStack() as stack:
        # Every rank calls it: a broadcast that one leaves out hangs the others. It returns once rank 0 has entered
        share_from_first(lambda: stack.enter_context(context))
        yield


def quiet_others(console: Console) -> Console:
    """Return the console on rank 0, and one that shows nothing on the others, which log errors only."""
    if is_first():
        return console
    # All ranks come to the same findings: eight GPUs would print each eight times. What a rank alone has seen is in
    # its rank_N.jsonl, and in the incident that rank 0 prints.
    logging.getLogger("steadygrad").setLevel(logging.ERROR)
    return Console(Path(os.devnull).open("w", encoding="utf-8"))


def end_rank(code: int) -> NoReturn:
    """End this process of a torchrun job.

    The interpreter does not end: a thread of gloo that lets go of a tensor meanwhile asks for the GIL, is unwound and
    aborts the process (pytorch issues 38228, 190489), and torchrun would call the job failed.
    """
    from steadygrad.trainer.ranks import leave_ranks

    leave_ranks()
    # os._exit flushes nothing
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
