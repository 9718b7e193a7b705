"""A checkpoint with NaN or Inf in it -> a repaired copy of it. The original is never touched.

The copy is made byte for byte and only the bad elements are overwritten, so that formats, names, metadata and every
other byte stay the same; checksums of archives and the manifest of our own checkpoints are updated. It is written
under another name and renamed when complete. Masks of -Inf stay. A target that ends in .safetensors gets the repaired
tensors of any single file in that format.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from steadygrad.disk import manifest
from steadygrad.disk.staging import StagedFile, fits_safetensors
from steadygrad.disk.write import WRITING, sync_folder
from steadygrad.errors import CheckpointError
from steadygrad.scan.checkpoint_scan import Progress, scan_contents
from steadygrad.scan.readers.chunks import CHUNK_BYTES, ChunkReader, map_tensor, read_tensor, split_view
from steadygrad.scan.readers.distributed import Window
from steadygrad.scan.readers.formats import find_checkpoints, read_contents
from steadygrad.scan.readers.safetensors import looks_like_safetensors
from steadygrad.scan.readers.torch import find_data
from steadygrad.scan.stored import Contents, StoredTensor
from steadygrad.state.finite import replace_nonfinite

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class CleanReport:
    """What was written, and how many elements of which tensors were replaced."""

    source: Path
    target: Path
    value: float
    replaced: dict[str, int]
    left: tuple[str, ...]
    """Plain numbers that are not finite: only you know what they should be."""


def clean_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    value: float = 0.0,
    force: bool = False,
    progress: Progress | None = None,
) -> CleanReport:
    """Write a copy of `source` to `target` with `value` for every NaN and Inf. `force` replaces a file that exists."""
    source, target = Path(source), Path(target)
    found = find_checkpoints(source)
    _check_target(source, target, force=force)
    _converts(source, target)  # refuse before minutes of reading
    repairs = [_plan(path, value, progress) for path in found]
    # In the target's folder: a rename across file systems is a copy, and not atomic
    aside = target.with_name(f"{WRITING}{os.getpid()}-{target.name}")
    try:
        if _converts(source, target):
            write_safetensors(repairs[0].contents, {one.name for one in repairs[0].bad}, aside, value)
        else:
            _copy(source, aside)
            for repair in repairs:
                repair.apply(source, aside, value)
        # Before the rename: after a power cut the name must not lead to an empty file
        _sync(aside)
        aside.replace(target)
        sync_folder(target.parent)
    finally:
        _remove(aside)  # a failed copy only: after the rename there is nothing of that name
    replaced, left = {}, []
    for path, repair in zip(found, repairs):
        where = f"{path.relative_to(source)}:" if len(found) > 1 else ""
        replaced.update({f"{where}{name}": count for name, count in repair.counts.items()})
        left += [f"{where}{name}" for name in repair.left]
    return CleanReport(source, target, value, replaced, tuple(left))


def _check_target(source: Path, target: Path, *, force: bool) -> None:
    place, origin = target.resolve(), source.resolve()
    if origin in place.parents or place in origin.parents or _is_same(source, target):
        raise CheckpointError(f"{target} is, holds or lies in {source}, which must not change. Name another place.")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target.parent} is not a folder, so nothing can be written to it. Create it first.")
    if target.is_dir() or target.is_symlink():
        raise CheckpointError(
            f"{target} exists and is not a regular file; it is left as it is. Name a place that is free."
        )
    if target.exists() and (source.is_dir() or not force):
        raise CheckpointError(f"{target} exists and was not changed. Name another file, or overwrite it with --force.")


def _converts(source: Path, target: Path) -> bool:
    """Return whether the target has another format than the source."""
    is_asked = target.suffix == SAFETENSORS
    is_there = source.is_file() and _is_safetensors(source)
    if source.is_dir() and is_asked:
        raise CheckpointError(f"{source} is a folder, and {target} would be a file. Name one file of it, or a folder.")
    return is_asked and not is_there


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        return looks_like_safetensors(file.read(16)) or path.suffix == SAFETENSORS


def _is_same(source: Path, target: Path) -> bool:
    return target.exists() and target.samefile(source)  # two names of one file: a hard link


@dataclass(slots=True)
class _Repair:
    """What to do to one checkpoint of the copy."""

    contents: Contents
    bad: list[StoredTensor]
    counts: dict[str, int]
    left: list[str]

    def apply(self, source: Path, copy: Path, value: float) -> None:
        # From here on every path is in the copy; the original is only read
        moved = [dataclasses.replace(one, path=_move(one.path, source, copy)) for one in self.bad]
        for tensor in {one.place: one for one in moved}.values():
            _replace_nonfinite(tensor, value)
        for archive in {(one.path, one.archive) for one in moved if one.archive is not None}:
            places = [one.offset for one in moved if (one.path, one.archive) == archive]
            # After all elements of the archive are written: a checksum is of the final bytes
            fix_checksums(archive[0], *archive[1], places)
        if self.contents.manifest is not None and self.bad:
            # Last: it hashes the files as they are now
            _write_manifest(_move(self.contents.manifest.parent, source, copy), self.counts)


def _plan(path: Path, value: float, progress: Progress | None) -> _Repair:
    contents = read_contents(path)
    scan = scan_contents(contents, progress)
    if scan.problems:
        raise CheckpointError(f"{path} is damaged and cannot be cleaned: {scan.problems[0]}. Use another copy.")
    bad = [tensor for tensor, seen in zip(contents.tensors, scan.tensors) if seen.is_bad]
    for tensor in bad:
        _encode(value, tensor)  # refuse before anything is written
    counts = {tensor.name: tensor.num_nonfinite for tensor in scan.bad_tensors}
    return _Repair(contents, bad, counts, [name for name, _ in scan.bad_numbers])


def _move(path: Path, source: Path, copy: Path) -> Path:
    return copy / path.relative_to(source) if path != source else copy


def _copy(source: Path, aside: Path) -> None:
    _remove(aside)
    if source.is_dir():
        # Linked files are copied as files: a link in the copy would lead back to the original
        shutil.copytree(source, aside, ignore=_ignore_linked_folders)
    else:
        shutil.copyfile(source, aside)


def _ignore_linked_folders(folder: str, names: list[str]) -> set[str]:
    """Skip linked folders: links may form a cycle, or lead to a whole disk."""
    paths = (Path(folder, name) for name in names)
    return {path.name for path in paths if path.is_symlink() and not path.is_file()}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(copy: Path) -> None:
    files: Iterable[Path] = (path for path in copy.rglob("*") if path.is_file()) if copy.is_dir() else [copy]
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())


# --- elements -----------------------------------------------------------------------------------------------------


def _replace_nonfinite(tensor: StoredTensor, value: float) -> None:
    bits = _encode(value, tensor)
    if tensor.has_gaps:
        for part in split_view(map_tensor(tensor, *tensor.stored_layout, writable=True)):
            _overwrite(part, bits)
        return
    with ChunkReader() as reader, tensor.path.open("r+b", buffering=0) as file:
        for start in range(0, tensor.num_bytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, tensor.num_bytes - start)
            # The elements are a view of the reader's buffer, so what is written back is the repaired chunk
            if _overwrite(reader.read_elements(tensor, start, length), bits):
                file.seek(tensor.offset + start)
                file.write(reader.held(length))


def _overwrite(part: Tensor, bits: int) -> bool:
    """Overwrite every bad element, as bits because some dtypes have no arithmetic; return whether there was any."""
    parts = torch.view_as_real(part) if part.is_complex() else part
    bad = ~(parts.float() if parts.element_size() == 1 else parts).isfinite()  # float8_e4m3fn has no isfinite
    parts.view(INTEGERS[parts.element_size()]).masked_fill_(bad, bits)
    return bool(bad.any())


def _encode(value: float, tensor: StoredTensor) -> int:
    """Return the bits of `value` in the tensor's dtype; raise an error if that cannot hold it."""
    assert tensor.dtype is not None
    dtype = torch.empty(0, dtype=tensor.dtype, device="cpu").real.dtype if tensor.dtype.is_complex else tensor.dtype
    encoded = (
        torch.tensor([value], dtype=torch.float64, device="cpu")
        .to(torch.float32 if dtype.itemsize < 8 else dtype)
        .to(dtype)
    )
    if not bool((encoded.float() if dtype.itemsize == 1 else encoded).isfinite()):
        raise CheckpointError(f"{value:g} does not fit {tensor.kind}, the dtype of {tensor.name!r}. Use a smaller one.")
    return int(encoded.view(INTEGERS[dtype.itemsize])[0])


# --- a checkpoint of ours -----------------------------------------------------------------------------------------


def _write_manifest(folder: Path, counts: dict[str, int]) -> None:
    """Sizes and hashes of the repaired files, and the mark that it was cleaned."""
    before = manifest.read_manifest(folder)
    with manifest.start_pool() as pool:
        hashes = {name: manifest.hash_file(folder / name, pool) for name in before.files}
    files = {name: manifest.FileEntry((folder / name).stat().st_size, tuple(pieces)) for name, pieces in hashes.items()}
    cleaned = {**before.cleaned, **counts}
    made = dataclasses.replace(before, files=files, cleaned=cleaned)
    (folder / manifest.NAME).write_bytes(made.render())


# --- archives -----------------------------------------------------------------------------------------------------
# Checksums of a zip archive that fit its records again, after bytes of some were written over in place.


DIRECTORY_ENTRY = 46
"""Bytes of an entry of the table of contents before its name; its checksum is at 16, the lengths behind it at 28."""
BLOCK_BYTES = 1 << 20


def fix_checksums(path: Path, start: int, size: int, offsets: Sequence[int]) -> None:
    """Update the checksum of every record that contains one of `offsets`; the archive begins at `start`."""
    with path.open("r+b") as file:
        # Shares the file's position, and seeks before each read: the writes below do it no harm
        window = Window(file, start, size)
        with zipfile.ZipFile(window) as archive:
            entry_at = start + archive.start_dir
            for entry in archive.infolist():
                begin = start + find_data(path, window, entry, size)  # type: ignore[arg-type]
                if any(begin <= offset < begin + entry.file_size for offset in offsets):
                    _write_checksum(file, entry, entry_at, start + entry.header_offset, begin)
                file.seek(entry_at + 28)
                entry_at += DIRECTORY_ENTRY + sum(struct.unpack("<HHH", file.read(6)))


def _write_checksum(file: BinaryIO, entry: zipfile.ZipInfo, entry_at: int, header_at: int, begin: int) -> None:
    checksum = struct.pack("<I", _sum_up(file, begin, entry.file_size))
    end = begin + entry.file_size
    file.seek(end)
    # Bit 3: the checksum stands behind the data, in a descriptor whose signature is optional
    described = entry.flag_bits & 8 and file.read(4) == b"PK\x07\x08"
    for place in (entry_at + 16, end + 4 if described else header_at + 14):
        file.seek(place)
        file.write(checksum)


def _sum_up(file: BinaryIO, begin: int, length: int) -> int:
    file.seek(begin)
    checksum = 0
    for position in range(0, length, BLOCK_BYTES):
        checksum = zlib.crc32(file.read(min(BLOCK_BYTES, length - position)), checksum)
    return checksum


# --- conversion ---------------------------------------------------------------------------------------------------
# The tensors of any checkpoint file, repaired -> a safetensors file. Plain values beside them are left behind.


SAFETENSORS = ".safetensors"


def write_safetensors(contents: Contents, bad: Collection[str], target: Path, value: float) -> None:
    """Write every tensor under its name; those named in `bad` with `value` for each NaN and Inf."""
    tensors: dict[str, torch.Tensor] = {}
    for stored in contents.tensors:
        if stored.dtype is None or not fits_safetensors(tensor := read_tensor(stored)):
            raise CheckpointError(
                f"{stored.name} has a dtype that safetensors cannot hold: {stored.kind}. Keep the format."
            )
        tensors[stored.name] = (replace_nonfinite(tensor, value) if stored.name in bad else tensor).contiguous()
    staged = StagedFile()
    staged.stage(tensors, {})
    with target.open("wb") as file:
        for piece in staged.pieces():
            file.write(piece)
