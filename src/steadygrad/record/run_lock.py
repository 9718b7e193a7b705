"""A folder -> a lock file that names the process writing to it.

One process writes to a run directory. The file holds process, host and start time: a lock whose process is gone, killed
or of a machine that was rebooted, is taken over. Another host's process cannot be asked, so its lock is taken over with
a warning: a job that a cluster requeued elsewhere must start. A forked child never releases its parent's lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

from steadygrad.errors import ConfigError

logger = logging.getLogger("steadygrad")
NAME = "run.lock"


class RunLock:
    """The lock of one folder, held by this process until `release()`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._process = os.getpid()

    def take(self) -> None:
        """Write the lock; ConfigError when a living process has it, OSError when the folder cannot be written to."""
        aside = self._write_aside()
        try:
            os.link(aside, self.path)  # of two processes that start at once, one gets the name
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
                f"process is not a training, delete {self.path}."
            )
        if found is not None and found.get("host") != socket.gethostname():
            logger.warning(
                "%s was locked by process %s on %s and is taken over: it must not be running any more.",
                self.path.parent,
                found.get("process"),
                found.get("host"),
            )
        aside.replace(self.path)

    def write(self) -> None:
        """Write the lock again, where the folder was lost."""
        self._write_aside().replace(self.path)

    def _write_aside(self) -> Path:
        mine = {"process": self._process, "host": socket.gethostname(), "began": _find_start(self._process)}
        aside = self.path.with_name(f"{NAME}.{self._process}")
        aside.write_text(json.dumps(mine) + "\n", encoding="utf-8")
        return aside

    def release(self) -> None:
        """Remove the lock, if it is still this process's."""
        if os.getpid() != self._process:
            return
        found = _read(self.path)
        if found is not None and found.get("process") == self._process and found.get("host") == socket.gethostname():
            with contextlib.suppress(OSError):
                self.path.unlink()


def _read(path: Path) -> dict[str, Any] | None:
    """What the lock says; None when there is none, or it was cut short by a crash."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and type(found.get("process")) is int else None


def _is_held(lock: dict[str, Any]) -> bool:
    """Whether another living process of this host wrote it.

    Our own number means an earlier process that had it: in a container every training may be process 1.
    """
    process = lock["process"]
    if lock.get("host") != socket.gethostname() or process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's: it lives
        pass
    began = _find_start(process)
    return began is None or lock.get("began") in (None, began)  # numbers are given to new processes again


def _find_start(process: int) -> str | None:
    """When a process started, in the system's own ticks since boot; None where the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    if fields[0] in ("Z", "X"):  # ended, and not waited for by its parent
        return "ended"
    return f"{boot}:{fields[19]}"
