"""RunDirectory: the files of one run.

`run.json` (config, versions, machine, parameter names), `steps.jsonl`, `layers.jsonl`, `incidents.jsonl` (on disk
before the call returns), `validations.jsonl` where any were told, and `train.log`, the same events as greppable text. A
directory that already holds a run is continued, never overwritten: later starts stand in `run.json` under `resumed`.
Nothing is written outside it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from steadygrad.errors import ConfigError
from steadygrad.facts import GradientTable, Incident, Severity, StepRecord
from steadygrad.record.encode import to_json, to_plain


class RunDirectory:
    """A Sink that writes files."""

    FLUSH_EVERY = 50
    """Step lines held back at most; incidents are never held back."""

    def __init__(
        self, path: str | Path, *, config: Mapping[str, Any], parameters: Sequence[str], versions: Mapping[str, str]
    ) -> None:
        self.path = Path(path)
        self._unflushed = 0
        self._validations: TextIO | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as files:
                self._steps, self._layers, self._incidents, self._log = (
                    files.enter_context(open_to_append(self.path / name))
                    for name in ("steps.jsonl", "layers.jsonl", "incidents.jsonl", "train.log")
                )
                self._write_run(_describe_start(config, parameters, versions))
                self._files = files.pop_all()
        except OSError as error:
            raise ConfigError(
                f"run_dir cannot be used as a folder to write to: {error.strerror or error} ({self.path}). "
                "Give a new folder, or that of an earlier run to continue it."
            ) from error

    def _write_run(self, start: Mapping[str, Any]) -> None:
        """The first start is the file; each later one is added under `resumed`. Written aside, then renamed."""
        target = self.path / "run.json"
        aside = self.path / "run.json.tmp"
        earlier = _read_run(target)
        run = start if earlier is None else {**earlier, "resumed": [*earlier.get("resumed", []), start]}
        aside.write_text(to_json(run) + "\n", encoding="utf-8")
        aside.replace(target)

    def write_step(self, record: StepRecord) -> None:
        """A line of steps.jsonl and of train.log."""
        line = to_plain(record)
        if not line["extra"]:
            del line["extra"]
        self._steps.write(to_json(line) + "\n")
        loss = "-" if record.loss is None else f"{_spell(record.loss)}"
        state = " skipped" if record.skipped else f" clipped={record.clip_coefficient:.4g}" if record.clipped else ""
        rates = ",".join(f"{rate:.6g}" for rate in record.learning_rates)
        told = "".join(f" {name}={_spell(number)}" for name, number in record.extra.items())
        self._log.write(
            f"step={record.step} loss={loss} grad_norm={_spell(record.grad_norm)} lr={rates}{state}{told}\n"
        )
        self._unflushed += 1
        if record.skipped or self._unflushed >= self.FLUSH_EVERY:
            self.flush()

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        """A line of layers.jsonl: `gradients`, name -> [norm, max_abs, num_nonfinite, zero_share].

        Where they were measured, also `update_ratios`: name -> norm of the update / norm of the weight.
        """
        rows = {
            name: [stats.norm, stats.max_abs, stats.num_nonfinite, round(stats.zero_share, 6)]
            for name, stats in gradients.items()
        }
        ratios = {} if update_ratios is None else {"update_ratios": update_ratios}
        self._layers.write(to_json({"step": step, "gradients": rows, **ratios}) + "\n")

    def write_incident(self, incident: Incident) -> None:
        """A line of incidents.jsonl and of train.log, on disk when this returns."""
        self._incidents.write(to_json(incident) + "\n")
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
        os.fsync(self._incidents.fileno())

    def write_validation(self, step: int, epoch: int, loss: float) -> None:
        """A line of validations.jsonl and of train.log; the file is there from the first one on."""
        if self._validations is None:
            self._validations = self._files.enter_context(open_to_append(self.path / "validations.jsonl"))
        self._validations.write(to_json({"step": step, "epoch": epoch, "loss": loss}) + "\n")
        self._validations.flush()
        self._log.write(f"validation step={step} epoch={epoch} loss={_spell(loss)}\n")
        self.flush()

    def flush(self) -> None:
        """Give what is held back to the system: a process that is killed from now on has left it."""
        for file in (self._steps, self._layers, self._incidents, self._log):
            file.flush()
        self._unflushed = 0

    def close(self) -> None:
        """Write what is held back and close every file, also when one of them fails; that error is raised after."""
        self._files.close()


def _describe_start(
    config: Mapping[str, Any], parameters: Sequence[str], versions: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "process": os.getpid(),
        "config": config,
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "num_cpus": os.cpu_count()},
        "parameters": list(parameters),
    }


def _read_run(path: Path) -> dict[str, Any] | None:
    """The run.json of an earlier start; one that is not ours to read is moved aside, never overwritten."""
    if not path.exists():
        return None
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no UTF-8
        run = None
    if isinstance(run, dict) and isinstance(run.get("resumed", []), list):
        return run
    path.replace(path.with_name("run-unreadable.json"))
    return None


def open_to_append(path: Path) -> TextIO:
    """Open for appending; a half line that a crash has left is ended first, so that it spoils no other."""
    cut_short = path.exists() and _last_byte(path) not in (b"", b"\n")
    file = path.open("a", encoding="utf-8")
    if cut_short:
        file.write("\n")
    return file


def _last_byte(path: Path) -> bytes:
    size = path.stat().st_size  # 0 for a device, which is not read
    if size == 0:
        return b""
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1)


def _spell(value: float) -> str:
    return f"{value:.6g}".replace("nan", "NaN").replace("inf", "Inf")
