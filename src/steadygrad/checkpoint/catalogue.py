"""The folder of checkpoints -> which ones there are, in which order to try them, and which ones may go.

Only reads names, manifests and marks, and chooses; the store writes, moves and removes. A checkpoint is `good` after
enough healthy steps beyond it, and `suspect` if a step soon after it was unhealthy. One that is not yet proven is
neither: a resume after a kill still uses it, or every kill would cost the steps since the last good one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from steadygrad._version import __version__
from steadygrad.config.checkpoint import CheckpointConfig
from steadygrad.disk.manifest import Manifest, read_manifest
from steadygrad.errors import DamagedCheckpoint
from steadygrad.record.run_folder import CHECKPOINTS, find_parts

MARKS = "marks.json"
"""What was learnt about a checkpoint after it was written. Not in the manifest: losing it loses no state."""
RUN = "run"
"""Key of the run's id in a manifest's `about`."""
# More than eight digits must match too, so names are ordered by `_parse_name`, never as text
PATTERN = re.compile(r"step_(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Marks:
    """What happened after a checkpoint was saved."""

    good: bool = False
    suspect: str | None = None
    """Why it may be bad: an unhealthy step came soon after it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics reported after it was saved."""

    def render(self) -> bytes:
        fields = {"good": self.good, "suspect": self.suspect, "metrics": dict(self.metrics)}
        return (json.dumps(fields, indent=1, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint on disk, as its manifest and marks describe it."""

    step: int
    path: Path
    manifest: Manifest
    marks: Marks

    @property
    def good(self) -> bool:
        """Whether enough healthy steps came after it."""
        return self.marks.good

    @property
    def suspect(self) -> str | None:
        """Why it may be bad; None if it is not suspect."""
        return self.marks.suspect

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics saved with it or reported later."""
        return {**self.manifest.metrics, **self.marks.metrics}

    @property
    def cleaned(self) -> dict[str, int]:
        """Tensor -> elements that were replaced when it was saved."""
        return dict(self.manifest.cleaned)

    @property
    def run(self) -> str:
        """Id of the run that saved it; empty for one that was saved without a Guard, or by an earlier version."""
        return str(self.manifest.about.get(RUN, ""))

    @property
    def num_bytes(self) -> int:
        """Its size on disk."""
        return self.manifest.num_bytes

    @property
    def serial(self) -> int:
        """Serial number of this save in its folder, from 1."""
        return self.manifest.serial


def describe_origin(run: str) -> dict[str, Any]:
    """Return what a manifest says about the run that saved it."""
    versions = {"steadygrad": __version__, "torch": str(torch.__version__)}
    return {**versions, RUN: run} if run else versions


def name_folder(step: int, taken: Iterable[str]) -> str:
    """Return a free name for the checkpoint before step `step`; repeated saves get a number, so none is overwritten."""
    numbers = [_parse_name(name)[1] for name in taken if PATTERN.fullmatch(name) and _parse_name(name)[0] == step]
    return f"step_{step:08d}" + (f"-{max(numbers) + 1}" if numbers else "")


def _parse_name(name: str) -> tuple[int, int]:
    found = PATTERN.fullmatch(name)
    assert found is not None, name
    return int(found[1]), int(found[2] or 1)


def find_folders(directory: Path) -> list[Path]:
    """Return every folder named like a checkpoint, oldest first, complete or not."""
    try:
        names = [path.name for path in directory.iterdir() if PATTERN.fullmatch(path.name)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=_parse_name)]


def read_info(folder: Path) -> CheckpointInfo:
    """Read a folder's manifest and marks; raise DamagedCheckpoint if they cannot be trusted. Hashes no files."""
    manifest = read_manifest(folder)
    if PATTERN.fullmatch(folder.name) and manifest.step != _parse_name(folder.name)[0]:
        raise DamagedCheckpoint(folder, f"its manifest is that of step {manifest.step}")
    return CheckpointInfo(manifest.step, folder, manifest, read_marks(folder))


def read_infos(directory: Path) -> list[CheckpointInfo]:
    """Return every readable checkpoint, in the order they were saved."""
    infos = []
    for folder in find_folders(directory):
        try:
            infos.append(read_info(folder))
        except DamagedCheckpoint:
            continue
    # Not by step: after a resume from an older checkpoint, the newest save may have a lower step
    return sorted(infos, key=lambda info: info.serial)


def read_marks(folder: Path) -> Marks:
    """Read a checkpoint's marks; empty ones if they are missing or damaged."""
    try:
        fields: Any = json.loads((folder / MARKS).read_bytes())
        metrics = {str(k): float(v) for k, v in fields["metrics"].items() if math.isfinite(v)}
        suspect = None if fields["suspect"] is None else str(fields["suspect"])
        return Marks(good=fields["good"] is True, suspect=suspect, metrics=metrics)  # "false" is not proof
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Marks()


# --- choosing -----------------------------------------------------------------------------------------------------


def rank(infos: Sequence[CheckpointInfo], run: str = "") -> list[CheckpointInfo]:
    """Return them in the order a resume tries them: the newest that is not suspect first, suspect ones last.

    Those of run `run` come first: a folder may also hold checkpoints of a run that was not resumed.
    """
    return sorted(infos, key=lambda info: (info.run == run, info.suspect is None, info.serial), reverse=True)


def keep_run(infos: Sequence[CheckpointInfo], run: str) -> list[CheckpointInfo]:
    """Return the checkpoints of run `run`; all of them if it has none."""
    return [info for info in infos if info.run == run] or list(infos)


def find_best(infos: Sequence[CheckpointInfo], best_by: str) -> list[CheckpointInfo]:
    """Return those that have the metric, lowest first; the older one first on a tie."""
    scored = [info for info in infos if math.isfinite(info.metrics.get(best_by, math.nan))]
    return sorted(scored, key=lambda info: (info.metrics[best_by], info.serial))


ENDS_EPOCH = "ends_epoch"
"""Key in a manifest's `about` of a checkpoint saved between two epochs; those inside an epoch do not crowd it out."""


def find_removable(
    infos: Sequence[CheckpointInfo], config: CheckpointConfig, runs: Collection[str] = ("",)
) -> list[CheckpointInfo]:
    """Return those of `runs` that no rule keeps; other runs' are never removed.

    The newest good one and the one that a resume would try first always stay.
    """
    infos = [info for info in infos if info.run in runs]
    last = {info.step: info for info in infos}  # the last attempt of each step
    attempts = sorted(last.values(), key=lambda info: info.serial)
    kept = attempts[-config.keep_last :]
    kept += [info for info in attempts if info.manifest.about.get(ENDS_EPOCH)][-config.keep_last :]
    kept += find_best(attempts, config.best_by)[: config.keep_best]
    if config.keep_every is not None:
        kept += [info for info in attempts if info.step % config.keep_every == 0]
    kept += [info for info in infos if info.good][-1:]
    kept += rank(infos)[:1]
    paths = {info.path for info in kept}
    return [info for info in infos if info.path not in paths]


# --- guards that train together -----------------------------------------------------------------------------------
# Folders of guards that train together -> which of their checkpoints were saved at one moment.
#
# The guards of a GAN save at the same moment, under one token. A process that is killed between two of these saves
# leaves one guard a checkpoint ahead of the other: a resume takes the newest token that all of them have, and none
# that is suspect for one of them. Reads manifests and marks only.


TOGETHER = "together"
"""Key of the token in a manifest's `about`."""


def rank_together(infos: list[CheckpointInfo], run_dir: Path) -> list[CheckpointInfo]:
    """Rank `infos` for a resume, those that every guard of the run has first; `run_dir` is one guard's."""
    top = run_dir.parent if run_dir in find_parts(run_dir.parent) else run_dir
    folders = [found for one in (top, *find_parts(top)) if (found := read_infos(one / CHECKPOINTS))]
    if len(folders) < 2:
        return infos
    tokens = [{_read_token(info): info for info in found} for found in folders]
    whole = set.intersection(*(set(one) for one in tokens)) - {""}
    sound = {token for token in whole if all(one[token].suspect is None for one in tokens)}
    # `sorted` is stable: equals keep the order of `infos`.
    return sorted(infos, key=lambda info: (_read_token(info) not in sound, _read_token(info) not in whole))


def _read_token(info: CheckpointInfo) -> str:
    return str(info.manifest.about.get(TOGETHER, ""))
