"""ShardedStore: the training of many ranks -> one checkpoint that all of them write -> the same on any number of ranks.

Parameters, optimizer state and anything else that is sharded or equal on all ranks go through
torch.distributed.checkpoint, each part written by one rank. What belongs to one rank (buffers, random generators, data
position) goes into its own file. When all are done, rank 0 writes our manifest over every file and renames the folder:
if a rank dies before that, the previous checkpoint stays the newest. All ranks must make every call.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import io
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from steadygrad.checkpoint.load import Checkpoint, load_plain, read_checkpoint
from steadygrad.checkpoint.plain import TENSOR, pack_plain, unpack
from steadygrad.checkpoint.proofs import Proofs
from steadygrad.checkpoint.save import Save
from steadygrad.config.checkpoint import CheckpointConfig
from steadygrad.disk.manifest import NAME, FileEntry, Manifest, check_files, hash_file, start_pool
from steadygrad.disk.write import WRITING, remove_folder, remove_leftovers, sync_folder
from steadygrad.errors import CheckpointError, NonFiniteStateError
from steadygrad.measure.ranks import Ranks
from steadygrad.record.run_folder import read_run_id
from steadygrad.state.finite import count_nonfinite, replace_nonfinite
from steadygrad.state.shards import is_dtensor, take_local

logger = logging.getLogger("steadygrad")
NUM_RANKS = "num_ranks"
"""Key in the manifest of a checkpoint that many ranks wrote."""


def is_sharded(info: CheckpointInfo) -> bool:
    """Whether many ranks wrote it."""
    return NUM_RANKS in info.manifest.about


class ShardedStore:
    """The checkpoints of one run trained by many ranks."""

    def __init__(self, directory: Path, config: CheckpointConfig, ranks: Ranks) -> None:
        self.directory, self.config, self._ranks = directory, config, ranks
        self._proofs = Proofs(config.good_after)
        self._failures: list[str] = []
        self._opened = False
        self.run_id = ""
        """Id of the run that saves here, stored with each checkpoint."""
        self.own_runs = {""}
        """Runs whose checkpoints may be removed to make room."""

    # --- save -------------------------------------------------------------------------------------------------------

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float],
        may_be_nonfinite: Collection[str],
        about: Mapping[str, Any],
    ) -> Save:
        """Save the state before step `step`; it is complete and on disk when this returns."""

        save = Save(step)
        # From here on every rank makes the same collectives in the same order; one that leaves early hangs the others
        tree, shared, own = split_state(state)
        cleaned = self._check_finite(step, (shared, own), set(may_be_nonfinite))
        aside, target, serial = self._agree_on_folder(step)
        error: str | None = None
        try:
            # Not through `_together`: it is a collective itself, and raises on all ranks if one fails
            _shared_tensors().write_tensors(shared, aside, group=self._ranks.group)
            entries = self._together(lambda: self._write_own(aside, tree, own))
            self._together(lambda: self._finish(aside, target, entries, step, serial, metrics, about, cleaned))
        except Exception as failure:  # the same on all ranks
            error = f"the checkpoint before step {step} could not be saved: {_describe(failure)}; earlier ones stay"
            self._failures.append(f"{error}. Training continues.")
            if self._ranks.is_first:
                logger.error(error)
                with contextlib.suppress(OSError):
                    remove_folder(aside)
        else:
            save._place(target)
            if self._ranks.is_first:
                self._proofs.begin(step, target)  # on rank 0 alone: one writer for the marks
        save.stall_seconds = time.perf_counter() - save._begin
        save._finish(error)
        return save

    def _check_finite(self, step: int, parts: Sequence[dict[str, Tensor]], may_be: set[str]) -> dict[str, int]:
        """Refuse on all ranks if a value is not finite on any one, or replace it in a copy; return what is replaced."""
        named = {name: take_local(tensor) for part in parts for name, tensor in part.items()}
        found = count_nonfinite(named, may_be=may_be)
        bad: dict[str, int] = {}
        for other in self._ranks.gather(found):
            # All ranks merge all counts, so that all raise or none does
            bad |= other
        if bad and not self.config.clean:
            raise NonFiniteStateError(f"the state before step {step}", bad)
        for part in parts:
            part |= {name: _replace(part[name], self.config.clean_value) for name in found.keys() & part.keys()}
        if bad and self._ranks.is_first:
            logger.warning("step %d: %d tensors were cleaned in the checkpoint: %s", step, len(bad), ", ".join(bad))
        return bad

    def _agree_on_folder(self, step: int) -> tuple[Path, Path, int]:
        """Have rank 0 create the folder to write into; return its path, the final path and the serial number."""

        def prepare() -> tuple[str, str, int]:
            if not self._opened:
                self.directory.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.directory)
                self._opened = True
            name = name_folder(step, [path.name for path in find_folders(self.directory)])
            aside = self.directory / f"{WRITING}{os.getpid()}-{name}"
            remove_folder(aside)  # left by a failed save of a process with this id
            aside.mkdir()
            return aside.name, name, 1 + max((info.serial for info in read_infos(self.directory)), default=0)

        aside, name, serial = self._together(prepare if self._ranks.is_first else lambda: None)[0]
        return self.directory / aside, self.directory / name, serial

    def _write_own(self, aside: Path, tree: Any, own: Mapping[str, Tensor]) -> dict[str, FileEntry]:
        """Write this rank's own file; return sizes and hashes of all files that it wrote."""

        # Serialised in memory first: an object that cannot be pickled leaves no half-written file
        content = io.BytesIO()
        torch.save({"tree": tree, "own": {name: tensor.detach().cpu() for name, tensor in own.items()}}, content)
        with (aside / _name_own(self._ranks.rank)).open("xb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        # torch names a rank's files `__<rank>_<n>.distcp`; the second underscore keeps rank 1 from taking rank 10's
        mine = [_name_own(self._ranks.rank), *(p.name for p in aside.glob(f"__{self._ranks.rank}_*"))]
        return _hash_files(aside, [*mine, _shared_tensors().METADATA] if self._ranks.is_first else mine)

    def _finish(
        self,
        aside: Path,
        target: Path,
        entries: list[dict[str, FileEntry]],
        step: int,
        serial: int,
        metrics: Mapping[str, float],
        about: Mapping[str, Any],
        cleaned: dict[str, int],
    ) -> None:
        """On rank 0: write the manifest, rename the folder, then remove old checkpoints."""
        if not self._ranks.is_first:
            return
        manifest = Manifest(
            step=step,
            serial=serial,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files={name: entry for part in entries for name, entry in part.items()},
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
            cleaned=cleaned,
            about={**describe_origin(self.run_id), NUM_RANKS: self._ranks.num, **about},
        )
        # The manifest last: a folder without one is not a checkpoint
        with (aside / NAME).open("xb") as file:
            file.write(manifest.render())
            file.flush()
            os.fsync(file.fileno())
        # Files were fsynced by the ranks that wrote them; then their names, then the folder's own name
        sync_folder(aside)
        aside.rename(target)
        sync_folder(self.directory)
        with contextlib.suppress(OSError):  # retried at the next save
            for info in find_removable(read_infos(self.directory), self.config, self.own_runs):
                remove_folder(info.path)

    def _together(self, call: Callable[[], Any]) -> list[Any]:
        """Return every rank's result; raise CheckpointError on all if it failed on one."""
        result, error = None, ""
        try:
            result = call()
        # Whatever it is, this rank must still reach the gather: the others are waiting there
        except Exception as failure:
            error = _describe(failure)
        answers = self._ranks.gather((result, error))
        for number, (_, failed) in enumerate(answers):
            if failed:
                raise CheckpointError(f"{self._ranks.name(number)}: {failed}")
        return [answer for answer, _ in answers]

    # --- load -------------------------------------------------------------------------------------------------------

    def load(self, live: Mapping[str, Any], path: Path | None = None) -> Checkpoint | None:
        """Load the newest usable checkpoint, or the one at `path`; return None if there is none yet.

        `live` is the present state of the training; its tensors determine which part each rank gets.
        """
        folders = [path] if path is not None else [info.path for info in self._rank()]
        # Rank 0's list for all: a network file system may show the ranks different folders
        folders = [Path(name) for name in self._ranks.gather([str(folder) for folder in folders])[0]]
        reasons = []
        for folder in folders:
            try:
                info = self._together(functools.partial(self._verify, folder))[0]
                checkpoint = read_sharded(info, live, ranks=self._ranks) if is_sharded(info) else read_checkpoint(info)
            except CheckpointError as error:
                reasons.append(str(error))
                logger.warning("checkpoint %s is not used: %s", folder.name, error)
                continue
            if self._ranks.is_first and not info.good:
                # On rank 0 alone: one writer for the marks
                self._proofs.begin(info.step, info.path, suspect=info.suspect)
            return checkpoint
        if reasons:
            raise CheckpointError(
                f"{self.directory} has no checkpoint that can be used: {'; '.join(reasons)}. Start over, or give "
                "another one."
            )
        return None

    def _verify(self, folder: Path) -> CheckpointInfo:
        """Hash this rank's share of the files."""
        info = read_info(folder)
        names = sorted(info.manifest.files)[self._ranks.rank :: self._ranks.num]
        mine = {name: info.manifest.files[name] for name in names}
        check_files(folder, Manifest(step=info.step, serial=0, created="", files=mine))
        return info

    # --- what is known about them -----------------------------------------------------------------------------------

    def healthy_step(self, step: int) -> None:
        """Count step `step` as healthy: checkpoints before it come closer to being good."""
        self._proofs.healthy(step)

    def unhealthy_step(self, step: int) -> None:
        """Count step `step` as unhealthy: checkpoints not good yet start counting again, and are suspect until then."""
        self._proofs.unhealthy(step, f"step {step} was not healthy")

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics that were learnt after the checkpoint before step `step` was saved."""
        self._proofs.add_metrics(step, metrics)

    def take_failures(self) -> list[str]:
        """Return what went wrong since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def list(self) -> tuple[CheckpointInfo, ...]:
        """Return every checkpoint on disk with a readable manifest, oldest first."""
        return tuple(read_infos(self.directory))

    @property
    def best(self) -> CheckpointInfo | None:
        """Return the current run's checkpoint with the lowest metric; None if none has it."""
        return next(iter(find_best(keep_run(self.list(), self._current_run), self.config.best_by)), None)

    @property
    def newest(self) -> CheckpointInfo | None:
        """Return the checkpoint that a resume would try first."""
        return next(iter(self._rank()), None)

    @property
    def _current_run(self) -> str:
        return read_run_id(self.directory.parent) or ""

    def _rank(self) -> Sequence[CheckpointInfo]:
        return rank_together(rank(read_infos(self.directory), self._current_run), self.directory.parent)

    def wait(self) -> None:
        """Do nothing: saves are complete when `save` returns."""

    def close(self) -> None:
        """Do nothing: no resources are held."""


def count_saving_ranks(info: CheckpointInfo) -> int:
    """Return how many ranks saved the checkpoint."""
    return int(info.manifest.about.get(NUM_RANKS, 1))


def read_sharded(info: CheckpointInfo, live: Mapping[str, Any], *, ranks: Ranks) -> Checkpoint:
    """Read one checkpoint on any number of ranks; a rank that did not exist at the save gets rank 0's own part."""

    _, live_shared, _ = split_state(live)
    own_file = info.path / _name_own(ranks.rank)
    # After `_verify`: damage raises there, on all ranks; here it would raise on one, and the others would wait for it
    plain = load_plain(own_file if own_file.is_file() else info.path / _name_own(0))

    def make_room(name: str, record: Any) -> Tensor:
        like = live_shared.get(name)
        if like is None:
            like = _find_parameter(name, live_shared)
        if like is not None and like.shape == record.size:
            # The live layout, so that a DTensor receives its own shard; the saved dtype, so that nothing is rounded
            return torch.empty_like(like, dtype=record.properties.dtype).detach()
        return torch.empty(record.size, dtype=record.properties.dtype, device="cpu")

    shared = _shared_tensors().read_tensors(info.path, make_room, group=ranks.group if ranks.many else None)
    tensors = {**shared, **plain["own"]}
    devices: dict[int, str] = {}
    state = unpack(plain["tree"], tensors.__getitem__, devices)
    here = str(next(iter(live_shared.values())).device)  # rank 0's own file may be read by others
    return Checkpoint(
        info, state, {number: here if name.startswith("cuda") else name for number, name in devices.items()}
    )


def read_alone(info: CheckpointInfo) -> Checkpoint:
    """Verify a checkpoint, and read it on the CPU of one process, without any other rank; own parts are rank 0's."""
    if not is_sharded(info):
        return read_checkpoint(info)
    check_files(info.path, info.manifest)
    plain = load_plain(info.path / _name_own(0))

    def make_room(name: str, record: Any) -> Tensor:  # noqa: ARG001
        return torch.empty(record.size, dtype=record.properties.dtype, device="cpu")

    tensors = {**_shared_tensors().read_tensors(info.path, make_room, group=None), **plain["own"]}
    return Checkpoint(info, unpack(plain["tree"], tensors.__getitem__, {}))


def _find_parameter(name: str, live: Mapping[str, Tensor]) -> Tensor | None:
    """Find the parameter whose layout optimizer state follows; before the first step there is no live state."""
    if name.startswith("optimizers."):
        parameter = name.split(".state.", 1)[-1].rpartition(".")[0]
    elif name.startswith("gradients."):
        parameter = name.removeprefix("gradients.")
    else:
        return None
    return live.get(f"model.{parameter}", live.get(f"other_parameters.{parameter}"))


def _hash_files(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    with start_pool() as pool:
        return {
            name: FileEntry((folder / name).stat().st_size, tuple(hash_file(folder / name, pool))) for name in names
        }


def _replace(tensor: Tensor, value: float) -> Tensor:
    """Return a copy with every NaN and Inf of this rank's part replaced."""
    made = tensor.detach().clone()
    part = take_local(made)
    part.copy_(replace_nonfinite(part, value))
    return made


def _name_own(number: int) -> str:
    return f"rank_{number}.pt"


def _describe(failure: Exception) -> str:
    return str(failure) if isinstance(failure, CheckpointError) else repr(failure)


# --- what is shared -----------------------------------------------------------------------------------------------
# The state of one rank -> what all ranks hold together, what is its own, and the plain rest.
#
# Parameters, optimizer state, extras (EMA) and every DTensor are equal on all ranks or sharded: they are shared.
# Buffers, accumulating gradients and random generators belong to each rank.


BUFFERS = "buffer_names"
"""Key in the state for the names of the model's tensors that are buffers."""
SHARED = ("optimizers.", "extras.", "other_parameters.")
"""Path prefixes of tensors that all ranks share."""


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Return plain containers with a mark for each tensor, and the shared and own tensors by path."""
    buffers = {f"model.{name}" for name in state[BUFFERS]}
    shared: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}

    def take(tensor: Tensor, path: str) -> dict[str, str]:
        is_shared = path.startswith(SHARED) or (path.startswith("model.") and path not in buffers)
        (shared if is_shared or is_dtensor(tensor) else own)[path] = tensor.detach()
        return {TENSOR: path} if tensor.device.type == "cpu" else {TENSOR: path, "device": str(tensor.device)}

    return pack_plain(state, take), shared, own


def _shared_tensors() -> Any:
    """Import lazily: importing torch.distributed.checkpoint takes half as long as importing torch."""
    from steadygrad.checkpoint import shared_tensors

    return shared_tensors
