"""LiveComparison: several runs of a folder, read on together -> the pieces of the page that compares them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from steadygrad.record.encode import to_json
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.about import render_comparison
from steadygrad.view.render.html import Html
from steadygrad.view.serve.live import describe_pieces

SLICE_SECONDS = 1.0
"""How long all runs together may be read before something is shown."""


class LiveComparison:
    """Some runs by name, and what of them has changed; it keeps their curves and no maps of layers in its pieces."""

    def __init__(self, readers: Mapping[str, RunReader]) -> None:
        self._readers = dict(readers)
        self._lock = threading.Lock()
        self._pieces: dict[str, str] = {}

    def read_on(self) -> list[RunReader]:
        """Read every run on for a moment, and return them."""
        with self._lock:
            self._read()
            return list(self._readers.values())

    def look(self) -> dict[str, str]:
        """Read on; return piece -> its JSON: the table, and the curves of each run."""
        with self._lock:
            for i in self._read():
                reader = list(self._readers.values())[i]
                pieces = describe_pieces(reader, f"run{i}")
                self._pieces |= {name: text for name, text in pieces.items() if name.rpartition(":")[2] in KEPT}
            readers, names = list(self._readers.values()), list(self._readers)
            self._pieces["part:comparison"] = to_json(render_compared(readers, names))
            self._pieces["progress"] = f"{min(reader.progress for reader in readers):.3f}"
            return dict(self._pieces)

    def _read(self) -> list[int]:
        """Read each run for its share of the time; return which have changed, all of them at first."""
        deadline = time.monotonic() + SLICE_SECONDS
        changed = []
        for i, reader in enumerate(self._readers.values()):
            left = (deadline - time.monotonic()) / (len(self._readers) - i)
            if reader.update(budget_seconds=max(0.0, left)) or f"chart:run{i}:name" not in self._pieces:
                changed.append(i)
        return changed


KEPT = ("name", "curves", "validation", "last_step", "clock", "marks", "shares")
"""What the charts of several runs need."""


def render_compared(readers: Sequence[RunReader], names: Sequence[str]) -> Html:
    """Render the table of several runs, each with a link to its own page."""
    keys = [f"run{i}" for i in range(len(readers))]
    return render_comparison(readers, keys, [f"/runs/{quote(name)}" for name in names])
