"""A picture as Pillow opens it -> the picture as a viewer shows it, with eight bits a channel.

Pillow's `convert` clips: all of a 16-bit picture would be white, and one of fractions black. Cameras store pixels as
the sensor has them and write into EXIF how to turn them; who writes captions or draws masks sees the turned picture.
"""

from __future__ import annotations

from typing import Any

TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""EXIF's orientation -> what turns the picture upright, by Pillow's names."""
ON_ITS_SIDE = 5
"""Orientations from here on swap width and height."""
ORIENTATION = 0x0112
DEEP = ("I", "F")
"""Modes of 32-bit numbers, whose range nothing says."""


def to_rgb(picture: Any) -> Any:
    """Return the pixels as RGB; ValueError for numbers that would be clipped."""
    if picture.mode in DEEP:
        low, high = picture.getextrema()
        if low < 0 or not 1 < high <= 255:
            raise ValueError(f"its pixels are numbers from {low:g} to {high:g}: save them with 8 or 16 bits")
    if picture.mode.startswith("I;16"):
        picture = picture.convert("I").point(lambda value: value / 257).convert("L")
    return picture.convert("RGB")


def turn_upright(picture: Any) -> Any:
    """Return the picture turned as its EXIF says."""
    turn = TURNS.get(_find_orientation(picture))
    if turn is None:
        return picture
    from PIL.Image import Transpose

    # Not ImageOps.exif_transpose: it copies every picture, and writes the EXIF again, which may be damaged
    return picture.transpose(Transpose[turn])


def find_shown_size(picture: Any) -> tuple[int, int]:
    """Return width and height once it is upright; reads no pixel."""
    width, height = picture.size
    return (height, width) if _find_orientation(picture) >= ON_ITS_SIDE else (width, height)


def _find_orientation(picture: Any) -> int:
    # A PNG may have its EXIF behind the pixels, and would be decoded to look for it; no camera writes one
    if picture.format == "PNG" and "exif" not in picture.info:
        return 1
    try:
        found = picture.getexif().get(ORIENTATION, 1)
    except Exception:  # its parser raises many kinds; viewers pass over EXIF that is damaged
        return 1
    return found if isinstance(found, int) and found in TURNS else 1
