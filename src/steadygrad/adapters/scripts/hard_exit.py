"""`os._exit` -> the same, after what a process has to write down: Python runs no exit handlers then.

Scripts end so to leave threads and sockets behind. Only the process that asked is ended with a call; one that it forks
leaves as it would. A process that is killed runs nothing, and loses the steps of the last second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

logger = logging.getLogger("steadygrad")


def before_hard_exit(end: Callable[[int], int]) -> None:
    """Have `end(code)` called before `os._exit(code)` ends this process; it returns the code to leave with."""
    leave = os._exit

    def end_and_leave(status: int) -> None:
        try:
            status = end(status)
        except Exception as error:  # the script wants to leave, whatever becomes of our record
            logger.error("steadygrad: the record could not be closed: %r", error)
        leave(status)

    os._exit = end_and_leave  # type: ignore[assignment]
