"""The record of a run that goes on from an earlier step -> the same record without the steps that come again.

Steps after the checkpoint were written down by a process that is no more, and will be made again: each must stand in
the ledger once. Whole lines are cut from the end of the files whose lines come in the order of steps; incidents and
the log stay, they tell what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

LEDGERS = ("steps.jsonl", "layers.jsonl")


def rewind_ledger(run_dir: Path, step: int) -> None:
    """Leave out what was written about `step` and later ones. A ledger that cannot be changed is left as it is."""
    for name in LEDGERS:
        with contextlib.suppress(OSError):
            path = run_dir / name
            keep = _find_end(path, step)
            if keep < path.stat().st_size:
                os.truncate(path, keep)


def _find_end(path: Path, step: int) -> int:
    """Where the first line about `step` or a later one begins. Lines that a crash has cut count as none."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                if json.loads(line)["step"] >= step:
                    return end
            except (ValueError, KeyError, TypeError):
                pass
            end += len(line)
    return end
