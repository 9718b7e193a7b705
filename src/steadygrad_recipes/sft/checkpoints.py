"""The Trainer's checkpoint folders -> sealed ones, so that it can be checked later whether every file is complete.

The Trainer writes its files one by one to their final place, so a process that is killed meanwhile leaves a folder
that looks like a checkpoint. `SealCheckpoints` writes a list of sizes and CRC-32s after all of them; on resume, a
folder whose seal is missing or does not match is passed over and reported.
"""

# ruff: noqa: ARG002 - the arguments of an event are the Trainer's
from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadygrad.checkpoint.signals import SignalWatch
from steadygrad.disk.write import replace_file, sync_folder
from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad_recipes.stopping import leave

_TrainerCallback: Any = import_extra("transformers", "transformers", what="the recipe sft").TrainerCallback

SEAL = "seal.json"
NAME = re.compile(r"checkpoint-(\d+)$")


class SealCheckpoints(_TrainerCallback):  # type: ignore[misc]
    """Must come after every callback that writes into a checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the checkpoint, now that all of its files are there."""
        if state.is_world_process_zero:
            write_seal(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class StopOnSignal(_TrainerCallback):  # type: ignore[misc]
    """Saves after the step in which a signal came, and ends the process. Must come after SealCheckpoints."""

    def __init__(self, watch: SignalWatch) -> None:
        self._watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the Trainer for a checkpoint."""
        if self._watch.received is not None:
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave, now that it is sealed."""
        if self._watch.received is not None:
            leave()


def write_seal(folder: Path) -> None:
    """Write the seal; everything in the folder is on disk when this returns."""
    files = {}
    for path in _list_files(folder):
        with path.open("rb") as file:
            # Before the seal, which says that all of it is on disk
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, _checksum(path)]
    replace_file(folder / SEAL, json.dumps(files).encode())  # last: without it the folder counts as unfinished
    sync_folder(folder)


def find_damage(folder: Path) -> str | None:
    """Return why the checkpoint cannot be used; None when it can."""
    try:
        content = json.loads((folder / SEAL).read_bytes())
        files = [(name, size, checksum) for name, (size, checksum) in content.items()]
    except FileNotFoundError:
        return "it was never finished"
    except (ValueError, TypeError, AttributeError):  # not JSON, or not what `write_seal` writes
        return f"its {SEAL} is damaged"
    for name, size, checksum in files:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or _checksum(path) != checksum:
            return f"{name} is damaged"
    return None


def find_checkpoint(place: Path, tell: Callable[[str], None]) -> Path:
    """Return the newest complete checkpoint of a run directory or its `checkpoints`, or `place` itself if it is one."""
    if NAME.search(place.name):
        candidates = [place]
    else:
        folder = place / "checkpoints" if (place / "checkpoints").is_dir() else place
        candidates = [path for path in folder.glob("checkpoint-*") if NAME.search(path.name)]
    for path in sorted(candidates, key=_step_of, reverse=True):
        damage = find_damage(path)
        if damage is None:
            return path
        tell(f"{path} is passed over: {damage}.")
    raise UsageError(
        f"no whole checkpoint in {place} ({len(candidates)} looked at). Give the run directory of a training that has "
        "saved one, or start without --resume."
    )


def _step_of(path: Path) -> int:
    found = NAME.search(path.name)
    assert found is not None
    return int(found[1])


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
