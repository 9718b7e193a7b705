"""The checks that several readers share: nothing that a file says about itself is believed before them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from steadygrad.errors import DamagedCheckpoint
from steadygrad.scan.stored import StoredTensor

MAX_OVERLAP = 64
"""Views of one storage that are saved beside it are common; this many times the file are not."""


def are_sizes(values: object) -> bool:
    """Whether this is a list or tuple of whole numbers, none below 0."""
    return isinstance(values, list | tuple) and all(type(one) is int and one >= 0 for one in values)  # no bool


def resolve_inside(folder: Path, relative: object) -> Path:
    """Return `folder / relative`, refused where that leads out of the folder."""
    inside = Path(relative) if isinstance(relative, str) and "\0" not in relative else None
    # By its parts, without resolving: in huggingface_hub's cache a shard is a link that leads out
    if inside is None or inside.is_absolute() or ".." in inside.parts:
        raise DamagedCheckpoint(folder, f"it names a file outside itself: {relative!r}")
    return folder / inside


def check_overlap(tensors: Iterable[StoredTensor], path: Path, file_bytes: int) -> None:
    """Refuse a file whose tensors overlap so often that looking at them would take for ever."""
    asked = sum(num_bytes for _, _, num_bytes, _ in {tensor.place for tensor in tensors})
    if asked > MAX_OVERLAP * file_bytes:
        raise DamagedCheckpoint(
            path, f"it describes {asked} bytes of tensors in a file of {file_bytes}, overlapping one another"
        )
