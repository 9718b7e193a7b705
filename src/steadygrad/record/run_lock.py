"""A folder -> a lock file that names the process writing to it.

One process writes to a run directory. The file holds process, host and start time: a lock whose process is gone, killed
or from before a reboot, is taken over. A process on another host cannot be checked, so its lock is taken over with a
warning: a job that a cluster requeued elsewhere must start. A forked child never releases its parent's lock.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from steadygrad.errors import ConfigError

logger = logging.getLogger("steadygrad")
NAME = "run.lock"


class Holder(enum.StrEnum):
    """The process that a lock names."""

    NONE = "none"
    """There is no lock."""
    ALIVE = "alive"
    GONE = "gone"
    """It ended without releasing the lock: it was killed, or the machine went down."""
    ELSEWHERE = "elsewhere"
    """It is on another host and cannot be checked."""


def find_holder(folder: Path) -> Holder:
    """Return what became of the process that locked the folder; for readers, who never take the lock."""
    found = _read(folder / NAME)
    if found is None:
        return Holder.NONE
    if found.get("host") != socket.gethostname():
        return Holder.ELSEWHERE
    return Holder.ALIVE if _is_alive(found) else Holder.GONE


class RunLock:
    """The lock of one folder, held by this process until `release()`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._process = os.getpid()

    def take(self) -> None:
        """Write the lock; raise ConfigError if a live process holds it, OSError if the folder is not writable."""
        # Complete before it gets its name: a reader that finds an empty lock takes it for none.
        aside = self._write_aside()
        try:
            os.link(aside, self.path)  # atomic: of two processes that start at once, only one gets the name
        except FileExistsError:
            self._take_over(aside)
        except OSError:  # a file system without links
            if self.path.exists():
                self._take_over(aside)
            else:
                aside.replace(self.path)
        finally:
            aside.unlink(missing_ok=True)

    def _take_over(self, aside: Path) -> None:
        found = _read(self.path)
        if found is not None and _is_held(found):
            raise ConfigError(
                f"run_dir {self.path.parent} is being written by process {found['process']} on {found['host']}. Wait "
                "for it or end it, or give another run_dir; CheckpointStore reads its checkpoints meanwhile. If that "
                f"process is not training, delete {self.path}."
            )
        if found is not None and found.get("host") != socket.gethostname():
            logger.warning(
                "%s was locked by process %s on %s and is taken over: it appears to have ended.",
                self.path.parent,
                found.get("process"),
                found.get("host"),
            )
        # Two processes that take over the same dead lock at once may both succeed: nothing atomic compares and swaps.
        aside.replace(self.path)

    def write(self) -> None:
        """Write the lock again, after the folder was lost."""
        self._write_aside().replace(self.path)

    def _write_aside(self) -> Path:
        mine = {"process": self._process, "host": socket.gethostname(), "began": _find_start(self._process)}
        aside = self.path.with_name(f"{NAME}.{self._process}")
        aside.write_text(json.dumps(mine) + "\n", encoding="utf-8")
        return aside

    def release(self) -> None:
        """Remove the lock, if it is still this process's."""
        if os.getpid() != self._process:  # a forked child that inherited it
            return
        # Another process may have taken it over, or the file may be of a new run in a recreated folder.
        found = _read(self.path)
        if found is not None and found.get("process") == self._process and found.get("host") == socket.gethostname():
            with contextlib.suppress(OSError):
                self.path.unlink()


def _read(path: Path) -> dict[str, Any] | None:
    """Return the contents of the lock; None if there is none, or it was truncated by a crash."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and type(found.get("process")) is int else None


def _is_held(lock: dict[str, Any]) -> bool:
    """Return whether another live process of this host holds it.

    Our own process id means an earlier process with the same id: in a container every training may be process 1.
    """
    is_free = lock.get("host") != socket.gethostname() or lock["process"] == os.getpid()
    return not is_free and _is_alive(lock)


def _is_alive(lock: dict[str, Any]) -> bool:
    """Return whether the process of a lock of this host still runs."""
    process = lock["process"]
    if sys.platform == "win32":  # signal 0 is Ctrl+C there
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's process: it is alive
        pass
    began = _find_start(process)
    return began is None or lock.get("began") in (None, began)  # process ids are reused


def _find_start(process: int) -> str | None:
    """Return when a process started, in system ticks since boot; None if the system does not say."""
    try:
        # From the last parenthesis on: a command's name may contain spaces and parentheses.
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if fields[0] in ("Z", "X"):  # a zombie: ended, but not reaped by its parent
        return "ended"
    # Field 22 of proc(5), starttime; the first of these is field 3. Ticks start again at each boot, hence its id.
    return f"{boot}:{fields[19]}"
