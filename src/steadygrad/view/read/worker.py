"""The other side of `together`: reads the part that its arguments name, and writes what it holds to standard output."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from steadygrad.view.read.run import RunReader


def main() -> None:
    """Read `path start end max_buckets`."""
    path, start, end, max_buckets = Path(sys.argv[1]), *map(int, sys.argv[2:])
    reader = RunReader(path.parent, max_buckets=max_buckets)
    tail = reader.open_tail(path)
    tail.skip_to(start)
    feed = reader.feed_of(path)
    before = -1
    while before < tail.offset < end:
        before = tail.offset
        feed(tail.read(end))
    if tail.problem:
        sys.exit(tail.problem)  # the caller then reads the file itself, and has the note
    found = (reader.steps,) if path.name == "steps.jsonl" else (reader.norms, reader.ratios)
    # Standard output is the channel: anything printed here would corrupt the pickle
    sys.stdout.buffer.write(pickle.dumps((found, tail.num_bad, tail.offset)))
