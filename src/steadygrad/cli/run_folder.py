"""Where a command writes its run: a new folder with the time in its name, or the newest of those there are."""

from __future__ import annotations

import datetime
from pathlib import Path


def name_folder(parent: Path, name: str) -> Path:
    """runs/seo-20260131-101500, or with -2, -3, ... when somebody was there in the same second."""
    stem = f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, 1000))
    return next(parent / name for name in names if not (parent / name).exists())


def find_newest(parent: Path, name: str, *, holding: str = "") -> Path | None:
    """The last folder that `name_folder` has named, by its time, of those that have a folder `holding` inside."""
    folders = sorted(path for path in parent.glob(f"{name}-[0-9]*") if (path / holding).is_dir())
    return folders[-1] if folders else None
