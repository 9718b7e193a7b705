"""The large files of one run -> read in parts by several processes, and joined.

Reading a million steps takes one core several seconds, nearly all of it parsing. A worker gets a file and the bytes to
read, from the start of a line to the start of another, and sends back what it made of them: a StepLog or two LayerMaps.
Whatever goes wrong, the caller reads the files itself.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
"""The folder that steadygrad was imported from."""
WORTH_BYTES = 48 << 20
"""Smaller files are read sooner than processes start."""
MAX_PROCESSES = 8
PARTS_EACH = 2
"""Parts for each process, so that one slow part does not hold up the rest."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some lines of a file."""

    path: Path
    start: int
    end: int

    @classmethod
    def split(cls, path: Path, count: int) -> list[Part]:
        """Cut a file into about `count` parts, between two lines; an incomplete last line is in none of them."""
        size = path.stat().st_size
        edges = [0]
        with path.open("rb") as file:
            for i in range(1, count):
                file.seek(max(edges[-1], i * size // count))
                file.readline()  # to the end of the line that the edge fell into
                edges.append(min(file.tell(), size))
            file.seek(max(0, size - (1 << 20)))
            tail = file.read()
        # The last newline, looked for in the last MiB: what follows it may still grow, and is left to the caller
        edges.append(size - (len(tail) - tail.rfind(b"\n") - 1))
        return [cls(path, start, end) for start, end in pairwise(edges) if end > start]


def count_processes() -> int:
    """Return how many processes can run at once."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def read_together(paths: Sequence[Path], max_buckets: int) -> list[list[Any]] | None:
    """Return for each file what its parts hold, in their order; None if that is not worth it, or has failed."""
    sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
    processes = count_processes()
    if sum(sizes) < WORTH_BYTES or processes < 2:
        return None
    counts = [max(1, round(PARTS_EACH * processes * size / sum(sizes))) for size in sizes]
    try:
        parts = [Part.split(path, count) if size else [] for path, count, size in zip(paths, counts, sizes)]
        # The threads only wait, each for a process; multiprocessing would import the user's main module in every one
        with ThreadPoolExecutor(processes) as pool:
            waiting = [[pool.submit(_read_apart, part, max_buckets) for part in several] for several in parts]
            return [[one.result() for one in several] for several in waiting]
    except (OSError, subprocess.SubprocessError, pickle.PickleError, EOFError):
        return None


def _read_apart(part: Part, max_buckets: int) -> Any:
    """Read a part in its own process; what it sends comes from this very program."""
    # -P: modules in the current directory, such as a json.py, must not be run
    command = [sys.executable, "-P", "-c", "from steadygrad.view.read.worker import main; main()"]
    given = [str(part.path), str(part.start), str(part.end), str(max_buckets)]
    # The worker must find the same steadygrad, also where it was put on the path by hand; "." is another folder by now
    paths = os.pathsep.join([*filter(os.path.isabs, sys.path), str(ROOT)])
    done = subprocess.run(
        [*command, *given], check=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    # Unpickles what our own process wrote to a pipe, never a file
    return pickle.loads(done.stdout)
