"""A folder of runs -> one line about each, from the ends of their files: a list of a hundred must appear at once."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.view.read.run import FILES, MAX_RUN_BYTES, find_trainings
from steadygrad.view.read.state import State, find_state
from steadygrad.view.read.tail import as_number, parse_line

END_BYTES = 1 << 14
"""How much of the end of steps.jsonl is read; some fifty steps."""
MAX_COUNTED_BYTES = 32 << 20
"""Incidents are counted up to this size of their file."""


@dataclass(frozen=True, kw_only=True)
class RunGlance:
    """What is known about a run without reading it."""

    name: str
    """Its path inside the folder, '.' for the folder itself."""
    state: State
    last_step: int | None
    loss: float | None
    """Loss of the last step; NaN and Inf as they were."""
    num_incidents: int
    written: float | None
    """When one of its files was last written, in seconds since 1970."""


def list_glances(root: Path) -> list[RunGlance]:
    """Return every run, the most recently written first; the guards of one training stay together."""
    found = [[glance_at(path, root) for path in parts] for parts in find_trainings(root)]
    found.sort(key=lambda parts: -max(one.written or 0.0 for one in parts))
    return [one for parts in found for one in parts]


SORTS: dict[str, Callable[[RunGlance], Any]] = {
    "written": lambda one: -(one.written or 0.0),
    "name": lambda one: one.name,
    "loss": lambda one: math.inf if one.loss is None or math.isnan(one.loss) else one.loss,
    "steps": lambda one: -(one.last_step or 0),
    "state": lambda one: list(State).index(one.state),
}
"""Name -> key by which a list of runs is sorted."""


def glance_at(path: Path, root: Path) -> RunGlance:
    """Look at the ends of the files of one run; nothing outside `root` is read, wherever links point."""
    times = [found.st_mtime for name in FILES if (found := _stat(path / name, root)) is not None]
    written = max(times, default=None)
    rows = _read_end(path / "steps.jsonl", root)
    last = rows[-1] if rows else {}
    step, about = last.get("step"), _read_about(path, root)
    silent = None if written is None else max(0.0, time.time() - written)
    return RunGlance(
        name=path.relative_to(root).as_posix(),
        state=find_state(path, about, silent_seconds=silent, step_seconds=_find_pace(rows), within=root),
        last_step=step if type(step) is int else None,
        loss=as_number(last.get("loss")),
        num_incidents=_count_lines(path / "incidents.jsonl", root),
        written=written,
    )


def _stat(path: Path, root: Path) -> Any:
    try:
        # `root` must be resolved already. A link inside the folder may point anywhere on the disk
        inside = path.is_file() and path.resolve().is_relative_to(root)
        return path.stat() if inside else None
    except OSError:
        return None


def _read_about(path: Path, root: Path) -> dict[str, Any]:
    found = _stat(path / "run.json", root)
    if found is None or found.st_size > MAX_RUN_BYTES:
        return {}
    try:
        about = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}


def _read_end(path: Path, root: Path) -> list[dict[str, Any]]:
    """Return the objects of the last complete lines."""
    found = _stat(path, root)
    if found is None:
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, found.st_size - END_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is still being written
    except OSError:
        return []
    # The first line is usually cut in the middle
    return [row for line in lines if (row := parse_line(line)) is not None]


def _find_pace(rows: list[dict[str, Any]]) -> float:
    """Return seconds per step, from the lines at the end of the file; 0 if unknown."""
    times = [number for row in rows if (number := as_number(row.get("time_seconds"))) is not None]
    return max(0.0, (times[-1] - times[0]) / (len(times) - 1)) if len(times) > 1 else 0.0


def _count_lines(path: Path, root: Path) -> int:
    if _stat(path, root) is None:
        return 0
    try:
        with path.open("rb") as file:
            return file.read(MAX_COUNTED_BYTES).count(b"\n")
    except OSError:
        return 0
