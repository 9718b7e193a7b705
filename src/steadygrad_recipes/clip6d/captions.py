"""A folder of images and COCO-style caption files -> samples, and every row that was left out, with the reason.

    captions_en.json   {"images": [{"id": 1, "file_name": "a.jpg"}],
                        "annotations": [{"id": 7, "image_id": 1, "caption": "a dog"}]}

Files in several languages refer to the same images by the same ids. A row is never dropped silently: what is wrong
with it becomes a `LeftOut`. This module only reads; pixels are decoded later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadygrad.errors import UsageError
from steadygrad_recipes.tables import parse_json, require_unicode, resolve_inside, write_lines

FORMAT = 'COCO\'s: {"images": [{"id", "file_name"}], "annotations": [{"id", "image_id", "caption"}]}'


@dataclass(slots=True)
class Sample:
    """One image by its id: where it is, and its captions in each language."""

    id: int
    image: Any = None
    """A file's path, a place in a shard, or the encoded bytes."""
    captions: dict[str, list[str]] = field(default_factory=dict)
    shard: str = ""
    """Name of the shard that it comes from, if any."""
    row: str = ""
    """Its row in that shard."""
    parts: tuple[str, ...] = ()
    """Names of what that row holds, whether it is used or not."""
    first: int | None = None
    """Id of an earlier sample with the same name and picture, in another shard or further up in this one."""

    @property
    def origin(self) -> tuple[str, str]:
        """File and row to name in a message."""
        return (self.shard, self.row) if self.shard else ("sample", f"image id {self.id}")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that did not become part of any sample."""

    file: str
    row: str
    reason: str


def read_samples(
    folder: Path, languages: Sequence[str], images: Path, *, needs_images: bool
) -> tuple[list[Sample], list[LeftOut]]:
    """Return all samples of the caption files, ordered by id."""
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder} (field data). Give a folder that holds captions_<language>.json files, "
            "or leave data out to train on generated data."
        )
    files = _find_files(folder, languages)
    if needs_images and not images.is_dir():
        raise UsageError(
            f"there is no folder of images at {images} (field images). Give its path, or take image out of modalities."
        )
    samples: dict[int, Sample] = {}
    left_out: list[LeftOut] = []
    for language, path in files.items():
        _read_file(path, language, images if needs_images else None, samples, left_out)
    return [samples[key] for key in sorted(samples)], left_out


def _find_files(folder: Path, languages: Sequence[str]) -> dict[str, Path]:
    """Return language -> file. Without a language (image and vector only) every caption file lists the images."""
    there = {path.stem.removeprefix("captions_"): path for path in sorted(folder.glob("captions_*.json"))}
    missing = [language for language in languages if language not in there]
    if missing or not there:
        names = ", ".join(f"captions_{language}.json" for language in missing) or "any captions_<language>.json"
        holds = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        have = (
            f"it has captions in {', '.join(there)}"
            if there
            else f"it has no .tar or .parquet shards either; it holds {holds}"
        )
        raise UsageError(f"{folder} lacks {names}; {have}. Add the file, or choose other modalities.")
    return {language: there[language] for language in languages} or there


def _read_file(
    path: Path, language: str, images: Path | None, samples: dict[int, Sample], left_out: list[LeftOut]
) -> None:
    content = _load(path)

    def leave_out(row: Any, reason: str) -> None:
        left_out.append(LeftOut(path.name, json.dumps(row, ensure_ascii=False)[:200], reason))

    known: set[int] = set()
    for row in content["images"]:
        reason = _find_image_fault(row, known)
        if reason is not None:
            leave_out(row, reason)
            continue
        known.add(row["id"])
        # The other languages' files name the same image: the first one's sample is completed
        sample = samples.setdefault(row["id"], Sample(row["id"]))
        if images is not None and sample.image is None:
            sample.image = find_image(images, row["file_name"])
            if sample.image is None:
                leave_out(row, f"the image is not in {images}")
    for row in content["annotations"]:
        reason = _find_caption_fault(row, known)
        if reason is None:
            samples[row["image_id"]].captions.setdefault(language, []).append(row["caption"].strip())
        else:
            leave_out(row, reason)


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is {error}. The format is {FORMAT}.") from None
    lists = [isinstance(content, dict) and isinstance(content.get(key), list) for key in ("images", "annotations")]
    if not all(lists):
        keys = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise UsageError(f"{path} lacks the lists images and annotations; it has {keys}. The format is {FORMAT}.")
    return dict(content)


def _find_image_fault(row: Any, known: set[int]) -> str | None:
    if not isinstance(row, dict) or not isinstance(row.get("id"), int) or isinstance(row.get("id"), bool):
        return "an image needs a whole number as its id"
    if not isinstance(row.get("file_name"), str) or not row["file_name"]:
        return "an image needs a file_name"
    return f"the id {row['id']} is there twice" if row["id"] in known else None


def _find_caption_fault(row: Any, known: set[int]) -> str | None:
    if not isinstance(row, dict) or not isinstance(row.get("image_id"), int) or isinstance(row["image_id"], bool):
        return "a caption needs a whole number as its image_id"
    if row["image_id"] not in known:
        return f"no image has the id {row['image_id']}"
    return find_text_fault(row.get("caption"))


def find_text_fault(value: Any) -> str | None:
    """Return what keeps a caption from being used."""
    if not isinstance(value, str):
        return "the caption is not text"
    try:
        require_unicode(value)
    except ValueError as error:
        return f"the caption is {error}"
    return None if value.strip() else "the caption is empty"


def find_image(folder: Path, name: str) -> Path | None:
    """Return the file if it is inside the folder; a name that leads outside is not followed."""
    try:
        return folder / name if resolve_inside(folder, name).is_file() else None
    except (OSError, ValueError):
        return None


def write_left_out(left_out: Iterable[LeftOut], path: Path) -> int:
    """Write each left-out row as a line of JSON and return their number. Without any, no file is written."""
    lines = [json.dumps({"file": r.file, "row": r.row, "reason": r.reason}, ensure_ascii=False) for r in left_out]
    if lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, lines)
    return len(lines)
