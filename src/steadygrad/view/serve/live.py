"""LiveRuns: the runs of a folder, read as far as they are written and shared by all viewers.

A run is found by its path inside the folder; a path that would leave it, by dots or by a link, is not found. `describe`
returns what changed since a viewer last asked, so that only new charts are sent to a page.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from steadygrad.record.encode import to_json
from steadygrad.view.read.run import RunReader, find_trainings, is_run
from steadygrad.view.read.tail import as_number
from steadygrad.view.render.charts import describe_charts
from steadygrad.view.render.parts import render_parts
from steadygrad.words import spell_number

T = TypeVar("T")
LIVE_BUCKETS = 1000
"""Fewer than in a report, because they are sent repeatedly."""
SLICE_SECONDS, MAX_SLICE_SECONDS = 0.3, 2.0
"""How long one read may take before something is shown: short at first, then longer, since drawing takes time too."""
MAX_OPEN = 8
"""Number of runs kept in memory; the least recently used one is closed."""


class LiveRun:
    """One run and its current state; safe to use from several threads."""

    def __init__(self, path: Path, root: Path) -> None:
        self._reader = RunReader(path, within=root, max_buckets=LIVE_BUCKETS)
        self._lock = threading.Lock()
        self._pieces: dict[str, str] = {}
        self._slice = SLICE_SECONDS

    def ask(self, question: Callable[[RunReader], T]) -> T:
        """Return what a function says about the run, while no other thread reads on."""
        with self._lock:
            return question(self._reader)

    def look(self) -> dict[str, str]:
        """Read on for a moment; return piece -> its JSON: parts of the page, and parts of the charts."""
        with self._lock:
            changed = self._reader.update(budget_seconds=self._slice)
            self._slice = SLICE_SECONDS if self._reader.progress >= 1 else min(MAX_SLICE_SECONDS, self._slice * 1.6)
            if changed or not self._pieces:
                parts = {f"part:{name}": to_json(html) for name, html in render_parts(self._reader).items()}
                charts = {f"chart:{name}": to_json(value) for name, value in describe_charts(self._reader).items()}
                self._pieces = parts | charts
            self._pieces["progress"] = f"{self._reader.progress:.3f}"
            return dict(self._pieces)


class LiveRuns:
    """The runs of one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._open: OrderedDict[Path, LiveRun] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, name: str) -> LiveRun | None:
        """Return the run at a path inside the folder; None if there is none, or if it is outside."""
        path = resolve_inside(self.root, name)
        if path is None or not is_run(path):
            return None
        with self._lock:
            run = self._open.pop(path, None) or LiveRun(path, self.root)
            self._open[path] = run
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return run

    def list(self) -> list[RunGlance]:
        """Return every run, the most recently written first; the guards of one training stay together."""
        found = [[glance_at(path, self.root) for path in parts] for parts in find_trainings(self.root)]
        found.sort(key=lambda parts: -max(one.written or 0.0 for one in parts))
        return [one for parts in found for one in parts]


@dataclass(frozen=True, kw_only=True)
class RunGlance:
    """What is known about a run from the ends of its files."""

    name: str
    """Its path inside the folder, '.' for the folder itself."""
    last_step: int | None
    loss: str
    num_incident_bytes: int
    written: float | None

    @property
    def is_live(self) -> bool:
        """Whether it was written to in the last minute."""
        return self.written is not None and time.time() - self.written < 60


def glance_at(path: Path, root: Path) -> RunGlance:
    """Read the last step and its loss from the end of steps.jsonl: a list of a hundred runs must appear at once."""
    reader = RunReader(path, within=root)
    last = _read_last_line(path / "steps.jsonl", root)
    step = last.get("step")
    incidents = path / "incidents.jsonl"
    return RunGlance(
        name=path.relative_to(root).as_posix(),
        last_step=step if type(step) is int else None,
        loss=spell_number(as_number(last.get("loss"))),
        num_incident_bytes=incidents.stat().st_size if incidents.is_file() else 0,
        written=reader.written,
    )


def resolve_inside(root: Path, name: str) -> Path | None:
    """Return `root / name` with dots and links resolved, if that is still inside `root`."""
    if "\0" in name:
        return None
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError, ValueError):
        return None
    return path if path.is_relative_to(root) else None


def find_changes(pieces: Mapping[str, str], sent: Mapping[str, str]) -> str | None:
    """Return JSON of the pieces that differ from what was sent; None if none does."""
    changed = {name: text for name, text in pieces.items() if sent.get(name) != text}
    if not changed:
        return None
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in changed.items()) + "}"


def _read_last_line(path: Path, root: Path) -> dict[str, Any]:
    """Return the last complete line that is an object; empty if there is none."""
    if not path.is_file() or not path.resolve().is_relative_to(root):
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 14)))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            return row
    return {}
