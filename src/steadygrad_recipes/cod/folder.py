"""A folder in the layout of COD10K, CAMO or NC4K -> pairs of image and mask, and what is wrong with the others.

Nothing is dropped silently: an image without a mask, a mask without an image, a file that is not a picture or is
truncated and a pair with two sizes are each found before training and named. Only headers and ends of files are read
here, no code is run, and torch is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad_recipes.imaging import find_shown_size

SETS = ("COD10K", "CAMO", "NC4K", "CHAMELEON")
"""Sets of the field that lie beside each other in one TestDataset; the first that is there is used."""
SPLITS = {
    "train": ("Train", "TrainDataset", "train"),
    "test": ("Test", "TestDataset", *(f"TestDataset/{name}" for name in SETS), "test", "Val", "val"),
}
IMAGES = ("Image", "Imgs", "Images", "images", "imgs", "image")
MASKS = ("GT_Object", "GT", "gt", "masks", "Masks", "mask")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")
LEFT_BY_SYSTEMS = ("Thumbs.db", "desktop.ini")
JPEG_END = b"\xff\xd9"
NONCAM = "COD10K-NonCAM"
MAX_SHOWN = 5


@dataclass(frozen=True)
class Pair:
    """An image and the mask of its object; no mask means that it shows no object."""

    image: Path
    mask: Path | None
    is_as_stored: bool = False
    """Whether the mask fits only the pixels as they are stored, not as EXIF says to turn them."""


@dataclass(frozen=True)
class Split:
    """The contents of one split of the dataset."""

    pairs: tuple[Pair, ...]
    bad: tuple[str, ...]
    """Files that cannot be used, each with its reason."""
    num_noncam: int = 0
    """Images left out because they show no hidden object."""
    images: Path | None = None
    """The folder of the images."""


def find_split(root: str | Path, name: str, *, include_noncam: bool = False) -> Split:
    """Return the pairs of 'train' or 'test', ordered by name."""
    root = Path(root)
    if not root.is_dir():
        raise UsageError(
            f"dataset_path: there is no folder {root}. Give the folder that holds {SPLITS['train'][0]} and "
            f"{SPLITS['test'][0]}, or leave dataset_path out to train on generated pictures."
        )
    images, masks, every = _find_folders(root, name)
    found, twice = _list_files(images)
    if every:  # one folder for both: every tenth image is for the test
        # By the sorted names, so that both splits are cut alike in every process
        chosen = {stem for number, stem in enumerate(sorted(found)) if (number % every == 0) == (name == "test")}
        others = set(found) - chosen
        found = {stem: file for stem, file in found.items() if stem in chosen}
    masks_found, masks_twice = _list_files(masks)
    if every or _shares_masks(root, masks):  # masks of the other split lie there too
        others = others if every else {file.stem for split in images.parent.iterdir() for file in split.glob("*")}
        masks_found = {stem: file for stem, file in masks_found.items() if stem in found or stem not in others}
    alone = [file.name for stem, file in masks_found.items() if stem not in found]
    bad = [*twice, *masks_twice, *(f"{name}: no image of this name" for name in alone)]
    pairs, num_noncam = [], 0
    for stem, image in found.items():
        is_noncam = stem.startswith(NONCAM)
        if is_noncam and not include_noncam:
            num_noncam += 1
            continue
        mask = masks_found.get(stem)
        if mask is None and not is_noncam:
            bad.append(f"{image.name}: no mask {stem}.png in {masks.name}")
            continue
        try:
            pairs.append(_check_pair(image, mask))
        except ValueError as problem:
            bad.append(f"{image.name}: {problem}")
    return Split(tuple(pairs), tuple(bad), num_noncam, images)


def require_usable(split: Split, root: str | Path, name: str, *, skip_bad: bool) -> None:
    """Reject a split with bad pairs, unless they are to be left out, and a split without any pair."""
    if split.bad and not skip_bad:
        raise UsageError(
            f"{len(split.bad)} of the {name} files of {root} cannot be used: {show_some(split.bad)}. Fix them, "
            "or leave them out with --skip-bad-data true; they are then listed in left_out.txt of the run."
        )
    if not split.pairs:
        raise UsageError(
            f"the {name} split of {root} holds no pair of image and mask. Put Image/NAME.jpg beside "
            "GT_Object/NAME.png into it."
        )


def show_some(texts: Sequence[str]) -> str:
    """Format the first few, and how many more there are."""
    more = f"; and {len(texts) - MAX_SHOWN} more" if len(texts) > MAX_SHOWN else ""
    return "; ".join(texts[:MAX_SHOWN]) + more


def import_pillow(what: str) -> Any:
    """Import PIL.Image, or raise an error that names the extra to install."""
    return import_extra("recipes", "PIL.Image", what=what, error=UsageError)


def _shares_masks(root: Path, masks: Path) -> bool:
    """Whether the masks of all splits lie in one folder, as CAMO's do."""
    return masks.parent == root


def _find_folders(root: Path, name: str) -> tuple[Path, Path, int]:
    """Return the folders of images and masks, and 0; where there are no splits, how many images make a test image."""
    for split in SPLITS[name]:
        for images in IMAGES:
            for masks in MASKS:
                if (root / split / images).is_dir() and (root / split / masks).is_dir():  # COD10K
                    return root / split / images, root / split / masks, 0
                if (root / images / split).is_dir() and (root / masks / split).is_dir():
                    return root / images / split, root / masks / split, 0
                if (root / images / split).is_dir() and (root / masks).is_dir():  # CAMO
                    return root / images / split, root / masks, 0
    for images in IMAGES:
        for masks in MASKS:
            if (root / images).is_dir() and (root / masks).is_dir():  # NC4K, CHAMELEON: no splits
                return root / images, root / masks, 10
    here = ", ".join(sorted(one.name for one in root.iterdir() if one.is_dir())[:8]) or "no folder"
    split = SPLITS[name][0]
    raise UsageError(
        f"{root} has no {split}/{IMAGES[0]} with a {split}/{MASKS[0]} beside it; it holds {here}. Arrange it as COD10K "
        "does, or give the folder above or below."
    )


def _list_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Return stem -> picture, and the files that share a stem or whose name is not that of a picture."""
    found: dict[str, Path] = {}
    odd: list[str] = []
    for file in sorted(folder.iterdir()):
        if file.is_dir() or file.name.startswith(".") or file.name in LEFT_BY_SYSTEMS:
            continue
        if file.suffix.lower() not in SUFFIXES:
            odd.append(f"{file.name}: not a picture by its name")
        elif file.stem in found:
            odd.append(f"{file.name}: {found[file.stem].name} has the same name")
        else:
            found[file.stem] = file
    return found, odd


def _check_pair(image: Path, mask: Path | None) -> Pair:
    """Return the pair, without decoding it; ValueError says what is wrong with it."""
    pillow = import_pillow("reading pictures")
    sizes, shown = [], []
    for what, file in (("image", image), ("mask", mask)):
        if file is None:
            continue
        try:
            with pillow.open(file) as picture:
                sizes.append(picture.size)
                shown.append(find_shown_size(picture))
                if picture.format == "PNG":
                    picture.verify()  # the checksums of all its parts
                elif not (picture.format == "JPEG" and _has_end(file)):
                    picture.load()  # may be whole all the same, with something appended
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise ValueError(f"its {what} is not a readable picture ({spell_error(error)})") from None
    if mask is None or sizes[1] == shown[0]:
        return Pair(image, mask)
    # As most programs of the field read it, which pass over EXIF
    if sizes[1] == sizes[0]:
        return Pair(image, mask, is_as_stored=True)
    raise ValueError(f"image is {_spell(shown[0])} and mask {_spell(sizes[1])}")


def spell_error(error: Exception) -> str:
    """Return why a picture cannot be read; a subclass of OSError only repeats its path."""
    return type(error).__name__ if isinstance(error, OSError) and type(error) is not OSError else str(error)


def _has_end(file: Path) -> bool:
    """Return whether the last bytes hold the mark that ends a JPEG: a truncated one has a good header."""
    with file.open("rb") as content:
        content.seek(-min(64, file.stat().st_size), os.SEEK_END)
        return JPEG_END in content.read()


def _spell(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
