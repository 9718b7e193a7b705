"""CheckpointStore: training states -> checkpoints on disk that are never bad -> the newest good state again.

A save checks the state, copies it to reusable host memory, and returns; a thread writes it under a temporary name,
fsyncs, renames, reads it back, and only then removes older ones. A non-finite state is refused before anything is
written. A failing disk never ends a training: it is reported once, existing checkpoints stay, and the next save tries
again. Reading sets damaged checkpoints aside, with the reason, and continues with the previous one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from steadygrad.checkpoint.catalogue import (
    CheckpointInfo,
    describe_origin,
    find_best,
    find_folders,
    find_removable,
    keep_run,
    name_folder,
    rank,
    rank_together,
    read_info,
    read_infos,
)
from steadygrad.checkpoint.fitting import load_weights
from steadygrad.checkpoint.load import Checkpoint
from steadygrad.checkpoint.plain import Packed, pack
from steadygrad.checkpoint.proofs import Proofs, write_marks
from steadygrad.checkpoint.save import Save
from steadygrad.checkpoint.sharded import read_alone
from steadygrad.config.checkpoint import CheckpointConfig
from steadygrad.disk.manifest import (
    FILES,
    MODEL,
    PLAIN_FILE,
    SET_ASIDE,
    STATE,
    FileEntry,
    Manifest,
    check_files,
    split_pieces,
)
from steadygrad.disk.staging import StagedFile
from steadygrad.disk.write import remove_folder, remove_leftovers, write_folder
from steadygrad.errors import CheckpointError, DamagedCheckpoint, MismatchError, NonFiniteStateError, UsageError
from steadygrad.record.run_directory import require_device
from steadygrad.record.run_folder import read_run_id
from steadygrad.state.finite import count_nonfinite, replace_nonfinite

logger = logging.getLogger("steadygrad")


class CheckpointStore:
    """The checkpoints of one run, in one folder that one process writes.

    `state` is a mapping of plain containers and tensors; what is under "model" goes to model.safetensors. Top-level
    values may be objects with a `state_dict()`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        keep_every: int | None = None,
        best_by: str = "val_loss",
        good_after: int = 20,
        asynchronous: bool = True,
        clean: bool = False,
        clean_value: float = 0.0,
    ) -> None:
        self.directory = Path(directory)
        if not str(directory):
            raise UsageError("a CheckpointStore needs a folder, got ''. Use runs/first/checkpoints.")
        self.config = CheckpointConfig(
            keep_last=keep_last,
            keep_best=keep_best,
            keep_every=keep_every,
            best_by=best_by,
            good_after=good_after,
            asynchronous=asynchronous,
            clean=clean,
            clean_value=clean_value,
        )
        self._staged = {MODEL: StagedFile(), STATE: StagedFile()}
        self._staged_free = threading.Event()
        self._staged_free.set()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards what was reported, by the writing thread or the training
        self._opened = self._closed = False
        self._device = 0
        self._complained = False
        self._failures: list[str] = []
        self._proofs = Proofs(self.config.good_after)
        self.run_id = ""
        """Id of the run that saves here, stored with each checkpoint."""
        self.own_runs = {""}
        """Runs whose checkpoints may be removed to make room."""

    @classmethod
    def of(cls, directory: str | Path, config: CheckpointConfig) -> Self:
        """Create a store with the settings of `config`."""
        settings = dataclasses.asdict(config)
        return cls(directory, **{name: settings[name] for name in settings.keys() - {"every", "signals"}})

    # --- save -------------------------------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float] | None = None,
        clean: bool | None = None,
        may_be_nonfinite: Collection[str] = (),
        about: Mapping[str, Any] | None = None,
    ) -> Save:
        """Save the state before step `step`. Returns when training may continue; `Save.wait()` waits for the disk.

        NonFiniteStateError names the tensors that are not finite, unless they are in `may_be_nonfinite` or `clean` is
        true. A failing disk does not raise: see `Save.error`.
        """
        if self._closed:
            raise UsageError("this store is closed. Create a new one to keep saving.")
        if not isinstance(step, int) or step < 0:
            raise UsageError(
                f"step must be a whole number, at least 0, got {step!r}. Give the number of the next step."
            )
        save = Save(step)
        packed = pack({key: _as_state(value) for key, value in state.items()})
        cleaned = self._check(packed, step, self.config.clean if clean is None else clean, set(may_be_nonfinite))
        self._staged_free.wait()  # the previous save may still be writing from them
        # When this returns the copies have arrived, and the training may change its tensors
        self._stage(packed)
        plain = _dump({"tree": packed.tree, "odd": packed.odd, "may_be_nonfinite": sorted(may_be_nonfinite)})
        manifest = Manifest(
            step=step,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            serial=0,  # known when it is written
            files={},
            metrics=_keep_finite(metrics or {}),
            cleaned=cleaned,
            about=describe_origin(self.run_id) | dict(about or {}),
        )
        # Only now: an error above must not leave the next save waiting for a writer that never started
        self._staged_free.clear()
        # Before the writer starts: `place` ignores a step that it does not know
        self._proofs.begin(step)
        if not self.config.asynchronous or not self._start_writing(save, plain, manifest):
            # Without its own thread, this save must not overtake one that is still being written
            self.wait()
            self._write(save, plain, manifest, None)
        save.stall_seconds = time.perf_counter() - save._begin
        return save

    def _start_writing(self, save: Save, plain: bytes, manifest: Manifest) -> bool:
        """Start a thread to write it. Not a daemon: a program that ends without close() finishes its last save."""
        arguments = (save, plain, manifest, self._thread)
        thread = threading.Thread(target=self._write, args=arguments, name="steadygrad-checkpoint")
        try:
            thread.start()
        except RuntimeError:  # no more threads can be started
            return False
        self._thread = thread
        return True

    def _check(self, packed: Packed, step: int, clean: bool, may_be: set[str]) -> dict[str, int]:
        """Refuse non-finite values, or replace them in a copy; return the number of replaced elements by tensor."""
        named = packed.named()
        bad = count_nonfinite(named, may_be=may_be)
        if bad and not clean:
            raise NonFiniteStateError(f"the state before step {step}", bad)
        for name in bad:
            packed.replace(name, replace_nonfinite(named[name], self.config.clean_value))
        if bad:
            logger.warning("step %d: %d tensors were cleaned in the checkpoint: %s", step, len(bad), ", ".join(bad))
        return bad

    def _stage(self, packed: Packed) -> None:
        self._staged[MODEL].stage(packed.files[MODEL], packed.aliases)
        self._staged[STATE].stage(packed.files[STATE], {})

    def _write(self, save: Save, plain: bytes, manifest: Manifest, before: threading.Thread | None) -> None:
        """Run in the writing thread: after the previous save, write this one, verify it, and remove old ones."""
        error: str | None = None
        try:
            try:
                if before is not None:
                    # One at a time: the name and the serial number come from what is on disk
                    before.join()
                path = self._put_on_disk(save.step, plain, manifest)
            finally:
                self._staged_free.set()  # once, and here: the next save takes them at once
            save._place(path)
            # Before `_make_room`: an older checkpoint goes only when this one has been read back
            self._verify(path)
            self._proofs.place(save.step, path)
            self._make_room()
            self._complained = False
        # In a thread nothing else would report it; the training goes on and learns of it through `take_failures`
        except Exception as failure:
            error = _describe(failure)
            self._proofs.drop(save.step)
            self._report_failure(
                f"the checkpoint before step {save.step} could not be saved: {error}; earlier ones stay"
            )
        save._finish(error)

    def _put_on_disk(self, step: int, plain: bytes, manifest: Manifest) -> Path:
        self._open_directory()
        files: dict[str, Any] = {FILES[kind]: staged.pieces() for kind, staged in self._staged.items()}
        files[PLAIN_FILE] = split_pieces(memoryview(plain))
        target = self.directory / name_folder(step, [path.name for path in find_folders(self.directory)])
        serial = 1 + max((info.serial for info in read_infos(self.directory)), default=0)

        def describe(entries: dict[str, FileEntry]) -> Manifest:
            return dataclasses.replace(manifest, serial=serial, files=entries)

        write_folder(target, files, describe)
        return target

    def _open_directory(self) -> None:
        """Create the folder at the first save; create it again, on the same disk, if it was deleted later."""
        if not self._opened:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.directory)
            self._opened = True
            # Remembered so that a folder on a disk that was unmounted is not created again on the disk below it
            self._device = self.directory.stat().st_dev
        elif not self.directory.is_dir():
            require_device(self.directory, self._device)
            self.directory.mkdir(parents=True, exist_ok=True)
            self._report_failure(f"the folder {self.directory} had been deleted and was created again")

    def _verify(self, folder: Path) -> None:
        """Read the new checkpoint back before older ones are removed."""
        try:
            check_files(folder, read_info(folder).manifest, written_now=True)
        except DamagedCheckpoint as damage:
            self._set_aside(folder, damage.reason)
            raise CheckpointError(f"it was read back and is not what was written: {damage.reason}") from damage

    def _make_room(self) -> None:
        with contextlib.suppress(OSError):  # retried at the next save
            for info in find_removable(read_infos(self.directory), self.config, self.own_runs):
                remove_folder(info.path)

    def _report_failure(self, message: str) -> None:
        """Report a failure once, until a save works again."""
        with self._lock:
            if not self._complained:
                self._complained = True
                self._failures.append(f"{message}. Training continues.")
                logger.error(self._failures[-1])

    def take_failures(self) -> list[str]:
        """Return what went wrong since the last call, each thing once."""
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def wait(self) -> None:
        """Wait until every save is on disk, or has failed."""
        if self._thread is not None:
            # Each writer joins the one before it, so the last one's end is the end of all
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait for the disk and release the host memory. A closed store refuses to save; it can still be read."""
        self.wait()
        self._closed = True
        self._staged = {MODEL: StagedFile(), STATE: StagedFile()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- which ones are good ----------------------------------------------------------------------------------------

    def healthy_step(self, step: int) -> None:
        """Count step `step` as healthy: checkpoints before it come closer to being good."""
        self._proofs.healthy(step)

    def unhealthy_step(self, step: int, reason: str = "") -> None:
        """Count step `step` as unhealthy: checkpoints not good yet start counting again, and are suspect until then."""
        self._proofs.unhealthy(step, f"step {step} was not healthy{reason and ': '}{reason}")

    def mark_good(self, step: int) -> None:
        """Mark the checkpoint before step `step` as good."""
        # Or its count would go on, and the next unhealthy step would call it suspect
        self._proofs.drop(step)
        write_marks(self._find(step).path, good=True, suspect=None)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics that were learnt after the checkpoint before step `step` was saved."""
        finite = _keep_finite(metrics)
        if finite and not self._proofs.add_metrics(step, finite):
            write_marks(self._find(step).path, metrics=finite)

    def _find(self, step: int) -> CheckpointInfo:
        """Return the last attempt of the checkpoint before `step`."""
        infos = self.list()
        found = [info for info in infos if info.step == step]
        if not found:
            have = ", ".join(str(info.step) for info in infos) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint before step {step}; it has {have}.")
        return found[-1]

    @property
    def best(self) -> CheckpointInfo | None:
        """Return the current run's checkpoint with the lowest metric; None if none has it."""
        return next(iter(find_best(keep_run(self.list(), self._current_run), self.config.best_by)), None)

    @property
    def newest(self) -> CheckpointInfo | None:
        """Return the checkpoint that a resume would try first."""
        return next(iter(rank(self.list(), self._current_run)), None)

    @property
    def _current_run(self) -> str:
        return read_run_id(self.directory.parent) or ""

    # --- load -------------------------------------------------------------------------------------------------------

    def load(self, step: int | None = None, *, path: str | Path | None = None) -> Checkpoint | None:
        """Load the newest usable checkpoint, or the requested one; return None if there is none yet.

        Damaged ones are set aside and reported with the reason; one requested by step or path raises instead. Raise
        CheckpointError if there are checkpoints but none can be used.
        """
        self.wait()
        if path is not None:
            return read_alone(read_info(Path(path)))
        if step is not None:
            return read_alone(self._find(step))
        return self._load_newest()

    def _load_newest(self) -> Checkpoint | None:
        reasons = []
        for folder in find_folders(self.directory):
            try:
                read_info(folder)
            except DamagedCheckpoint as damage:
                reasons.append(self._set_aside(folder, damage.reason))
        ranked = rank(read_infos(self.directory), self._current_run)
        for info in rank_together(ranked, self.directory.parent):
            try:
                checkpoint = read_alone(info)
            except CheckpointError as error:
                reasons.append(
                    self._set_aside(info.path, error.reason if isinstance(error, DamagedCheckpoint) else str(error))
                )
                continue
            if not info.good:
                self._proofs.begin(info.step, info.path, suspect=info.suspect)
            return checkpoint
        if reasons:
            raise CheckpointError(
                f"{self.directory} has no checkpoint that can be used: {'; '.join(reasons)}. They are kept under "
                f"{SET_ASIDE}/; start over, or give another checkpoint."
            )
        return None

    def resume(self, targets: Mapping[str, Any], *, step: int | None = None, strict: bool = True) -> Checkpoint | None:
        """Load the newest usable checkpoint into `targets` through their `load_state_dict`; None if there is none yet.

        A model's missing, unexpected and mis-shaped tensors are named; `strict=False` loads what fits.
        """
        checkpoint = self.load(step)
        if checkpoint is None:
            return None
        missing = targets.keys() - checkpoint.state.keys()
        if missing:
            raise MismatchError(
                f"{checkpoint.info.path} has no state of {', '.join(sorted(missing))}; it has "
                f"{', '.join(checkpoint.state)}. Ask for those that were saved."
            )
        for name, target in targets.items():
            if isinstance(target, torch.nn.Module):
                load_weights(target, checkpoint.state[name], where=f"{checkpoint.info.path}, {name}", strict=strict)
            else:
                target.load_state_dict(checkpoint.state[name])
        return checkpoint

    def _set_aside(self, folder: Path, reason: str) -> str:
        """Move a checkpoint out of the way and return why; if the disk cannot, it is only left out."""
        target = self.directory / SET_ASIDE / folder.name
        number = 2
        while target.exists():
            target, number = target.with_name(f"{folder.name}.{number}"), number + 1
        logger.warning("checkpoint %s is not used: %s; set aside", folder.name, reason)
        with contextlib.suppress(OSError):
            target.parent.mkdir(exist_ok=True)
            folder.rename(target)
            (target / "reason.txt").write_text(f"{reason}\n", encoding="utf-8")
        return f"{folder.name}: {reason}"

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return every checkpoint on disk with a readable manifest, oldest first."""
        return tuple(read_infos(self.directory))


def _as_state(value: Any) -> Any:
    """Return an object's `state_dict()` if it has one, else the value itself."""
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def _dump(plain: Any) -> bytes:
    file = io.BytesIO()
    torch.save(plain, file)
    return file.getvalue()


def _keep_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics; a non-finite loss cannot be compared."""
    return {str(name): float(value) for name, value in metrics.items() if math.isfinite(value)}


def _describe(failure: BaseException) -> str:
    if isinstance(failure, OSError) and failure.strerror:
        where = f" ({failure.filename})" if failure.filename else ""
        return f"{failure.strerror}{where}"
    return str(failure) if isinstance(failure, CheckpointError) else repr(failure)
