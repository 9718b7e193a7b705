"""Shards of images with captions -> samples: webdataset's .tar files, and parquet tables.

A .tar holds members that share a name: `0001.jpg`, `0001.txt` or `0001.de.txt`, `0001.json`, `0001.npy`. Only its table
is read here; pixels are read later from their place in the file. A parquet row has `image` (bytes, or an object with
`bytes`) and `caption`, `text`, or one column for each language. Nothing in a shard is run.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad_recipes.clip6d.captions import LeftOut, Sample

PICTURES = ("jpg", "jpeg", "png", "webp", "bmp")
CAPTIONS = ("caption", "text", "txt", "captions")
"""Names of a caption without a language."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes inside a shard."""

    path: Path
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the bytes."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def find_shards(folder: Path) -> list[Path]:
    """Return the shards at `folder`, which may be a shard itself; empty if there are none."""
    if folder.is_file():
        return [folder] if folder.suffix in (".tar", ".parquet") else []
    return sorted([*folder.glob("*.tar"), *folder.glob("*.parquet")]) if folder.is_dir() else []


def read_shards(
    shards: Sequence[Path], languages: Sequence[str], *, needs_images: bool
) -> tuple[list[Sample], dict[int, Tensor], list[LeftOut]]:
    """Return the samples of all shards, their vectors by id, and what could not be used."""
    samples: list[Sample] = []
    vectors: dict[int, Tensor] = {}
    left_out: list[LeftOut] = []
    for shard in shards:
        rows = _read_tar(shard) if shard.suffix == ".tar" else _read_parquet(shard)
        for row, parts in rows:
            sample = Sample(len(samples), shard=shard.name, row=row)
            problems = _fill(sample, parts, languages, vectors, needs_images=needs_images)
            left_out += [LeftOut(shard.name, row, problem) for problem in problems if problem]
            samples.append(sample)
    return samples, vectors, left_out


def _fill(
    sample: Sample,
    parts: Mapping[str, Any],
    languages: Sequence[str],
    vectors: dict[int, Tensor],
    *,
    needs_images: bool,
) -> list[str]:
    """Put what a row holds into the sample; return what is wrong with it, "" for each part that is fine."""
    problems = []
    for name, value in parts.items():
        if name in PICTURES or name == "image":
            sample.image = value
        elif name in ("npy", "vector", "embedding"):
            problems.append(_take_vector(sample.id, value, vectors))
        elif name == "json":
            problems.append(_take_json(sample, value, languages))
        else:
            problems.append(_take_captions(sample, name.removesuffix(".txt"), value, languages))
    return ["it has no image"] if needs_images and sample.image is None else problems


def _take_captions(sample: Sample, name: str, value: Any, languages: Sequence[str]) -> str:
    """Add captions under their language; one without a language is of the first that is trained."""
    if isinstance(value, Place):
        value = value.read().decode("utf-8", errors="replace")
    if isinstance(value, Mapping):
        problems = [_take_captions(sample, str(language), texts, languages) for language, texts in value.items()]
        return next(filter(None, problems), "")
    language = languages[0] if name in CAPTIONS and languages else name
    if value is None or language not in languages:  # a table's empty cell: it has none in this language
        return ""
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    clean = [text.strip() for text in texts if isinstance(text, str) and text.strip()]
    if not clean:
        return f"its caption in {language} is empty or not text"
    sample.captions.setdefault(language, []).extend(clean)
    return ""


def _take_json(sample: Sample, value: Any, languages: Sequence[str]) -> str:
    try:
        content = json.loads(value.read() if isinstance(value, Place) else value)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"its .json cannot be read: {error}"
    if not isinstance(content, Mapping):
        return f"its .json holds {type(content).__name__}, not an object"
    problems = [
        _take_captions(sample, name, texts, languages)
        for name, texts in content.items()
        if name in CAPTIONS or name in languages
    ]
    return next(filter(None, problems), "")


def _take_vector(key: int, value: Any, vectors: dict[int, Tensor]) -> str:
    if isinstance(value, Place):
        numpy = import_extra("recipes", "numpy", what="reading vectors of a shard")
        try:
            value = numpy.load(io.BytesIO(value.read()), allow_pickle=False)  # a pickle would run code
        except (ValueError, EOFError) as error:
            return f"its .npy cannot be read: {error}"
    if value is None:
        return ""
    vector = torch.as_tensor(value).float().flatten()
    if not bool(vector.isfinite().all()):
        return "its vector is not finite"
    length = len(next(iter(vectors.values()), vector))
    if len(vector) != length:
        return f"its vector has {len(vector)} numbers, those before it {length}"
    vectors[key] = vector
    return ""


def _read_tar(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the members that share a name, in the order of the file."""
    try:
        # Uncompressed only, since places in the file are kept; nothing is extracted, so no name can write anywhere
        with tarfile.open(path, "r:") as archive:
            members = [member for member in archive if member.isfile()]
    except tarfile.TarError as error:
        raise UsageError(f"{path} is not a .tar file: {error}. A shard of webdataset is not compressed.") from None
    rows: dict[str, dict[str, Any]] = {}
    for member in members:
        folder, _, name = member.name.rpartition("/")
        key, _, ending = name.partition(".")
        if ending:
            parts = rows.setdefault(f"{folder}/{key}" if folder else key, {})
            parts[ending.lower()] = Place(path, member.offset_data, member.size)
    yield from rows.items()


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    parquet = import_extra("data", "pyarrow.parquet", what=f"reading {path.name}", error=UsageError)
    try:
        table = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own kinds
        raise UsageError(f"{path} is not a parquet file: {error}. Write it again.") from None
    number = 0
    for batch in table.iter_batches(256):  # not the whole table: images may be inside
        for row in batch.to_pylist():
            number += 1
            image = row.get("image")
            if isinstance(image, Mapping):  # as datasets stores pictures
                row["image"] = image.get("bytes") or (path.parent / image["path"] if image.get("path") else None)
            yield f"row {number}", row
