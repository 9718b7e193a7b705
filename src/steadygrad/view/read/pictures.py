"""RUN/pictures/*.png -> the pictures that a training left to be looked at, with their captions. Read-only.

`pictures/captions.json` maps a file name to its caption; without one the file name is used. Bounded in number and
size; with `within` nothing outside that folder is read. What is left out is reported, never an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = "pictures"
CAPTIONS = "captions.json"
MAX_PICTURES = 24
MAX_BYTES = 2 << 20
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Picture:
    """A PNG file's bytes and caption."""

    name: str
    caption: str
    data: bytes


@dataclass(frozen=True)
class Pictures:
    """Pictures to show, and those left out."""

    shown: tuple[Picture, ...] = ()
    left_out: tuple[str, ...] = ()
    """Name and reason, for each picture left out."""


def read_pictures(run: Path, *, within: Path | None = None) -> Pictures:
    """Return the pictures of a run, sorted by name."""
    folder = run / FOLDER
    try:
        files = sorted(folder.glob("*.png")) if folder.is_dir() else []
    except OSError:
        files = []
    captions = _read_captions(folder / CAPTIONS, within) if files else {}
    shown: list[Picture] = []
    left_out: list[str] = []
    for file in files:
        if len(shown) == MAX_PICTURES:
            left_out.append(f"{file.name}: only {MAX_PICTURES} are shown")
            continue
        data = _read(file, within)
        # By content, not by suffix: the page embeds it as image/png
        if data is None or not data.startswith(SIGNATURE):
            left_out.append(f"{file.name}: no readable PNG of at most {MAX_BYTES >> 20} MB")
            continue
        shown.append(Picture(file.name, captions.get(file.name, file.stem), data))
    return Pictures(tuple(shown), tuple(left_out))


def _read_captions(path: Path, within: Path | None) -> dict[str, str]:
    data = _read(path, within)
    try:
        captions = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(text) for name, text in captions.items()} if isinstance(captions, dict) else {}


def _read(path: Path, within: Path | None) -> bytes | None:
    """Return a file's bytes; None if it is not a regular file, too large, or outside `within`."""
    try:
        # The resolved path is checked and then read, so that a link is not followed out of `within`
        real = path.resolve()
        if not real.is_file() or (within is not None and not real.is_relative_to(within)):
            return None
        return real.read_bytes() if real.stat().st_size <= MAX_BYTES else None
    except OSError:
        return None
