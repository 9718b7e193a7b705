"""Turns traces on disk into Readings, and these into the shipped `Indicators`, with the answer for each step.

Steps count from the moment the indicators are warm until the onset; the last `horizon` steps of a stable run are left
out, since what follows is unknown. A step is positive when the onset is within the next `horizon` steps. A run whose
onset follows an injected outlier batch within `INJECTED` steps is left out: nothing could have foreseen it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from generate import COLUMNS

from steadygrad.detect.indicators import NAMES, Indicators
from steadygrad.facts import Reading

INJECTED = 6
CELLS = {"adam_rms": 6, "update_norm": 7, "ratio": 8}


@dataclass(frozen=True)
class Run:
    """One training: its setup, its measurements, and when it became unstable."""

    setup: dict[str, Any]
    rows: np.ndarray
    """float32 [steps, columns], in the order of `generate.COLUMNS`."""

    @property
    def onset(self) -> int | None:
        """Step at which it became unstable."""
        onset: int | None = self.setup["onset"]
        return onset

    @property
    def program(self) -> str:
        return str(self.setup["program"])

    def count_steps(self, horizon: int) -> int:
        """Return the number of steps that are known to be healthy or not."""
        return max(0, len(self.rows) - horizon) if self.onset is None else self.onset


def load_runs(folder: Path) -> list[Run]:
    """Load all runs of a folder that are usable for training."""
    runs = [run for path in sorted(folder.glob("traces-*.npz")) for run in _read_chunk(path)]
    return [run for run in runs if not _is_injected(run)]


def _read_chunk(path: Path) -> Iterator[Run]:
    with np.load(path) as chunk:
        table = np.stack([chunk[name].astype(np.float32) for name in COLUMNS], axis=1)
        ends = np.cumsum(chunk["lengths"])
        setups = json.loads(str(chunk["setups"]))
    for setup, end, length in zip(setups, ends, np.diff(ends, prepend=0)):
        yield Run(setup, table[end - length : end])


def _is_injected(run: Run) -> bool:
    at = run.setup["outlier_at"]
    return run.onset is not None and at >= 0 and 0 <= run.onset - at <= INJECTED


def make_reading(step: int, row: list[float]) -> Reading:
    """Return what the Guard measured at this step, as far as the trace has it."""
    loss, norm, coefficient, rate, scale, skipped, rms, update, ratio = row[:9]
    bad = int(not math.isfinite(norm))
    return Reading(
        step=step,
        loss=loss,
        grad_norm=norm,
        finite_grad_norm=0.0 if bad else norm,
        num_nonfinite=bad,
        num_nan=int(math.isnan(norm)),
        clip_coefficient=coefficient,
        skipped=bool(skipped),
        learning_rates=(rate,),
        loss_scale=None if math.isnan(scale) else scale,
        adam_rms=None if math.isnan(rms) else {"": rms},
        update_norm=None if math.isnan(update) else update,
        update_ratios=None if math.isnan(ratio) else {"": ratio},
    )


@dataclass(frozen=True)
class Steps:
    """The judged steps of many runs."""

    indicators: np.ndarray
    """float32 [steps, indicators]"""
    run: np.ndarray
    """Index of the run."""
    step: np.ndarray
    left: np.ndarray
    """Steps until the onset; inf in a stable run."""

    def is_positive(self, horizon: int) -> np.ndarray:
        return self.left <= horizon


def measure_steps(runs: list[Run], horizon: int) -> Steps:
    """Compute the indicators at every step of every run."""
    indicators, which, steps, left = [], [], [], []
    for index, run in enumerate(runs):
        watch, end = Indicators(), run.count_steps(horizon)
        for step, row in enumerate(run.rows[:end].tolist()):
            watch.observe(make_reading(step, row))
            if watch.is_warm and not row[5]:
                indicators.append(watch.values())
                which.append(index)
                steps.append(step)
                left.append(math.inf if run.onset is None else run.onset - step)
    shape = (len(indicators), len(NAMES))
    return Steps(
        np.array(indicators, dtype=np.float32).reshape(shape), np.array(which), np.array(steps), np.array(left)
    )
