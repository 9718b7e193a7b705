"""RunDirectory: the files of one run.

`run.json` (config, versions, machine, parameter names), `steps.jsonl`, `layers.jsonl`, `incidents.jsonl` (on disk
before the call returns), `validations.jsonl` if any were reported, and `train.log`, the same events as greppable text.
Existing files are continued, never overwritten: later starts are listed in `run.json` under `resumed`. Each start says
under `ended` when and how it ended; one that was killed says nothing. A directory that disappears during a training is
created again, and that is reported. Only the process that opened it writes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from steadygrad._version import __version__
from steadygrad.config import GuardConfig
from steadygrad.errors import ConfigError, TrainingHalted
from steadygrad.facts import GradientTable, Incident, Severity, StepRecord
from steadygrad.record.encode import take_fields, to_json
from steadygrad.record.sink import Sink


class RunDirectory(Sink):
    """A Sink that writes files."""

    FLUSH_EVERY = 50
    """Most steps to hold back; incidents are never held back."""
    FLUSH_SECONDS = 1.0
    """Longest time that a line waits for the next step to be written: a slow run must not look stalled."""

    def __init__(
        self,
        path: str | Path,
        *,
        config: Mapping[str, Any],
        parameters: Sequence[str],
        versions: Mapping[str, str],
        run_id: str = "",
        opens: bool = True,
    ) -> None:
        """`opens=False`: everything before `open()` is held in memory, and no file is touched."""
        self.path = Path(path)
        self.run_id = run_id
        self._start = _describe_start(config, parameters, versions)
        self._process = os.getpid()
        self._waiting: list[StepRecord] = []
        self._flushed_at = time.monotonic()
        self._held: list[Callable[[], None]] | None = []
        self._problems: list[str] = []
        self._validations: TextIO | None = None
        self._files = contextlib.ExitStack()
        if opens:
            self.open()

    def open(self, path: Path | None = None, run_id: str | None = None) -> None:
        """Open the files and write what was held in memory."""
        self.path = self.path if path is None else path
        self.run_id = self.run_id if run_id is None else run_id
        try:
            self._open_files()
        except OSError as error:
            raise ConfigError(
                f"run_dir cannot be used as a folder to write to: {error.strerror or error} ({self.path}). "
                "Use a new folder, or that of an earlier run to continue it."
            ) from error
        # None before the calls are made: each of them asks `_hold` again.
        held, self._held = self._held or [], None
        for write in held:
            write()
        flush_at_fork(self)

    def abandon(self, problem: str) -> None:
        """Write nothing from now on, because the record of another run could not be moved out of the way."""
        self._held, self._process = None, -1  # no process has this id: every write is dropped, as in a forked child
        self._problems.append(problem)

    def _open_files(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # If one cannot be opened, those before it are closed; pop_all keeps them open when all is well.
        with contextlib.ExitStack() as files:
            self._steps, self._layers, self._incidents, self._log = (
                files.enter_context(open_to_append(self.path / name))
                for name in ("steps.jsonl", "layers.jsonl", "incidents.jsonl", "train.log")
            )
            self._write_run(self._start)
            self._files = files.pop_all()
        self._device = self.path.stat().st_dev
        self._validations = None

    def _hold(self, write: Callable[[], None]) -> bool:
        """Keep a call for later while the place to write is unknown; drop it in a forked child."""
        if self._held is not None:
            self._held.append(write)
        return self._held is not None or os.getpid() != self._process

    def _write_run(self, start: Mapping[str, Any]) -> None:
        """Write run.json: the first start is its content, later ones are added under `resumed`. Renamed into place."""
        earlier = _read_run(self.path / "run.json")
        run = dict(start) if earlier is None else {**earlier, "resumed": [*earlier.get("resumed", []), start]}
        if self.run_id:
            run["id"] = self.run_id
        self._replace_run(run)

    def _replace_run(self, run: Mapping[str, Any]) -> None:
        # Readers (`steadygrad watch`, the live page) must never see half of it.
        aside = self.path / "run.json.tmp"
        aside.write_text(to_json(run) + "\n", encoding="utf-8")
        aside.replace(self.path / "run.json")

    def write_step(self, record: StepRecord) -> None:
        """Write a line to steps.jsonl and train.log."""
        if self._hold(lambda: self.write_step(record)):
            return
        # Hot: runs each step. The record is formatted at the next flush; it is frozen, so it may wait.
        self._waiting.append(record)
        is_due = len(self._waiting) >= self.FLUSH_EVERY or time.monotonic() - self._flushed_at >= self.FLUSH_SECONDS
        if record.skipped or is_due:
            self.flush()

    def _format_waiting(self) -> None:
        """Write the lines of the steps since the last flush: fifty in a row cost half of one after each step."""
        waiting, self._waiting = self._waiting, []
        lines = [take_fields(record) for record in waiting]
        for line in lines:
            if not line["extra"]:
                del line["extra"]
        self._steps.write("".join(map(self._sign, lines)))
        self._log.write("".join(map(_spell_step, waiting)))

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """Write a line to layers.jsonl: `gradients`, name -> [norm, max_abs, num_nonfinite, zero_share].

        If they were measured, also `update_ratios`: name -> norm of the update / norm of the weight.
        """
        if self._hold(lambda: self.write_layers(step, gradients, update_ratios)):
            return
        rows = {
            name: [stats.norm, stats.max_abs, stats.num_nonfinite, round(stats.zero_share, 6)]
            for name, stats in gradients.items()
        }
        ratios = {} if update_ratios is None else {"update_ratios": update_ratios}
        self._layers.write(self._sign({"step": step, "gradients": rows, **ratios}))

    def write_incident(self, incident: Incident) -> None:
        """Write a line to incidents.jsonl and train.log, on disk when this returns."""
        if self._hold(lambda: self.write_incident(incident)):
            return
        self._reopen_if_lost()
        self._format_waiting()  # train.log is in the order of events
        self._incidents.write(self._sign(take_fields(incident)))
        finding, verdict = incident.finding, incident.verdict
        level = "ERROR" if finding.severity.rank >= Severity.ERROR.rank else finding.severity.value.upper()
        noticed = f" noticed_at={finding.noticed_at}" if finding.noticed_at not in (None, finding.step) else ""
        acted = f" acted_at={finding.acted_at}" if finding.acted_at not in (None, finding.step) else ""
        also = "".join(f"; also {other.kind}: {other.message}" for other in incident.also)
        self._log.write(
            f"{level} step={finding.step}{noticed}{acted} {finding.kind}: {finding.message}{also} | "
            f"action={verdict.action}: {incident.outcome.message} | {finding.advice}\n"
        )
        self.flush()
        # flush() survives the death of the process, fsync that of the machine. Rare enough to wait for the disk.
        os.fsync(self._incidents.fileno())

    def write_validation(self, step: int, epoch: int, loss: float) -> None:
        """Write a line to validations.jsonl and train.log; the first one creates the file."""
        if self._hold(lambda: self.write_validation(step, epoch, loss)):
            return
        self._reopen_if_lost()
        self._format_waiting()
        if self._validations is None:
            self._validations = self._files.enter_context(open_to_append(self.path / "validations.jsonl"))
        self._validations.write(self._sign({"step": step, "epoch": epoch, "loss": loss}))
        self._validations.flush()
        self._log.write(f"validation step={step} epoch={epoch} loss={_spell(loss)}\n")
        self.flush()

    def _sign(self, line: Mapping[str, Any]) -> str:
        """Return a line of JSON that names its run."""
        return to_json({**line, "run": self.run_id} if self.run_id else line) + "\n"

    def flush(self) -> None:
        """Pass buffered lines to the operating system, so that they survive if this process is killed."""
        if self._held is not None or os.getpid() != self._process:
            return
        self._reopen_if_lost()
        self._format_waiting()
        for file in (self._steps, self._layers, self._incidents, self._log):
            file.flush()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flush and close every file, even if one of them fails; raise that error afterwards."""
        is_open = self in _flushed_at_fork
        _flushed_at_fork.discard(self)
        # A forked child must not write the end of its parent's run, nor its buffers.
        if os.getpid() != self._process or self._held is not None:
            return
        if is_open:
            with contextlib.suppress(OSError):  # what matters is in the other files
                self._write_end()
            with self._files:  # closed even if a write fails, for example on a full disk
                self._format_waiting()
        self._files.close()

    def _write_end(self) -> None:
        """Write into run.json that this start has ended, and how."""
        run = _read_run(self.path / "run.json")
        if run is not None:
            starts = [run, *(one for one in run.get("resumed", []) if isinstance(one, dict))]
            starts[-1]["ended"] = _describe_end()
            self._replace_run(run)

    # --- a directory that is lost -----------------------------------------------------------------------------------

    def take_problems(self) -> list[str]:
        """Return what went wrong and was repaired since the last call."""
        problems, self._problems = self._problems, []
        return problems

    def _reopen_if_lost(self) -> None:
        """Recreate the directory if it was deleted: writes to a deleted file succeed, and are lost."""
        path = self.path / "steps.jsonl"
        try:
            # Two system calls for each flush, not for each step.
            if os.path.samestat(os.fstat(self._steps.fileno()), path.stat()):
                return
        except FileNotFoundError:
            pass
        # Raises on another disk: the Recorder then reports it and switches this sink off.
        require_device(self.path, self._device)
        # What is buffered belongs to files without a name; flushing them may fail, for example on a stale handle.
        with contextlib.suppress(OSError):
            self._files.close()
        self._open_files()
        self._problems.append(
            f"{self.path} was deleted during training and has been created again; its record begins here"
        )


def make_record(
    path: Path, config: GuardConfig, names: Sequence[str], *, run_id: str = "", opens: bool = True
) -> RunDirectory:
    """Create the record of a training in this process, whose parameters are `names`."""
    import torch  # imported here, because reading a record does not need torch

    versions = {"steadygrad": __version__, "torch": torch.__version__}
    return RunDirectory(path, config=config.to_dict(), parameters=names, versions=versions, run_id=run_id, opens=opens)


def require_device(path: Path, device: int) -> None:
    """Raise OSError unless `path` is still on the same disk: never write beneath an unmounted one."""
    above = next(one for one in (path, *path.parents) if one.exists())
    if above.stat().st_dev != device:
        raise OSError(f"{path} is gone, and so is the disk that it was on")


_flushed_at_fork: weakref.WeakSet[Sink] = weakref.WeakSet()


def flush_at_fork(sink: Sink) -> None:
    """Flush it before each fork: a child inherits the buffers, and would write them again when it ends."""
    _flushed_at_fork.add(sink)


def _flush_before_fork() -> None:
    for sink in list(_flushed_at_fork):
        with contextlib.suppress(OSError, ValueError):  # ValueError: closed meanwhile. A fork must not fail for it
            sink.flush()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_flush_before_fork)


def _describe_start(
    config: Mapping[str, Any], parameters: Sequence[str], versions: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "process": os.getpid(),
        "config": config,
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"system": _name_system(), "processor": platform.machine(), "num_cpus": os.cpu_count()},
        "parameters": list(parameters),
    }


def _name_system() -> str:
    """Return 'Linux-6.1.0-x86_64'. `platform.platform()` starts a process for it, and after each start of a process
    Python prints the program's warnings once more."""
    found = platform.uname()
    return f"{found.system}-{found.release}-{found.machine}"


def _describe_end() -> dict[str, str]:
    """Return when a start ended, and how: by itself, by a halt, by Ctrl-C or a signal, or by an error."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # Set while close() runs in an `except`, a `finally` or the __exit__ that an exception leaves through.
    error = sys.exc_info()[1]
    if error is None and not threading.main_thread().is_alive():  # at exit: an error that nothing caught
        error = getattr(sys, "last_value", None)
    if error is None:
        return {"time": when, "how": "finished"}
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return {"time": when, "how": "stopped"}
    how = "halted" if isinstance(error, TrainingHalted) else "failed"
    return {"time": when, "how": how, "error": f"{type(error).__name__}: {error}"[:500]}


def _read_run(path: Path) -> dict[str, Any] | None:
    """Return the run.json of an earlier start; an unreadable one is moved aside, never overwritten."""
    if not path.exists():
        return None
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # not JSON, or not UTF-8
        run = None
    if isinstance(run, dict) and isinstance(run.get("resumed", []), list):
        return run
    path.replace(path.with_name("run-unreadable.json"))
    return None


def open_to_append(path: Path) -> TextIO:
    """Open for appending; first terminate a partial line left by a crash, so that it corrupts no other."""
    cut_short = path.exists() and _last_byte(path) not in (b"", b"\n")
    file = path.open("a", encoding="utf-8")
    if cut_short:
        file.write("\n")
    return file


def _last_byte(path: Path) -> bytes:
    size = path.stat().st_size  # 0 for a device file, which is not read
    if size == 0:
        return b""
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1)


def _spell_step(record: StepRecord) -> str:
    """Return a step as a line of train.log."""
    loss = "-" if record.loss is None else _spell(record.loss)
    state = " skipped" if record.skipped else _format_clipping(record)
    rates = ",".join(f"{rate:.6g}" for rate in record.learning_rates)
    logged = "".join(f" {name}={_spell(number)}" for name, number in record.extra.items()) if record.extra else ""
    return f"step={record.step} loss={loss} grad_norm={_spell(record.grad_norm)} lr={rates}{state}{logged}\n"


def _format_clipping(record: StepRecord) -> str:
    """Format the coefficient, and the norm after clipping; nothing for a step that was not clipped."""
    if not record.clipped:
        return ""
    after = record.grad_norm * record.clip_coefficient
    return f" clipped={record.clip_coefficient:.4g} grad_norm_after={_spell(after)}"


def _spell(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value).replace("nan", "NaN").replace("inf", "Inf")
