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
from pathlib import Path
from typing import TypeVar

from steadygrad.record.encode import to_json
from steadygrad.view.read.glance import RunGlance, list_glances
from steadygrad.view.read.run import RunReader, is_run
from steadygrad.view.read.state import State
from steadygrad.view.render.charts import describe_charts
from steadygrad.view.render.parts import render_parts

T = TypeVar("T")
LIVE_BUCKETS = 1000
"""Fewer than in a report, because they are sent repeatedly."""
COMPARED_BUCKETS = 400
"""Fewer again where many runs are compared."""
SLICE_SECONDS, MAX_SLICE_SECONDS = 0.3, 2.0
"""How long one read may take before something is shown: short at first, then longer, since drawing takes time too."""
MAX_OPEN = 8
"""Number of runs kept in memory; the least recently used one is closed."""
LIST_SECONDS = 1.0
"""How long a list of the runs is good for."""
KEY = "run0"
"""Key of the run on a page of one run."""


class LiveRun:
    """One run and its current state; safe to use from several threads."""

    def __init__(self, path: Path, root: Path) -> None:
        self._reader = RunReader(path, within=root, max_buckets=LIVE_BUCKETS)
        self._lock = threading.Lock()
        self._pieces: dict[str, str] = {}
        self._slice = SLICE_SECONDS
        self._state: State | None = None

    def ask(self, question: Callable[[RunReader], T]) -> T:
        """Call a function on the run while no other thread reads it; return its result."""
        with self._lock:
            return question(self._reader)

    def look(self) -> dict[str, str]:
        """Read on for a moment; return piece -> its JSON: parts of the page, and parts of the charts."""
        with self._lock:
            changed = self._reader.update(budget_seconds=self._slice)
            self._slice = SLICE_SECONDS if self._reader.progress >= 1 else min(MAX_SLICE_SECONDS, self._slice * 1.6)
            if changed or not self._pieces:
                parts = {f"part:{name}": to_json(html) for name, html in render_parts(self._reader, KEY).items()}
                self._pieces = parts | describe_pieces(self._reader, KEY)
            # After the parts: a new state replaces their headline
            self._pieces |= self._find_state()
            self._pieces["progress"] = f"{self._reader.progress:.3f}"
            return dict(self._pieces)

    def _find_state(self) -> dict[str, str]:
        """Return the headline again: a process that is gone, or silent, changes it without writing a line."""
        state = self._reader.state
        if state is self._state:
            return {}
        self._state = state
        return {"part:headline": to_json(render_parts(self._reader, KEY)["headline"])}


class LiveRuns:
    """The runs of one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._open: OrderedDict[Path, LiveRun] = OrderedDict()
        self._lock = threading.Lock()
        # Its own lock: listing a slow disk takes seconds and must not hold up an open page
        self._list_lock, self._list_until = threading.Lock(), 0.0
        self._listed: list[RunGlance] = []

    def find(self, name: str) -> LiveRun | None:
        """Return the run at a path inside the folder; None if there is none, or if it is outside."""
        path = resolve_inside(self.root, name)
        if path is None or not is_run(path):
            return None
        with self._lock:
            run = self._open.pop(path, None) or LiveRun(path, self.root)
            self._open[path] = run
            while len(self._open) > MAX_OPEN:
                # Streams that follow the closed one keep their own reference, and go on
                self._open.popitem(last=False)
        return run

    def open_apart(self, name: str) -> RunReader | None:
        """Return a reader of a run for one comparison, with coarser curves; None as for `find`."""
        path = resolve_inside(self.root, name)
        if path is None or not is_run(path):
            return None
        reader = RunReader(path, within=self.root, max_buckets=COMPARED_BUCKETS)
        reader.name = name
        return reader

    def list(self) -> list[RunGlance]:
        """Return every run; what was seen a moment ago is shared by all viewers."""
        with self._list_lock:
            if time.monotonic() >= self._list_until:
                start = time.monotonic()
                self._listed = list_glances(self.root)
                took = time.monotonic() - start
                self._list_until = time.monotonic() + max(LIST_SECONDS, 4 * took)  # at most a fifth of a core
            return self._listed  # replaced as a whole and never changed, so it may be shared


def describe_pieces(reader: RunReader, key: str) -> dict[str, str]:
    """Return piece -> JSON for the charts of a run, so that only those that changed are sent."""
    return {f"chart:{key}:{name}": to_json(value) for name, value in describe_charts(reader).items()}


def resolve_inside(root: Path, name: str) -> Path | None:
    """Return `root / name` with dots and links resolved, if that is still inside `root`."""
    if "\0" in name:
        return None
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError, ValueError):
        return None
    # After resolving: `..` and links are gone, so that the comparison is about the real place
    return path if path.is_relative_to(root) else None


def find_changes(pieces: Mapping[str, str], sent: Mapping[str, str]) -> str | None:
    """Return JSON of the pieces that differ from what was sent; None if none does."""
    changed = {name: text for name, text in pieces.items() if sent.get(name) != text}
    if not changed:
        return None
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in changed.items()) + "}"
