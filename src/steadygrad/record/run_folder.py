"""RunFolder: a run directory -> which run it holds, and a place for this one.

Every run has an id, in `run.json`, in each line of the ledger and in the manifest of each checkpoint. A directory that
already holds a run is left alone until it is known what this training is: `go_on` continues that run, `begin_anew`
moves its record to `earlier/1` first. Checkpoints stay where they are, distinguished by their run. Several guards of
one process share a directory: the first one uses it directly, the others use `guard-2`, `guard-3` inside it. Nothing
is ever deleted here.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steadygrad.errors import ConfigError
from steadygrad.record.run_lock import RunLock

EARLIER = "earlier"
CHECKPOINTS = "checkpoints"
RECORD = (
    "run.json",
    "steps.jsonl",
    "layers.jsonl",
    "incidents.jsonl",
    "validations.jsonl",
    "metrics.jsonl",
    "train.log",
    "batches",
    "pictures",
    "report.html",
)
"""Files that are moved aside when another run begins; so are files like `rank_3.jsonl`."""
RANK_FILE = re.compile(r"rank_\d+\.jsonl")
PART = re.compile(r"(guard|optimizer)[-_](\d+)")
"""A folder inside a run directory that belongs to the same training: another guard, another optimizer."""

_claims: dict[Path, _Claim] = {}
"""Directory -> its claim in this process."""


class _Claim:
    """One directory, and the guards of this process that write to it, in order of creation."""

    def __init__(self, lock: RunLock | None) -> None:
        self.process = os.getpid()
        self.lock = lock
        self.run_id = secrets.token_hex(4)
        # Weak: a guard that was dropped without close() must not keep its number for ever.
        self.folders: list[weakref.ref[RunFolder]] = []

    def list_living(self) -> list[RunFolder]:
        known = [folder for one in self.folders if (folder := one()) is not None]
        return [folder for folder in known if not folder.is_released and not folder.is_displaced]


class RunFolder:
    """The place of one guard in a run directory."""

    def __init__(self, directory: str | Path, *, locks: bool = True) -> None:
        """`locks`: whether this process locks the directory; with several ranks, the first does so for all."""
        self.directory = Path(directory)
        self.path = self.directory
        """Where this guard writes; final after `settle()`."""
        self.has_trained = False
        """Whether its guard has made a step."""
        self.is_displaced = False
        """Whether a later guard has resumed this one's run."""
        self.owner: weakref.ref[Any] | None = None
        """The object that saves for this guard."""
        self.is_released = self._is_settled = False
        self._key = self.directory.absolute()
        # The lock names the process, so it cannot tell two guards of one process apart: that is what claims are for.
        claim = _claims.get(self._key)
        if claim is None or claim.process != os.getpid():  # inherited from the process that this one was forked from
            claim = _claims[self._key] = _Claim(_take_lock(self.directory) if locks else None)
        self._claim = claim
        claim.folders.append(weakref.ref(self))

    # --- which folder -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Find this guard's number among those of this process; one that was freed meanwhile no longer counts."""
        if len(self._claim.list_living()) > 1:
            gc.collect()  # a notebook cell that was run again dropped its guard, which may be in a reference cycle
        number = self._claim.list_living().index(self) + 1
        # A guard that was freed moves the others up by one, but a settled one has its files open and stays.
        taken = {folder.path for folder in self._claim.list_living() if folder is not self and folder._is_settled}
        paths = (self.directory if n == 1 else self.directory / f"guard-{n}" for n in itertools.count(number))
        self.path = next(path for path in paths if path not in taken)
        self._is_settled = True

    def displace(self) -> list[RunFolder]:
        """Take the place of guards that were created earlier and have trained: this one is about to resume their run.

        Guards that train together resume before the first of them makes a step. Return those that gave way.
        """
        living = self._claim.list_living()
        found = [folder for folder in living[: living.index(self)] if folder.has_trained] if self in living else []
        for folder in found:
            folder.is_displaced = True
        return found

    @property
    def is_alone(self) -> bool:
        """Whether no other guard of this process has ever used the directory."""
        return len(self._claim.folders) < 2

    @property
    def siblings(self) -> list[RunFolder]:
        """The other guards of this process in the same directory."""
        return [folder for folder in self._claim.list_living() if folder is not self]

    def release(self) -> None:
        """Stop using the directory; the last guard unlocks it."""
        if self.is_released or os.getpid() != self._claim.process:
            return
        self.is_released = True
        # Not list_living(): a displaced guard counts until it is released too.
        if not any(folder is not None and not folder.is_released for one in self._claim.folders for folder in [one()]):
            if self._claim.lock is not None:
                self._claim.lock.release()
            if _claims.get(self._key) is self._claim:
                del _claims[self._key]

    def restore_lock(self) -> None:
        """Write the lock again, after the directory was lost and recreated."""
        if self._claim.lock is not None:
            with contextlib.suppress(OSError):
                self._claim.lock.write()

    @property
    def run_id(self) -> str:
        """Id of the run, the same for all guards of the process in this directory."""
        return self._claim.run_id

    @run_id.setter
    def run_id(self, run_id: str) -> None:
        self._claim.run_id = run_id

    # --- which run --------------------------------------------------------------------------------------------------

    @property
    def is_used(self) -> bool:
        """Whether it holds a step or a checkpoint of a run."""
        steps = self.path / "steps.jsonl"
        return (steps.is_file() and steps.stat().st_size > 0) or any(
            path.is_dir() for path in (self.path / CHECKPOINTS).glob("step_*")
        )

    @property
    def found_id(self) -> str | None:
        """Id of the recorded run; empty for one from an earlier version, None without a record."""
        return read_run_id(self.path)

    def begin_anew(self) -> Path | None:
        """Make room for a new run; return where the previous record was moved, None if there was none."""
        # A sibling that has trained writes lines under the present id already: they are one training.
        if not any(folder.has_trained for folder in self.siblings):
            self.run_id = secrets.token_hex(4)
        return self._set_aside()

    def _set_aside(self) -> Path | None:
        found = _list_record(self.path)
        if not found:
            return None
        target = _name_free(self.path / EARLIER)
        _move(found, target)
        return target

    def go_on(self, run_id: str) -> None:
        """Continue run `run_id`; bring its record back if it was moved aside."""
        self.run_id = run_id or self.found_id or self.run_id
        if not run_id or self.found_id in (run_id, "", None):
            return
        # Found before the present record joins the folder `earlier`, and that moves before the old one comes back:
        # rename() would replace files of the same name.
        earlier = next((path for path in _list_earlier(self.path) if read_run_id(path) == run_id), None)
        self._set_aside()
        if earlier is not None:
            _move(_list_record(earlier), self.path)
            earlier.rmdir()


def read_run_id(folder: Path) -> str | None:
    """Return the id in a folder's run.json; empty if it is from an earlier version, None if there is none."""
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return ""
    return str(run.get("id", "")) if isinstance(run, dict) else ""


def find_parts(folder: Path) -> list[Path]:
    """Return the folders inside a run directory that other guards or optimizers of the same training write to."""
    try:
        found = [(match, path) for path in folder.iterdir() if (match := PART.fullmatch(path.name)) and path.is_dir()]
    except OSError:
        return []
    # By number: as text, guard-10 would come before guard-2.
    return [path for _, path in sorted(found, key=lambda one: (one[0][1], int(one[0][2])))]


def _take_lock(directory: Path) -> RunLock:
    lock = RunLock(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.take()
    except OSError as error:
        raise ConfigError(
            f"run_dir cannot be used as a folder to write to: {error.strerror or error} ({directory}). "
            "Use a new folder, or that of an earlier run to continue it."
        ) from error
    return lock


def _list_record(folder: Path) -> list[Path]:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
    return [folder / name for name in names if name in RECORD or RANK_FILE.fullmatch(name)]


def _list_earlier(folder: Path) -> Iterator[Path]:
    return (path for path in (folder / EARLIER).glob("*") if path.is_dir())


def _name_free(parent: Path) -> Path:
    return next(path for n in itertools.count(1) if not (path := parent / str(n)).exists())


def _move(paths: list[Path], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        path.rename(target / path.name)
