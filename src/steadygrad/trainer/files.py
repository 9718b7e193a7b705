"""A model and its history <-> one file at a path that the user chooses; weights of a run -> a model.

These files are for passing a model on; to resume a training exactly, use the guard's own checkpoints. A file is
written to a temporary name, fsynced and renamed, holds only plain containers and tensors, and is read without running
its code. Non-finite values are replaced before a save and after a load, and reported: none gets into a file or model.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.act.sanitize import handle_nan_inf
from steadygrad.checkpoint import CheckpointStore
from steadygrad.checkpoint.load import Checkpoint
from steadygrad.checkpoint.run import FOLDER
from steadygrad.disk.manifest import NAME
from steadygrad.errors import CheckpointError, UnsupportedError, UsageError
from steadygrad.measure.check import check_nan_inf
from steadygrad.scan.trusted import load_trusted
from steadygrad.scan.values import load_values

logger = logging.getLogger("steadygrad.trainer")

METRICS = "metrics.jsonl"
"""File of all evaluations in the run directory; after a resume a step may appear twice, and the later line counts."""


@torch.no_grad()
def clean_parameters(model: nn.Module, when: str) -> bool:
    """Replace every NaN and Inf in the parameters by 0; return whether there was any. `when` ends the warning."""
    found = False
    for name, parameter in model.named_parameters():
        if check_nan_inf(parameter, f"parameter {name}"):
            logger.warning("NaN/Inf detected in parameter %s, cleaning %s", name, when)
            parameter.copy_(handle_nan_inf(parameter))  # in place: optimizers and EMA hold this tensor
            found = True
    return found


def write_file(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write `content` atomically, so that the file is complete or absent; create its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            # Before the rename: after a power cut the name must not lead to an empty file
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def save_model(
    path: str | Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    about: Mapping[str, Any],
    *,
    gather: Callable[[Any], Any] = lambda tree: tree,
    writes: bool = True,
) -> None:
    """Clean the model, then write it with its optimizers and metadata.

    `gather` makes the tensors of several ranks whole, on all of them; one rank `writes`.
    """
    if clean_parameters(model, "before save"):
        logger.warning("Model contained NaN/Inf values that were cleaned before saving")
    # Gathering is a collective: all ranks do it, also those that do not write
    content: dict[str, Any] = {"model_state_dict": gather(model.state_dict()), **about}
    if optimizers:
        content["optimizer_state_dict"] = [gather(optimizer.state_dict()) for optimizer in optimizers]
    if writes:
        write_file(path, content)


def load_model(
    path: str | Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, trust: bool = False
) -> dict[str, Any] | None:
    """Load what `save_model` wrote, and return it; log an error and return None if it cannot be used.

    With `trust` the file may run code; without it, objects of custom classes are left out and named.
    """
    try:
        content, left_out = (load_trusted(Path(path)), []) if trust else load_values(Path(path))
    except (CheckpointError, UnsupportedError, OSError) as error:
        logger.error("The checkpoint %s cannot be loaded: %s", path, error)
        return None
    if left_out:
        logger.warning("%s: left out objects of %s, which only their own code could make", path, ", ".join(left_out))
    if not isinstance(content, dict) or not isinstance(content.get("model_state_dict"), dict):
        logger.error("%s is not a Trainer's checkpoint: it has no model_state_dict. Use load_checkpoint().", path)
        return None
    try:
        model.load_state_dict(content["model_state_dict"])
        for optimizer, state in zip(optimizers, content.get("optimizer_state_dict") or []):
            optimizer.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        logger.error("The checkpoint %s does not fit: %s", path, error)
        return None
    clean_parameters(model, "after load")
    return content


@dataclass(frozen=True, slots=True)
class Start:
    """Where a Trainer continues."""

    path: Path
    """The checkpoint."""
    step: int
    """The next step."""
    stage: int
    """The stage in which it was saved, from 0."""


def find_start(run_dir: Path | None, path: str | Path | None, *, num_stages: int) -> Start | None:
    """Return where a Trainer with these stages can continue, by what `read_checkpoint` finds."""
    found = read_checkpoint(run_dir, path)
    if found is None:
        return None
    if "trainer" not in found.state.get("extras", {}):
        raise CheckpointError(f"{found.info.path} was not saved by a Trainer. Resume it with guard.resume().")
    stage = int(found.state["extras"]["trainer"]["stage"])
    if stage >= num_stages:
        raise CheckpointError(
            f"{found.info.path} was saved in stage {stage + 1}, and this training has {num_stages}. "
            "Resume with the same stages."
        )
    return Start(found.info.path, found.step, stage)


def read_checkpoint(run_dir: Path | None, path: str | Path | None) -> Checkpoint | None:
    """Return the run's newest good checkpoint (`latest`), its `best`, or the one at or in `path`; None if none yet."""
    path = None if path == "latest" else path
    if path in (None, "best") and run_dir is None:
        raise UsageError("there is no run directory to resume from. Give the Trainer a run_dir, or a path.")
    if path == "best":
        path = find_best(Path(str(run_dir)) / FOLDER)
    folder = Path(path) if path is not None else Path(str(run_dir))
    folder = folder / FOLDER if path is None or (folder / FOLDER).is_dir() else folder
    is_one = (folder / NAME).is_file()
    store = CheckpointStore(folder.parent if is_one else folder)
    found = store.load(path=folder) if is_one else store.load()
    store.close()
    if found is None and path is not None:
        raise CheckpointError(f"{path} holds no checkpoint. Give a run directory, or one of its checkpoints.")
    return found


def find_best(folder: str | Path) -> Path:
    """Return the checkpoint with the lowest validation loss in a folder."""
    best = None
    if Path(folder).is_dir():
        store = CheckpointStore(Path(folder))
        best = store.best
        store.close()
    if best is None:
        raise UsageError(f"{folder} holds no checkpoint that was evaluated. Resume with latest, or give a checkpoint.")
    return best.path


def append_metrics(run_dir: Path, line: Mapping[str, Any]) -> None:
    """Append one evaluation as a line of `metrics.jsonl`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # Appended, not rewritten: a kill can truncate the last line only
    with (run_dir / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(dict(line)) + "\n")


def load_trained(run_dir: str | Path, model: nn.Module) -> int:
    """Load a run's best weights, or else its newest, averaged if available, into `model`; return their step."""
    store = CheckpointStore(Path(run_dir) / FOLDER)
    best = store.best
    found = store.load(path=best.path) if best is not None else store.load()
    store.close()
    if found is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint. Train first, or give --run-dir.")
    ema: Mapping[str, Any] = found.state.get("extras", {}).get("ema") or {}
    averaged = {name.removeprefix("module."): value for name, value in ema.items() if isinstance(value, Tensor)}
    # n_averaged is AveragedModel's own counter; what it does not average comes from the model
    weights = {**found.state["model"], **{name: value for name, value in averaged.items() if name != "n_averaged"}}
    model.load_state_dict(weights)
    return found.step
