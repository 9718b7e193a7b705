"""RunStart: a run directory and the program's first action -> which run this is, decided once.

`Guard(run_dir=...)` is created before `resume()` is called, so nothing in a used directory is moved, cut or appended
to until the first step, save or resume. A resume, or a state loaded by hand, continues the run that is there. A first
step without either begins a new run: the record of the previous run is moved to `earlier/`, its checkpoints stay, and
a finding says how to continue it instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.checkpoint.run import RunCheckpoints
from steadygrad.diagnose.investigator import Investigator
from steadygrad.errors import ConfigError, UsageError
from steadygrad.facts import Finding, Severity
from steadygrad.guard.training import Training
from steadygrad.measure.ranks import Ranks
from steadygrad.record import RunDirectory, Sink
from steadygrad.record.rank_file import RankFile
from steadygrad.record.run_directory import make_record
from steadygrad.record.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What one guard writes to its run directory; opened once it is known which run this is."""

    folder: RunFolder
    record: RunDirectory | None = None
    """The record of the run, which the first rank writes."""
    rank_file: RankFile | None = None
    """What this rank alone has seen, if there are several."""

    @property
    def sinks(self) -> list[Sink]:
        """Where incidents go: to the record or, if another rank writes that, to this rank's own file."""
        sink = self.record if self.record is not None else self.rank_file
        return [] if sink is None else [sink]


def make_files(training: Training, run_dir: str | Path | None, ranks: Ranks, names: Sequence[str]) -> RunFiles | None:
    """Prepare the files of the run directory, which `RunStart` opens once it is known which run this is."""
    given = ranks.gather(run_dir is not None)  # before any rank waits for one that has nothing to write
    if any(given) and not all(given):
        raise UsageError(
            f"rank {given.index(True)} has a run_dir and rank {given.index(False)} has none. Pass the same run_dir to "
            "Guard on every rank: only rank 0 writes the record, and each rank adds what it alone has seen."
        )
    if run_dir is None:
        return None
    folder = RunFolder(run_dir, locks=ranks.is_first and not training.off)
    if training.off:
        return RunFiles(folder=folder)
    return RunFiles(
        folder=folder,
        record=make_record(folder.path, training.config, names, opens=False) if ranks.is_first else None,
        rank_file=RankFile(folder.path, ranks.rank, ranks.num, opens=False) if ranks.many else None,
    )


class RunStart:
    """The beginning of one guard's run."""

    def __init__(
        self, files: RunFiles, ranks: Ranks, *, checkpoints: RunCheckpoints, investigator: Investigator
    ) -> None:
        folder = files.folder
        self._folder, self._ranks = folder, ranks
        self._record, self._rank_file = files.record, files.rank_file
        self._checkpoints, self._investigator = checkpoints, investigator
        self._is_decided = False
        # Rank 0 decides for all. Exchange it here, where every rank takes part: a rank without data never makes a step.
        is_alone = not folder.siblings
        own = (folder.is_used, folder.found_id, folder.run_id, is_alone)
        self._is_used: bool
        self._found: str | None
        self._is_used, self._found, folder.run_id, is_alone = ranks.gather(own)[0] if ranks.many else own
        checkpoints.use_run(folder.path, folder.run_id)
        if is_alone and not self._is_used:
            self._settle()
            self._open()

    @property
    def path(self) -> Path:
        """Folder of the record; a further guard of a process has one of its own inside."""
        return self._folder.path

    def begin(self, step: int) -> Finding | None:
        """Begin a new run before the first step or save, unless `step` shows that a state was loaded."""
        self._folder.has_trained = True
        if self._is_decided:
            return None
        self._settle()
        if step > 0:
            self.go_on(self._found or "", step)
            return None
        try:
            earlier = self._folder.begin_anew() if self._is_used and self._ranks.is_first else None
            self._open()
        except (OSError, ConfigError) as error:  # for example a full disk: go on training without a record
            self._is_decided = True
            if self._record is not None:
                self._record.abandon(f"the record of {self._folder.path} cannot be written: {error}")
            return None
        return _report_new_run(self._folder.path, earlier) if self._is_used else None

    def find_place(self) -> Path:
        """Return the folder of this guard's checkpoints, before looking for one."""
        if not self._is_decided:
            for folder in self._folder.displace():
                owner = None if folder.owner is None else folder.owner()
                if owner is not None:
                    # Before looking for a checkpoint: its save under way must be on disk, and its record closed.
                    owner.give_up()
            self._settle()
            self._checkpoints.use_run(self._folder.path, self._folder.run_id)
        return self._folder.path

    def go_on(self, run_id: str, step: int) -> None:
        """Continue run `run_id` before step `step`: cut the later lines of its ledger, which will be written again."""
        if self._is_decided:
            if self._record is not None:
                # Lines still in the buffer would land behind the cut.
                self._record.flush()
                rewind_ledger(self._folder.path, step)
            return
        self._settle()
        if self._ranks.is_first:
            self._folder.go_on(run_id)
            rewind_ledger(self._folder.path, step)
        else:
            self._folder.run_id = run_id or self._found or self._folder.run_id
        self._open()

    def close(self) -> None:
        """Close this rank's own file and release the directory."""
        if self._rank_file is not None:
            self._rank_file.close()
        self._folder.release()

    def sign_in(self, saver: Any) -> None:
        """Register `saver` as this guard's; the directory does not keep it alive."""
        self._folder.owner = weakref.ref(saver)

    def find_company(self) -> list[Any]:
        """Return the savers of the other guards in the same directory."""
        if self._folder.is_alone:
            return []
        owners = [folder.owner for folder in self._folder.siblings]
        return [saver for owner in owners if owner is not None and (saver := owner()) is not None]

    def give_up_record(self) -> None:
        """Stop writing: another guard continues this run."""
        if self._record is not None:
            with contextlib.suppress(OSError):
                self._record.close()

    def take_problems(self) -> list[str]:
        """Return what went wrong with the record and was repaired."""
        problems = [] if self._record is None else self._record.take_problems()
        if problems:
            self._folder.restore_lock()
        return problems

    def _settle(self) -> None:
        """Find the folder; another guard of this process may have been freed since this one was created."""
        self._folder.settle()
        if self._ranks.is_first:
            self._is_used, self._found = self._folder.is_used, self._folder.found_id

    def _open(self) -> None:
        # First, so that it holds even if opening fails: the next step must not move the record aside once more.
        self._is_decided = True
        path, run_id = self._folder.path, self._folder.run_id
        if self._record is not None:
            self._record.open(path, run_id)
        if self._rank_file is not None and (self._ranks.is_first or not self._is_used):
            self._rank_file.open(path, run_id)
        elif self._rank_file is not None:
            # Rank 0 may still be moving the files of the earlier run.
            self._rank_file.open_later(path, run_id)
        self._checkpoints.use_run(path, run_id)
        self._investigator.use_folder(path)


def _report_new_run(folder: Path, earlier: Path | None) -> Finding:
    where = "" if earlier is None else f"; its record is now in {earlier}"
    return Finding(
        kind="new_run",
        severity=Severity.INFO,  # about the directory: incidents are about training
        step=0,
        message=f"{folder} holds an earlier run, and this one starts from step 0{where}; its checkpoints stay",
        advice="Call guard.resume() before the first step to continue it, or give each run its own run_dir.",
    )


# --- the record ---------------------------------------------------------------------------------------------------
# The record of a run that continues from an earlier step -> the same record without the steps that will be repeated.
#
# Steps after the checkpoint were recorded by a process that has ended, and will be made again: each must appear in the
# ledger once. Whole lines are cut from the end of the files that are in step order; incidents and the log stay,
# because they record what happened.


LEDGERS = ("steps.jsonl", "layers.jsonl")


def rewind_ledger(run_dir: Path, step: int) -> None:
    """Cut the lines about `step` and later ones. A ledger that cannot be changed is left as it is."""
    for name in LEDGERS:
        with contextlib.suppress(OSError):
            path = run_dir / name
            keep = _find_end(path, step)
            if keep < path.stat().st_size:
                os.truncate(path, keep)


def _find_end(path: Path, step: int) -> int:
    """Return the offset of the first line about `step` or a later one. Lines truncated by a crash do not count."""
    end = 0
    # Bytes, because the result is an offset for truncate().
    with path.open("rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] >= step:
                    return end
            except (ValueError, KeyError, TypeError):
                pass
            end += len(line)
    return end
