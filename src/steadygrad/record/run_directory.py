"""RunDirectory: the files of one run.

`run.json` (config, versions, machine, parameter names), `steps.jsonl`, `layers.jsonl`, `incidents.jsonl` (on disk
before the call returns) and `train.log`, the same events as greppable text. A directory that already holds a run is
continued, never overwritten. Nothing is written outside it.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from steadygrad.facts import GradientTable, Incident, Severity, StepRecord
from steadygrad.record.encode import to_json


class RunDirectory:
    """A Sink that writes files."""

    FLUSH_EVERY = 50
    """Step lines held back at most; incidents are never held back."""

    def __init__(
        self, path: str | Path, *, config: Mapping[str, Any], parameters: Sequence[str], versions: Mapping[str, str]
    ) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._steps = self._open("steps.jsonl")
        self._layers = self._open("layers.jsonl")
        self._incidents = self._open("incidents.jsonl")
        self._log = self._open("train.log")
        self._unflushed = 0
        self._write_run(config, parameters, versions)

    def _open(self, name: str) -> TextIO:
        return (self.path / name).open("a", encoding="utf-8")

    def _write_run(self, config: Mapping[str, Any], parameters: Sequence[str], versions: Mapping[str, str]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        run = {
            "started": now,
            "config": config,
            "versions": {"python": platform.python_version(), **versions},
            "machine": {"system": platform.platform(), "processor": platform.machine(), "num_cpus": os.cpu_count()},
            "parameters": list(parameters),
        }
        target = self.path / "run.json"
        aside = self.path / "run.json.tmp"
        aside.write_text(to_json(run) + "\n", encoding="utf-8")
        aside.replace(target)

    def write_step(self, record: StepRecord) -> None:
        """A line of steps.jsonl and of train.log."""
        self._steps.write(to_json(record) + "\n")
        loss = "-" if record.loss is None else f"{_spell(record.loss)}"
        state = " skipped" if record.skipped else f" clipped={record.clip_coefficient:.4g}" if record.clipped else ""
        rates = ",".join(f"{rate:.6g}" for rate in record.learning_rates)
        self._log.write(f"step={record.step} loss={loss} grad_norm={_spell(record.grad_norm)} lr={rates}{state}\n")
        self._unflushed += 1
        if record.skipped or self._unflushed >= self.FLUSH_EVERY:
            self._flush()

    def write_layers(self, step: int, gradients: GradientTable) -> None:
        """A line of layers.jsonl: name -> [norm, max_abs, num_nonfinite, zero_share]."""
        rows = {
            name: [stats.norm, stats.max_abs, stats.num_nonfinite, round(stats.zero_share, 6)]
            for name, stats in gradients.items()
        }
        self._layers.write(to_json({"step": step, "gradients": rows}) + "\n")

    def write_incident(self, incident: Incident) -> None:
        """A line of incidents.jsonl and of train.log, on disk when this returns."""
        self._incidents.write(to_json(incident) + "\n")
        finding, verdict = incident.finding, incident.verdict
        level = "ERROR" if finding.severity.rank >= Severity.ERROR.rank else finding.severity.value.upper()
        self._log.write(
            f"{level} step={finding.step} {finding.kind}: {finding.message} | action={verdict.action}: "
            f"{incident.outcome.message} | {finding.advice}\n"
        )
        self._flush()
        os.fsync(self._incidents.fileno())

    def _flush(self) -> None:
        for file in (self._steps, self._layers, self._incidents, self._log):
            file.flush()
        self._unflushed = 0

    def close(self) -> None:
        """Write what is held back and close the files."""
        for file in (self._steps, self._layers, self._incidents, self._log):
            file.close()


def _spell(value: float) -> str:
    return f"{value:.6g}".replace("nan", "NaN").replace("inf", "Inf")
