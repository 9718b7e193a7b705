"""RunReader: a run directory, or a bare log of JSON lines -> everything that the views show. Read-only.

`update()` reads what is new, within a time limit, so that a page shows something at once and follows a growing run;
`read_all()` reads to the end. A file that is missing, empty, truncated or corrupt gives a note, never an error: what
can be shown is shown. With `within`, nothing outside that folder is read, wherever links point.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.record.run_folder import find_parts
from steadygrad.view.read.curve import MAX_BUCKETS
from steadygrad.view.read.incident_log import IncidentLog, find_acted, look
from steadygrad.view.read.layer_lines import LayerLine, read_layer_lines
from steadygrad.view.read.layer_map import LayerMap
from steadygrad.view.read.pictures import Pictures, read_pictures
from steadygrad.view.read.rank_log import RankLogs
from steadygrad.view.read.state import State, find_state
from steadygrad.view.read.step_lines import read_step_lines
from steadygrad.view.read.step_log import StepLog
from steadygrad.view.read.tail import Row, Tail, as_number
from steadygrad.view.read.together import read_together
from steadygrad.view.read.validation_log import ValidationLog

FILES = ("steps.jsonl", "layers.jsonl", "incidents.jsonl")
EVALUATIONS = ("metrics.jsonl", "validations.jsonl")
"""Files that exist only if something was evaluated."""
MAX_RUN_BYTES = 64 << 20


class RunReader:
    """One run, as far as it has been read."""

    def __init__(self, path: str | Path, *, within: Path | None = None, max_buckets: int = MAX_BUCKETS) -> None:
        self.path = Path(path)
        self.name = self.path.resolve().name or str(self.path)
        """Name in the views: the folder's name, or more of its path if several runs are shown."""
        self._within, self._max_buckets = within, max_buckets
        names = (None, *FILES[1:]) if self.path.is_file() else (*FILES, *EVALUATIONS)
        self._paths = [self.path if name is None else self.path / name for name in names]
        self._tails = self._open_tails()
        self._about_size = -1
        self._start()

    def _start(self) -> None:
        self.about: dict[str, Any] = {}
        self.steps = StepLog(max_buckets=self._max_buckets)
        self.norms, self.ratios = LayerMap(), LayerMap()
        self.incidents = IncidentLog()
        self.validation = ValidationLog()
        self.ranks = RankLogs(self.path, within=self._within)
        self._about_note = ""
        self._caught_up = False

    # --- reading ----------------------------------------------------------------------------------------------------

    def update(self, *, budget_seconds: float = float("inf")) -> bool:
        """Read what is new, for about `budget_seconds`; return whether anything was."""
        deadline = time.monotonic() + budget_seconds
        self._caught_up = False
        changed = self._read_about()
        self.ranks.find()
        while True:  # at least one round, so that it makes progress however little time there is
            fed = False
            for tail, feed in zip(self._tails, self._feeds):
                before, rows = tail.offset, tail.read()
                # Before feeding: these rows are of another run than what is kept
                if tail.num_restarts:
                    return self._begin_again()
                feed(rows)
                fed = fed or tail.offset > before  # no rows are not the end: all these lines may be corrupt
            # After rank 0's own files, so that what all ranks report is known when theirs is compared
            fed = self.ranks.read() or fed
            if self.ranks.is_replaced:
                return self._begin_again()
            fed = self._take_from_ranks() or fed
            changed = changed or fed
            self._caught_up = not fed
            if not fed or time.monotonic() >= deadline:
                return changed

    def read_all(self) -> RunReader:
        """Read to the end, including the last line if it is complete; large files with every core."""
        self._read_together()
        self.update()
        for tail, feed in zip(self._tails, self._feeds):
            feed(tail.finish())
        self.ranks.read(finish=True)
        self._take_from_ranks(finish=True)
        return self

    def _read_together(self) -> None:
        """Read steps and layers by several processes, if nothing was read yet and they are large enough."""
        tails = self._tails[:2]
        # The workers open the files by themselves, without the check of `within`, so the server never takes this way
        if self.path.is_file() or self._within is not None or any(tail.offset for tail in tails):
            return
        found = read_together([tail.path for tail in tails], self._max_buckets)
        if found is None:
            return
        logs: tuple[list[Any], ...] = [self.steps], [self.norms, self.ratios]
        for tail, mine, parts in zip(tails, logs, found):
            for theirs, num_bad, end in parts:
                for log, part in zip(mine, theirs):
                    log.join(part)
                tail.num_bad += num_bad
                tail.skip_to(end)  # the parts come in order, so the last one's end stays

    def open_tail(self, path: Path) -> Tail:
        """Return the reader of one of its files, from its beginning."""
        return self._open_tails()[self._paths.index(path)]

    def feed_of(self, path: Path) -> Callable[[list[Row]], None]:
        """Return what takes the lines of one of its files."""
        return self._feeds[self._paths.index(path)]

    @property
    def _feeds(self) -> tuple[Callable[[list[Row]], None], ...]:
        """Return the function that takes the lines of each file; a bare log comes without evaluations."""
        own = self.steps.extend, self._feed_layers, self._feed_incidents
        return (*own, self.validation.extend, self.validation.extend_validated)

    def _begin_again(self) -> bool:
        """Start over if a file was replaced: what was read belongs to an earlier run."""
        self._tails = self._open_tails()
        self._start()
        self._about_size = -1
        return True

    def _open_tails(self) -> list[Tail]:
        quick = {0: read_step_lines, 1: read_layer_lines}
        return [Tail(path, within=self._within, quick=quick.get(i)) for i, path in enumerate(self._paths)]

    def _read_about(self) -> bool:
        path = self.path / "run.json"
        tail = Tail(path, within=self._within)
        size = tail.num_bytes
        # The size stands for the content: run.json only changes by what a start or an end adds to it
        if size == self._about_size or not 0 < size <= MAX_RUN_BYTES:
            return False
        self._about_size = size
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        # RecursionError: brackets nested a thousand deep, from a corrupt or hostile file
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is truncated or corrupt"
            self._about_note = f"run.json cannot be read: {why}"
            return True
        self.about = about if isinstance(about, dict) else {}
        self._about_note = "" if self.about else "run.json holds no object"
        return True

    def _feed_layers(self, rows: list[Row] | list[LayerLine]) -> None:
        for row in rows:
            if isinstance(row, LayerLine):
                self.norms.add(row.step, row.names, row.norms)
                continue
            step, table = row.get("step"), row.get("gradients")
            if type(step) is not int or not isinstance(table, dict):
                continue
            self.norms.add(step, list(table), _take_norms(list(table.values())))
            ratios = row.get("update_ratios")
            if isinstance(ratios, dict):
                known = {name: number for name, value in ratios.items() if (number := as_number(value)) is not None}
                self.ratios.add(step, list(known), list(known.values()))

    def _feed_incidents(self, rows: list[Row]) -> None:
        for row in rows:
            self.incidents.add(self.ranks.note(row))

    def _take_from_ranks(self, *, finish: bool = False) -> bool:
        """Add what only one rank reported to the incidents; return whether there was anything."""
        own = self.ranks.release(self.steps.last_step, finish=finish)
        for row in own:
            self.incidents.add(row)
        return bool(own)

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """Share of the bytes read so far; 1 if nothing is left but perhaps an incomplete last line."""
        total = sum(tail.num_bytes for tail in self._tails)
        unread = sum(tail.num_unread_bytes for tail in self._tails)
        return 1.0 if total == 0 or self._caught_up else 1.0 - unread / total

    @property
    def written(self) -> float | None:
        """When one of its files was last written, in seconds since 1970."""
        times = [tail.path.stat().st_mtime for tail in self._tails if tail.exists]
        return max(times, default=None)

    @property
    def state(self) -> State:
        """Whether it goes on, and if not, how it ended."""
        if self.path.is_file():
            return State.UNKNOWN
        silent = None if self.written is None else max(0.0, time.time() - self.written)
        pace = self.steps.seconds / max(1, self.steps.num_steps)
        state = find_state(self.path, self.about, silent_seconds=silent, step_seconds=pace, within=self._within)
        return State.HALTED if self._is_halted and not state.is_open else state

    @property
    def _is_halted(self) -> bool:
        """Whether the policy had the last word; a run that was resumed after a halt has gone on."""
        halt = self.incidents.halt
        return halt is not None and self.steps.last_step <= find_acted(halt) + 1

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the run; empty if unknown."""
        config = self.about.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def pictures(self) -> Pictures:
        """The pictures that the training wrote, read from disk now."""
        return Pictures() if self.path.is_file() else read_pictures(self.path, within=self._within)

    @property
    def clip_threshold(self) -> float | None:
        """The fixed norm at which gradients were clipped; None if there is no single one."""
        clip = self.config.get("clip")
        fixed = look(clip, "kind") == "fixed_norm"
        return as_number(look(clip, "max_norm")) if fixed else None

    @property
    def notes(self) -> list[str]:
        """Sentences about what is missing or could not be read."""
        notes = [self._about_note] if self._about_note else []
        if not self.path.is_file():
            notes += [f"{tail.path.name} is missing" for tail in self._tails[: len(FILES)] if not tail.exists]
            if self._about_size < 0:
                notes.append("run.json is missing")
        for tail in self._tails:
            if tail.problem:
                notes.append(f"{tail.path.name} cannot be read: {tail.problem}")
            if tail.num_bad:
                lines = "line" if tail.num_bad == 1 else "lines"
                notes.append(f"{tail.num_bad} {lines} of {tail.path.name} truncated or corrupt, left out")
        if self.ranks.num_left_out:
            notes.append(f"{self.ranks.num_left_out} files of ranks beyond the first {len(self.ranks)} are not read")
        if self.steps.num_extra_left_out:
            notes.append(f"{self.steps.num_extra_left_out} more numbers of the program are in steps.jsonl, not drawn")
        if self.validation.num_left_out:
            notes.append("more numbers of the evaluations are in metrics.jsonl, not drawn")
        if self.steps.num_returns:
            notes.append(f"the steps go back {self.steps.num_returns} times: the run was resumed from an earlier step")
        return notes


def open_run(path: str | Path, *, max_buckets: int = MAX_BUCKETS) -> RunReader:
    """Open the run that the user named; if there is none, raise an error that says what to name."""
    path = Path(path)
    if path.is_file():
        _check_log(path)
        return RunReader(path, max_buckets=max_buckets)
    if path.is_dir() and is_run(path):
        return RunReader(path, max_buckets=max_buckets)
    if path.is_dir():
        runs = [str(one) for one in find_runs(path)]
        inside = f"It holds runs: {', '.join(runs[:5])}. Name one of them." if runs else "Name a run directory."
        raise UsageError(f"{path} is not a run directory: it has neither run.json nor steps.jsonl. {inside}")
    what = "a run directory, which holds steps.jsonl, or a file of JSON lines"
    raise UsageError(f"There is no file or folder {path}. Name {what}.")


def _check_log(path: Path) -> None:
    """Refuse a file that does not begin with JSON, named by mistake; an empty one may still be written to."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start and not start.startswith(b"{"):
        raise UsageError(
            f"{path} is not a file of JSON lines: it begins with {start[:12]!r}. Name a run directory, or a log with a "
            'line such as {"loss": 1.5} for each step.'
        )


def is_run(path: Path) -> bool:
    """Return whether a folder looks like a run directory."""
    return any((path / name).is_file() for name in ("run.json", *FILES))


def list_parts(path: Path) -> list[Path]:
    """Return a run directory and those inside it of further guards of the same training; otherwise just `path`."""
    parts = [part for part in find_parts(path) if is_run(part)] if path.is_dir() else []
    return [path, *parts] if not parts or is_run(path) else parts


def find_runs(root: Path, *, max_depth: int = 3) -> list[Path]:
    """Return the run directories in `root`, including itself; links to folders are not followed."""
    return [part for parts in find_trainings(root, max_depth=max_depth) for part in parts]


def find_trainings(root: Path, *, max_depth: int = 3) -> list[list[Path]]:
    """Return the run directories grouped by training, such as the two guards of a GAN."""
    if is_run(root) or any(map(is_run, find_parts(root))):
        return [list_parts(root)]
    if max_depth == 0:
        return []
    try:
        # A link could lead out of the folder, or back into it without an end
        folders = sorted(one for one in root.iterdir() if one.is_dir() and not one.is_symlink())
    except OSError:
        return []
    return [parts for folder in folders for parts in find_trainings(folder, max_depth=max_depth - 1)]


def _take_norms(table: list[Any]) -> list[float]:
    """Return each parameter's norm, quickly if all are as the recorder writes them and none was bad."""
    try:
        norms = [cells[0] for cells in table]
        bad = any(cells[2] for cells in table)
    except (TypeError, LookupError):
        bad = True
    if not bad and set(map(type, norms)) == {float}:  # an int or a word takes the slow way
        return norms
    return [_norm_of(cells) for cells in table]


def _norm_of(cells: object) -> float:
    """Return the norm from [norm, max_abs, num_nonfinite, zero_share]; NaN if the gradient was not finite."""
    if not isinstance(cells, list) or not cells:
        return float("nan")
    norm = cells[0] if type(cells[0]) is float else as_number(cells[0])
    bad = len(cells) > 2 and cells[2] != 0
    return float("nan") if norm is None or bad else norm
