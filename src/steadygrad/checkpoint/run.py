"""RunCheckpoints: what a Guard needs to save a whole training and resume it, behind a few calls.

It combines the pieces: gathering and restoring (`training`), the data position (`position`), the disk (`store`), what
the user changed (`changes`), signals. It holds none of the Guard's own numbers; those pass through as the plain state
of `Guard.state_dict()`. Without a run directory nothing is ever written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from steadygrad.act.buffers import BufferKeeper
from steadygrad.act.microbatches import Accumulated
from steadygrad.checkpoint.catalogue import ENDS_EPOCH, TOGETHER, CheckpointInfo, rank, read_info, read_infos
from steadygrad.checkpoint.changes import apply_changes, find_changes, note_given
from steadygrad.checkpoint.gather import describe_missing, gather_training, list_left_out, live_random
from steadygrad.checkpoint.infinities import Infinities
from steadygrad.checkpoint.load import Checkpoint
from steadygrad.checkpoint.position import DataPositions
from steadygrad.checkpoint.resumed import Resumed, list_inexact
from steadygrad.checkpoint.save import Save
from steadygrad.checkpoint.sharded import BUFFERS, ShardedStore, count_saving_ranks, is_sharded
from steadygrad.checkpoint.signals import SignalWatch
from steadygrad.checkpoint.store import CheckpointStore
from steadygrad.checkpoint.training import gather_accumulated, put_accumulated, put_back
from steadygrad.config.checkpoint import CheckpointConfig
from steadygrad.disk.manifest import NAME
from steadygrad.errors import CheckpointError, NonFiniteStateError, UnsupportedError, UsageError
from steadygrad.measure.ranks import Ranks
from steadygrad.record.run_folder import read_run_id
from steadygrad.state.finite import count_nonfinite
from steadygrad.state.random_state import restore_random

logger = logging.getLogger("steadygrad")
T = TypeVar("T")
FOLDER = "checkpoints"
"""Name of the checkpoint folder in a run directory."""
GIVEN = ("scheduler", "scaler", "ema")
"""Extras that Guard takes as arguments."""
SKIPS_IN_A_ROW = 10
"""Skips in a row from which the weights are bad, not the batches: as many as make the policy roll back."""
REFUSALS = (CheckpointError, UnsupportedError, MemoryError, RuntimeError)
"""Errors that make all ranks leave out a save alike."""


class RunCheckpoints:
    """The checkpoints of one Guard."""

    def __init__(
        self,
        run_dir: str | Path | None,
        config: CheckpointConfig,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        extras: Mapping[str, Any],
        clip: str | None,
        buffers: BufferKeeper,
        ranks: Ranks | None = None,
    ) -> None:
        self._clip, self._buffers = clip, buffers
        self._ranks = ranks if ranks is not None else Ranks()
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._run_id = ""
        self._adopted: set[str] = set()
        self._num_skipped_in_row = 0
        self._config = config
        self._model, self._optimizers = model, list(optimizers)
        self._extras = {name: extra for name, extra in extras.items() if hasattr(extra, "load_state_dict")}
        self._stateless = [name for name, extra in extras.items() if extra is not None and name not in self._extras]
        # At construction: later values are the schedule's and the policy's, not the user's
        self._given = note_given(self._optimizers)
        own = [name for name in self._extras if name not in GIVEN]
        self._infinities = Infinities(model, own, looks=run_dir is not None)
        self._positions = DataPositions()
        self._store: CheckpointStore | ShardedStore | None = None
        self._last_saved: int | None = None
        self._follows_data = run_dir is not None
        self._refused: list[str] = []
        self._notes: list[str] = []
        self._about: dict[str, Any] = {}
        self._epoch_ended_at: int | None = None
        self._explained: set[str] = set()
        self.signals = SignalWatch()

    def use_run(self, run_dir: Path, run_id: str) -> None:
        """Set where checkpoints go and which run they belong to."""
        if self._store is not None and run_dir != self._run_dir:
            # Waits for its last save, which belongs to the old directory
            self._store.close()
            self._store = None
        self._run_dir, self._run_id = run_dir, run_id
        if self._store is not None:
            self._store.run_id, self._store.own_runs = run_id, {run_id, *self._adopted}

    # --- while training ---------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Answer signals from now on, if there is a place to save to."""
        if self.is_listening:
            self.signals.start()

    @property
    def has_place(self) -> bool:
        """Whether there is a run directory to save to."""
        return self._run_dir is not None

    @property
    def is_listening(self) -> bool:
        """Whether signals are answered: there is a place to save to, and the user wants it."""
        return self._run_dir is not None and self._config.signals

    def iterate(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield a loader's batches, and track the position if it can be saved."""
        # Nothing can be saved without a run directory, so the loader is not wrapped and costs nothing
        return self._positions.iterate(loader) if self._follows_data else iter(loader)

    def end_epoch(self, step: int) -> None:
        """End the epoch before step `step`: the next pass over the data starts from the beginning."""
        self._positions.end_epoch()
        self._epoch_ended_at = step

    def follow(self, before: RunCheckpoints) -> None:
        """Begin the next pass over the data as the guard before would have."""
        self._positions.follow(before._positions)

    def is_due(self, step: int) -> bool:
        """Whether the Guard should save by itself before step `step`; not while ranks may be at different steps."""
        every = self._config.every
        due = every is not None and step % every == 0 and step != self._last_saved
        return due and self._run_dir is not None and not self._ranks.is_joining

    def note_step(self, step: int, *, healthy: bool, skipped: bool = False) -> None:
        """Record how a step went, so that checkpoints before it become good or suspect.

        One skipped bad batch says nothing about the weights; many in a row do.
        """
        self._num_skipped_in_row = self._num_skipped_in_row + 1 if skipped else 0
        if self._store is None or 0 < self._num_skipped_in_row < SKIPS_IN_A_ROW:
            return
        if healthy:
            self._store.healthy_step(step)
        else:
            self._store.unhealthy_step(step)

    def note_validation(self, step: int, loss: float) -> None:
        """Record a validation loss of the weights before step `step`, whether already saved or not."""
        if self._store is not None and self._last_saved == step:
            self._store.add_metrics(step, {self._config.best_by: loss})

    def take_failures(self) -> list[str]:
        """Return why states were refused and what went wrong on disk, each thing once."""
        refused, self._refused = self._refused, []
        return refused if self._store is None else refused + self._store.take_failures()

    # --- save -------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        guard: Mapping[str, Any],
        *,
        accumulated: Accumulated,
        validation_loss: float | None = None,
        used_gradients: bool = False,
        together: str = "",
    ) -> Save | None:
        """Save everything before step `step`; return None if that fails, which `take_failures()` explains.

        `validation_loss`: that of these very weights. Gradients that a step has already used are not saved: after a
        restore, the next backward would add to them. `together`: the token of several guards that save at once.
        """
        store = self.store
        try:
            state = self._gather()
            if used_gradients:
                state["gradients"] = {}
            self._about = {"next_step": step, **({TOGETHER: together} if together else {})}
            if self._epoch_ended_at == step:
                self._about[ENDS_EPOCH] = True
            metrics = {} if validation_loss is None else {self._config.best_by: validation_loss}
            return self._save(store, state, step, guard, accumulated, metrics)
        except Exception as error:  # an extra holds something that cannot be saved: report it and keep training
            if self._ranks.many and not isinstance(error, REFUSALS):
                raise  # perhaps on this rank alone: the others would wait forever
            self._refused += self._explain([str(error) or repr(error)])
            return None

    def _save(
        self,
        store: CheckpointStore | ShardedStore,
        state: dict[str, Any],
        step: int,
        guard: Mapping[str, Any],
        accumulated: Accumulated,
        metrics: Mapping[str, float],
    ) -> Save:
        if self._stateless and self._last_saved is None:
            logger.warning("%s cannot be saved: it has no state_dict.", ", ".join(self._stateless))
        for what in self._explain(list_left_out(state)):  # state that appeared after the first step
            logger.warning("%s when the run is resumed.", what)
        state |= {
            "guard": dict(guard),
            "given": self._given,
            "clip": self._clip,
            "data": self._positions.state_dict(),
            "accumulated": gather_accumulated(accumulated, self._model, self._buffers),
        }
        if self._config.clean:  # it would write zeros over a mask of -inf
            found = count_nonfinite(dict(self._model.named_buffers()), may_be=self._infinities.buffers)
            # Those of all ranks: each call of `_accept` is a collective
            for name in sorted(set().union(*self._ranks.gather(list(found)))):
                self._accept([f"model.{name}"])
        try:
            saved = self._write(store, state, step, metrics)
        except NonFiniteStateError as error:
            # Raised on all ranks alike, so that all of them reach the gather in `_accept`
            if not self._accept(error.tensors):
                raise
            saved = self._write(store, state, step, metrics)
        # Only now: a save that raised is due again
        self._last_saved = step
        return saved

    def _write(
        self, store: CheckpointStore | ShardedStore, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]
    ) -> Save:
        may_be = self._infinities.list_names(state)
        return store.save(state, step=step, metrics=metrics, may_be_nonfinite=may_be, about=self._about)

    def _accept(self, bad: Collection[str]) -> bool:
        """Whether the non-finite values are intentional on all ranks; reported once."""
        accepted = self._infinities.accept(bad)
        # A collective: every rank must come here equally often
        if self._ranks.many and not all(self._ranks.gather(bool(accepted))):
            return False
        if accepted:
            self._notes.append(f"{', '.join(accepted)}: values that are not finite are saved as they are")
        return bool(accepted)

    def take_notes(self) -> list[str]:
        """Return what the user should know about the saves, each thing once."""
        notes, self._notes = self._notes, []
        return notes

    @property
    def store(self) -> CheckpointStore | ShardedStore:
        """The store that holds them; raises UsageError without a run directory."""
        if self._run_dir is None:
            raise UsageError("there is nowhere to write checkpoints: give Guard a run_dir.")
        if self._store is None:
            folder = self._run_dir / FOLDER
            self._store = (
                ShardedStore(folder, self._config, self._ranks)
                if self._ranks.many
                else CheckpointStore.of(folder, self._config)
            )
            self._store.run_id, self._store.own_runs = self._run_id, {self._run_id, *self._adopted}
        return self._store

    def find_left_out(self) -> list[str]:
        """Describe briefly what this training's checkpoints lack, each thing once; gathers, but writes nothing."""
        if self._run_dir is None:
            return []
        self._explained |= {describe_missing(name) for name in self._extras}  # reported as what cannot be copied
        return self._explain(list_left_out(self._gather()))

    def _explain(self, reasons: Iterable[str]) -> list[str]:
        """Return the reasons not reported yet."""
        new = [reason for reason in reasons if reason not in self._explained]
        self._explained |= {*new}
        return new

    def _gather(self) -> dict[str, Any]:
        state = gather_training(self._model, self._optimizers, self._extras)
        return state | {BUFFERS: [name for name, _ in self._model.named_buffers()]}

    # --- resume -----------------------------------------------------------------------------------------------------

    def resume(self, path: str | Path | None, *, strict: bool) -> Resumed | None:
        """Restore the newest usable checkpoint, or the one at `path`; return None if there is none yet.

        The Guard must then load its own state, and call `finish_resume()`.
        """
        checkpoint = self._load(path)
        if checkpoint is None:
            return None
        state = checkpoint.state
        if "guard" not in state:
            raise CheckpointError(
                f"{checkpoint.info.path} was not saved by a Guard. Load it with CheckpointStore.load()."
            )
        changes = find_changes(self._given, state["given"])
        # Before `put_back`, which writes the state into the optimizers
        apply_changes(changes, state)
        problems = put_back(checkpoint, self._model, self._optimizers, self._extras, strict=strict)
        if state["clip"] != self._clip:
            state["guard"]["clip"] = {}
            problems.append(f"clipping by {self._clip} starts over: the checkpoint has {state['clip']}")
        problems += list_inexact(count_saving_ranks(checkpoint.info), self._ranks.num)
        accumulated = put_accumulated(state["accumulated"], self._model, self._buffers)
        self._positions.load_state_dict(state["data"], live_random(state["random"]))
        self._random = live_random(state["random"])
        # Also without a run directory: the resumed pass must continue in the middle
        self._follows_data = True
        self._last_saved = checkpoint.step
        if not checkpoint.info.run and self.is_own(checkpoint.info):
            self._adopted = {""}  # saved by a version without run ids: they are this run's
        return Resumed(checkpoint.step, checkpoint.info, state["guard"], accumulated, changes, problems)

    def roll_back(self, owns_rate: Callable[[torch.optim.Optimizer], bool]) -> tuple[int, list[str]] | None:
        """Restore the newest good checkpoint of this run, as a snapshot would be; return None if there is none.

        Weights, optimizer state and what was handed to the Guard go back. Random generators, the data position,
        gradients and the learning rates of the user's own scheduler stay. Returns the step, and what did not fit.
        """
        if self._run_dir is None:
            return None
        # The newest good one may still be without its mark, or be the one that is being written
        self.wait()
        infos = [info for info in read_infos(self.store.directory) if info.good and info.run == self._run_id]
        paths = [str(info.path) for info in sorted(infos, key=lambda info: info.serial, reverse=True)]
        given = {name: extra for name, extra in self._extras.items() if name in GIVEN}
        settings = {id(o) for o in self._optimizers if "scheduler" in given or owns_rate(o)}
        # Rank 0's list for all: ranks may see another directory listing, and loading is a collective
        for path in self._ranks.gather(paths)[0] if self._ranks.many else paths:
            try:
                checkpoint = self._load(path)
            except CheckpointError as error:
                logger.warning("cannot roll back to %s: %s", path, error)
                continue
            assert checkpoint is not None
            problems = put_back(
                checkpoint, self._model, self._optimizers, given, strict=False, settings=settings, gradients=False
            )
            return checkpoint.step, problems
        return None

    def is_own(self, info: CheckpointInfo) -> bool:
        """Whether a checkpoint is in this run directory."""
        return self._run_dir is not None and info.path.parent.absolute() == (self._run_dir / FOLDER).absolute()

    def finish_resume(self) -> None:
        """Restore the random generators. Call it last, since loading may draw random numbers."""
        restore_random(self._random)

    def _load(self, path: str | Path | None) -> Checkpoint | None:
        if path is None:
            return self._load_newest(self.store.directory)
        folder = Path(path)
        if (folder / NAME).is_file():
            if self._ranks.many or is_sharded(read_info(folder)):
                return self._load_together(folder.parent, folder)
            return CheckpointStore(folder.parent).load(path=folder)
        inner = folder / FOLDER if (folder / FOLDER).is_dir() else folder
        found = self._load_newest(inner) if inner.is_dir() else None
        if found is None:
            raise CheckpointError(f"{folder} holds no checkpoint. Give a run directory, or one of its checkpoints.")
        return found

    def _load_newest(self, directory: Path) -> Checkpoint | None:
        newest = next(iter(rank(read_infos(directory), read_run_id(directory.parent) or "")), None)
        if self._ranks.many or (newest is not None and is_sharded(newest)):
            return self._load_together(directory)
        store = self._store if isinstance(self._store, CheckpointStore) else None
        own = store if store is not None and store.directory == directory else CheckpointStore(directory)
        return own.load()

    def _load_together(self, directory: Path, path: Path | None = None) -> Checkpoint | None:
        """Load a checkpoint that many ranks wrote, or that many ranks read."""
        store = self._store if isinstance(self._store, ShardedStore) and self._store.directory == directory else None
        store = store if store is not None else ShardedStore(directory, self._config, self._ranks)
        return store.load(self._gather(), path)

    def wait(self) -> None:
        """Wait until every save is on disk, or has failed."""
        if self._store is not None:
            self._store.wait()

    def close(self) -> None:
        """Wait for the disk, and stop listening for signals."""
        self.signals.stop()
        if self._store is not None:
            self._store.close()
