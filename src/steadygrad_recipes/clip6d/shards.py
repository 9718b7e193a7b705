"""Shards of images with captions -> samples: webdataset's .tar files, and parquet tables.

A .tar holds members that share a name: `0001.jpg`, `0001.txt` or `0001.de.txt`, `0001.json`, `0001.npy`. Only its table
is read here; pixels are read later from their place in the file. A parquet row has `image` (bytes, a file's name, or an
object with `bytes` or `path`) and `caption`, `text`, or one column for each language. Nothing in a shard is run.
"""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad_recipes.clip6d.captions import LeftOut, Sample, find_image, find_text_fault
from steadygrad_recipes.tables import parse_json

logger = logging.getLogger("steadygrad")

PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
CAPTIONS = ("caption", "text", "txt", "captions")
"""Names of a caption without a language."""
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")

Parts = Collection[tuple[str, Any]]
"""What a row holds, by name or ending; an exception where it cannot be used."""


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
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    packed = next((file for file in files if file.name.lower().endswith(PACKED)), None)
    if packed is not None:
        raise UsageError(f"{packed} is compressed, and images are read from their place in a shard. Unpack it to .tar.")
    found = [file for file in files if file.suffix.lower() in (".tar", ".parquet") and file.is_file()]
    # img2dataset writes 0001.parquet beside 0001.tar: addresses and captions of the same samples, without pixels
    tars = {file.stem for file in found if file.suffix.lower() == ".tar"}
    return [file for file in found if file.suffix.lower() == ".tar" or file.stem not in tars]


def read_shards(
    shards: Sequence[Path], languages: Sequence[str], *, needs_images: bool
) -> tuple[list[Sample], dict[int, Tensor], list[LeftOut]]:
    """Return the samples of all shards, their vectors by id, and what could not be used."""
    samples: list[Sample] = []
    vectors: dict[int, Tensor] = {}
    left_out: list[LeftOut] = []
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for shard in shards:
        rows = _read_tar(shard) if shard.suffix.lower() == ".tar" else _read_parquet(shard)
        for row, parts in rows:
            names = tuple(name for name, _ in parts)
            # One tuple for all rows that hold the same
            sample = Sample(len(samples), shard=shard.name, row=row, parts=known.setdefault(names, names))
            problems = _fill(sample, parts, languages, vectors, needs_images=needs_images)
            left_out += [LeftOut(shard.name, row, problem) for problem in problems if problem]
            samples.append(sample)
    _mark_copies(samples)
    return samples, vectors, left_out


def _mark_copies(samples: Iterable[Sample]) -> None:
    """Mark the samples that have name and picture of an earlier one, and warn.

    A name alone says nothing: many data sets count from 0 in each shard. Pictures are read only where their size is
    the same too.
    """
    firsts: dict[tuple[str, int], Sample] = {}
    copies: list[tuple[Sample, Sample]] = []
    for sample in samples:
        if not isinstance(sample.image, Place):
            continue
        first = firsts.setdefault((sample.row, sample.image.size), sample)
        if first is not sample and first.image.read() == sample.image.read():
            sample.first = first.id
            copies.append((first, sample))
    if copies:
        first, sample = copies[0]
        logger.warning(
            "%s the name and the picture of an earlier sample, such as %s in %s and in %s. Both are samples, as in "
            "webdataset, and both are trained on, or both validated on. Remove what is there twice by mistake.",
            "1 sample has" if len(copies) == 1 else f"{len(copies)} samples have",
            sample.row,
            first.shard,
            sample.shard,
        )


def _fill(
    sample: Sample,
    parts: Parts,
    languages: Sequence[str],
    vectors: dict[int, Tensor],
    *,
    needs_images: bool,
) -> list[str]:
    """Put what a row holds into the sample; return what is wrong with it, "" for each part that is fine."""
    problems = []
    for name, value in parts:
        if isinstance(value, ValueError):
            problems.append(str(value) if needs_images else "")
        elif name in PICTURES or name == "image":
            problems.append("it has a second image, which is not used" if sample.image and value else "")
            sample.image = sample.image or value
        elif name in ("npy", "vector", "embedding"):
            problems.append(_take_vector(sample.id, value, vectors))
        elif name == "json":
            problems.append(_take_json(sample, value, languages))
        else:
            problems.append(_take_captions(sample, name.removesuffix(".txt"), value, languages))
    return [*problems, "it has no image"] if needs_images and sample.image is None else problems


def _take_captions(sample: Sample, name: str, value: Any, languages: Sequence[str]) -> str:
    """Add captions under their language; one without a language is of the first that is trained."""
    if isinstance(value, Mapping):
        problems = [_take_captions(sample, str(language), texts, languages) for language, texts in value.items()]
        return next(filter(None, problems), "")
    language = languages[0] if name in CAPTIONS and languages else name
    if value is None or language not in languages:  # a table's empty cell: it has none in this language
        return ""
    if isinstance(value, Place):
        try:
            value = value.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            return f"its caption in {language} is not UTF-8 text"
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
    clean = [text.strip() for text in texts if find_text_fault(text) is None]
    if not clean:
        return f"its caption in {language} is empty or not text"
    known = sample.captions.get(language, [])
    # The .json of a sample often repeats its .txt
    sample.captions[language] = known + [text for text in clean if text not in known]
    lost = len(texts) - len(clean)
    return f"{lost} of its {len(texts)} captions in {language} are empty or not text" if lost else ""


def _take_json(sample: Sample, value: Any, languages: Sequence[str]) -> str:
    value = value.read() if isinstance(value, Place) else value
    if value is None:
        return ""
    try:
        content = parse_json(value) if isinstance(value, str | bytes) else value  # a table's column may have fields
    except ValueError as error:
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
        except Exception as error:  # its parsers of headers and of zip files raise many kinds
            return f"its .npy cannot be read: {str(error).partition('. ')[0]}"
    if value is None:
        return ""
    try:
        given = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return "its vector is not a list of numbers"
    if given.is_complex() or not given.numel():
        return f"its vector has {'complex' if given.numel() else 'no'} numbers"
    vector = given.float().flatten()
    if not bool(vector.isfinite().all()):
        return "its vector is not finite"
    length = len(next(iter(vectors.values()), vector))
    if len(vector) != length:
        return f"its vector has {len(vector)} numbers, those before it {length}"
    vectors[key] = vector
    return ""


def _read_tar(path: Path) -> Iterator[tuple[str, Parts]]:
    """Yield the members that share a name, in the order of the file."""
    try:
        # Uncompressed only, since places in the file are kept; nothing is extracted, so no name can write anywhere
        with tarfile.open(path, "r:") as archive:
            members = [member for member in archive if member.isfile()]
            end = archive.offset
    except tarfile.TarError as error:
        raise UsageError(f"{path} is not a .tar file: {error}. A shard of webdataset is not compressed.") from None
    _require_end(path, end, members[-1].name if members else "its beginning")
    rows: list[tuple[str, dict[str, Place]]] = []
    newest: dict[str, dict[str, Place]] = {}
    for member in members:
        folder, _, name = member.name.rpartition("/")
        key, _, ending = name.partition(".")
        if not ending or not key:  # a name that begins with a dot is a system's own
            continue
        key, ending = f"{folder}/{key}" if folder else key, ending.lower()
        if (
            key not in newest or ending in newest[key]
        ):  # another sample with the same name: its parts do not belong to the first
            newest[key] = {}
            rows.append((key, newest[key]))
        newest[key][ending] = Place(path, member.offset_data, member.size)
    yield from ((key, parts.items()) for key, parts in rows)


def _require_end(path: Path, end: int, last: str) -> None:
    """Raise UsageError unless zeros fill the file from `end`: tarfile stops without a word at a damaged header."""
    with path.open("rb") as file:
        file.seek(end)
        chunk = file.read(1 << 20)
        is_marked = bool(chunk)
        while chunk:
            if chunk.strip(b"\0"):
                raise UsageError(
                    f"{path} cannot be read behind {last}: it is damaged, or several archives were joined. Write it "
                    "again."
                )
            chunk = file.read(1 << 20)
    if not is_marked:
        raise UsageError(f"{path} has no end mark behind {last}: it is truncated. Write it again.")


def _read_parquet(path: Path) -> Iterator[tuple[str, Parts]]:
    parquet = import_extra("data", "pyarrow.parquet", what=f"reading {path.name}", error=UsageError)
    number = 0
    try:
        table = parquet.ParquetFile(path)
        for batch in table.iter_batches(256):  # not the whole table: images may be inside
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", [(name, _open_cell(path.parent, name, cell)) for name, cell in row.items()]
    except Exception as error:  # pyarrow's own kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
        raise UsageError(f"{path} cannot be read as parquet, behind row {number}: {reason}. Write it again.") from None


def _open_cell(folder: Path, name: str, cell: Any) -> Any:
    """Return the cell; of a picture its bytes or its file, or a ValueError."""
    if name != "image" and name not in PICTURES:
        return cell
    if isinstance(cell, Mapping):  # as datasets stores pictures
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, str):
        return find_image(folder, cell) or ValueError(f"the image {cell[:80]} is not in {folder}")
    if cell is None or isinstance(cell, bytes):
        return cell
    return ValueError(f"its image is {type(cell).__name__}, not the bytes or the name of a picture")
