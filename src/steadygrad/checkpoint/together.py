"""Folders of guards that train together -> which of their checkpoints were saved at one moment.

The guards of a GAN save at the same moment, under one token. A process that is killed between two of these saves leaves
one guard a checkpoint ahead of the other: a resume takes the newest token that all of them have, and none that is
suspect for one of them. Reads manifests and marks only.
"""

from __future__ import annotations

from pathlib import Path

from steadygrad.checkpoint.catalogue import CheckpointInfo, read_infos
from steadygrad.record.run_folder import CHECKPOINTS, find_parts

TOGETHER = "together"
"""Name in a manifest's `about` of the token."""


def rank_together(infos: list[CheckpointInfo], run_dir: Path) -> list[CheckpointInfo]:
    """`infos`, ranked for a resume, with those first that every guard of the run has; `run_dir` is one guard's."""
    top = run_dir.parent if run_dir in find_parts(run_dir.parent) else run_dir
    folders = [found for one in (top, *find_parts(top)) if (found := read_infos(one / CHECKPOINTS))]
    if len(folders) < 2:
        return infos
    tokens = [{_read_token(info): info for info in found} for found in folders]
    whole = set.intersection(*(set(one) for one in tokens)) - {""}
    sound = {token for token in whole if all(one[token].suspect is None for one in tokens)}
    # Stable: among equals the order of `infos` stays.
    return sorted(infos, key=lambda info: (_read_token(info) not in sound, _read_token(info) not in whole))


def _read_token(info: CheckpointInfo) -> str:
    return str(info.manifest.about.get(TOGETHER, ""))
