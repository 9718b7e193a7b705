"""Ledger: the request of a tuning and what it has tried so far, in one file of its run directory.

Every finished result is written at once and atomically, so a resumed tuning does not repeat it. What another worker
has written meanwhile is kept. The trials of a search are in Optuna's own storage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.guard.rate_curve import RateCurve, restore_curve
from steadygrad.tune.settings import Settings
from steadygrad.tune.trial import TrialResult, from_plain_result, to_plain_result

NAME = "tune.json"


class Ledger:
    """The file and its contents."""

    def __init__(self, run_dir: Path | None, request: Mapping[str, Any], *, resume: bool) -> None:
        """`request` must be unchanged to resume a tuning. Without `run_dir` nothing is written."""
        self._path = None if run_dir is None else run_dir / NAME
        self._content: dict[str, Any] = {"request": dict(request), "range": None, "trials": {}}
        if self._path is not None and self._path.exists():
            self._content = _take_over(self._path, request, resume=resume)

    @property
    def curve(self) -> RateCurve | None:
        """The range test, if it was already made."""
        values = self._content["range"]
        return None if values is None else restore_curve(values)

    def keep_curve(self, curve: RateCurve) -> None:
        """Record the range test."""
        self._content["range"] = curve.to_dict()
        self.write()

    def find_trial(self, settings: Settings, order: int) -> TrialResult | None:
        """Return the result of these settings, if they were tried."""
        values = self._content["trials"].get(_name(settings, order))
        return None if values is None else from_plain_result(values)

    def keep_trial(self, result: TrialResult) -> None:
        """Record a trial."""
        self._content["trials"][_name(result.settings, result.order)] = to_plain_result(result)
        self.write()

    @property
    def trials(self) -> list[TrialResult]:
        """All trials outside the search."""
        return [from_plain_result(values) for values in self._content["trials"].values()]

    def write(self) -> None:
        """Write the file atomically, including what another worker has added to it."""
        if self._path is None:
            return
        if self._path.exists():
            # Not locked: what another worker writes between this read and the rename is lost; a resume tries it again
            held = json.loads(self._path.read_text(encoding="utf-8"))
            self._content["trials"] = {**held["trials"], **self._content["trials"]}
        write_text(self._path, json.dumps(self._content, indent=1, allow_nan=False) + "\n")


def _take_over(path: Path, request: Mapping[str, Any], *, resume: bool) -> dict[str, Any]:
    """Return the contents of a file if its request is the same."""
    if not resume:
        raise UsageError(f"{path.parent} already holds a tuning. Continue it with --resume, or give another --run-dir.")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        before = content["request"]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} cannot be read as a tuning. Move it away, or give another --run-dir.") from None
    wanted = json.loads(json.dumps(request))  # tuples as lists, to be compared with what was read
    for name in wanted:
        if before.get(name) != wanted[name]:
            raise UsageError(
                f"{path.parent} was tuned with {name} {before.get(name)!r}, and now it is {wanted[name]!r}. "
                "Ask for the same, or give another --run-dir."
            )
    return content


def read_steps(run_dir: Path) -> tuple[int, int] | None:
    """Return the steps of the range test and of a trial of the tuning in a folder; None if none is readable."""
    try:
        request = json.loads((run_dir / NAME).read_text(encoding="utf-8"))["request"]
        return int(request["range_steps"]), int(request["trial_steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _name(settings: Settings, order: int) -> str:
    return json.dumps([settings.to_dict(), order])


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file, then rename it; several workers may do so at once."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")  # by process: workers may write at once
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
