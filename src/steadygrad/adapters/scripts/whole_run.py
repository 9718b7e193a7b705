"""WholeRun: one start of `steadygrad run`, from before the script to after it: what was guarded, what was found?

torch is not imported here. Processes that the script starts are known by what they wrote to the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from steadygrad.adapters.scripts.arrival import stop_waiting, when_torch_arrives
from steadygrad.adapters.scripts.children import describe_unguarded, guard_children
from steadygrad.adapters.scripts.hard_exit import before_hard_exit
from steadygrad.adapters.scripts.options import Options
from steadygrad.adapters.scripts.own_path import own_path
from steadygrad.facts import Severity

if TYPE_CHECKING:
    from steadygrad.adapters.scripts.session import Session


class WholeRun:
    """What is known about the script's run as a whole."""

    def __init__(self, options: Options, *, fail_on: str | None = None) -> None:
        """`fail_on`: the severity of an incident from which on the run has failed; None: none."""
        self._options, self._fail_on, self._process = options, fail_on, os.getpid()
        self._session: Session | None = None
        self._before = _list_records(options.run_dir)
        self._has_ended = False

    def begin(self) -> None:
        """Guard this process once it imports torch, and the processes that it starts."""
        stop_waiting()  # a process that another `steadygrad run` has started begins its own
        guard_children(self._options)
        # Before the Session's, which is installed with torch and wraps this one: its records are closed first.
        before_hard_exit(self._end_hard)
        when_torch_arrives(self._begin_session)

    def _end_hard(self, code: int) -> int:
        """The script leaves by `os._exit`."""
        # A forked child leaves by os._exit as well, and is not the end of the run.
        is_end = code == 0 and os.getpid() == self._process and not self._has_ended
        return 1 if is_end and self.end() else code

    def _begin_session(self) -> None:
        with own_path():
            from steadygrad.adapters.scripts.session import Session

        self._session = Session(self._options)
        self._session.begin()

    def end(self) -> bool:
        """Report loudly that nothing was guarded, and why, and processes that were not; records print their own lines.

        Return whether the run has failed: an incident was as severe as `fail_on` or worse, here or in another process,
        or nothing was guarded.
        """
        self._has_ended = True
        why = self._find_reason()
        if why is not None:
            print(f"steadygrad: NOTHING WAS GUARDED: {why}", file=sys.stderr, flush=True)
        unguarded = describe_unguarded()
        if unguarded:
            print(f"steadygrad: {unguarded}", file=sys.stderr, flush=True)
        if self._fail_on is None:
            return False
        limit = Severity(self._fail_on).rank
        return why is not None or any(found.rank >= limit for found in self._list_severities())

    def _find_reason(self) -> str | None:
        """Return why nothing was guarded; None if an optimizer was."""
        if self._session is not None and self._session.num_guarded:
            return None
        if self._list_new_records():
            return None
        if self._session is None:
            seen = "torch" in sys.modules
            return "torch was imported without steadygrad noticing" if seen else "the script did not import torch"
        if self._session.has_own_guard:
            return None
        if self._session.num_made == 0:
            return "the script created no torch.optim.Optimizer"
        return (
            "no optimizer took a step that steadygrad could see. A step inside torch.compile, and an engine with its "
            "own optimizer, are not seen"
        )

    def _list_new_records(self) -> list[Path]:
        return [path for path, began in _list_records(self._options.run_dir).items() if self._before.get(path) != began]

    def _list_severities(self) -> Iterator[Severity]:
        if self._session is not None and self._session.terminal.worst is not None:
            yield self._session.terminal.worst
        for path in self._list_new_records():
            # A process that is still writing, or was killed, may leave half a line: the lines before it count.
            with contextlib.suppress(OSError, ValueError, KeyError):
                for line in (path.parent / "incidents.jsonl").read_text(encoding="utf-8").splitlines():
                    yield Severity(json.loads(line)["finding"]["severity"])


def _list_records(folder: Path | None) -> dict[Path, int]:
    """Return every record of the run directory, with the time at which it began."""
    if folder is None:
        return {}
    return {path: path.stat().st_mtime_ns for path in folder.rglob("run.json") if "earlier" not in path.parts}
