"""Contents -> CheckpointScan: what every tensor of a checkpoint holds, with many threads and flat memory.

Nothing is loaded: each thread reads chunk after chunk into its own small buffer. Weights that share their place are
read once and reported as tied; weights that are equal byte for byte are reported too. Reads only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from steadygrad.disk import manifest
from steadygrad.errors import DamagedCheckpoint
from steadygrad.scan.readers.chunks import CHUNK_BYTES, ChunkReader, ReaderPool
from steadygrad.scan.readers.formats import read_contents
from steadygrad.scan.stats import ChunkMeter, Stats
from steadygrad.scan.stored import Contents, StoredTensor

PIECE_BYTES = 16 * CHUNK_BYTES
"""Bytes that one thread takes at a time."""
Progress = Callable[[int, str], None]
"""Called with the bytes done so far and the name of the tensor, from the calling thread."""


@dataclass(frozen=True, slots=True)
class TensorScan:
    """One tensor. `min`, `max` and `norm` are over its finite elements; None if it has none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_elements: int
    num_bytes: int
    num_nan: int
    num_inf: int
    num_zeros: int
    min: float | None
    max: float | None
    norm: float | None
    is_allowed: bool
    """Whether NaN and Inf are harmless in it: an attention mask, or marked so when it was saved."""

    @property
    def num_nonfinite(self) -> int:
        return self.num_nan + self.num_inf

    @property
    def is_bad(self) -> bool:
        return self.num_nonfinite > 0 and not self.is_allowed


@dataclass(frozen=True, slots=True)
class CheckpointScan:
    """One file, or one folder of files that belong together."""

    path: Path
    format: str
    tensors: tuple[TensorScan, ...]
    duplicates: tuple[tuple[str, ...], ...]
    """Names of one tensor: they share their place in the file, or are equal byte for byte."""
    bad_numbers: tuple[tuple[str, float], ...]
    """Plain numbers that are not finite. An Inf is harmless: many programs initialise a best loss with it."""
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def bad_tensors(self) -> tuple[TensorScan, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.is_bad)

    @property
    def is_clean(self) -> bool:
        return not (self.bad_tensors or self.problems or any(math.isnan(value) for _, value in self.bad_numbers))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def scan_checkpoint(
    path: str | Path, progress: Progress | None = None, num_threads: int | None = None
) -> CheckpointScan:
    """Scan one checkpoint: a file, or a folder whose files belong together."""
    return scan_contents(read_contents(Path(path)), progress, num_threads)


def scan_contents(
    contents: Contents, progress: Progress | None = None, num_threads: int | None = None
) -> CheckpointScan:
    """Scan every element of `contents`."""
    stats = measure_tensors(contents.tensors, progress, num_threads)
    allowed = contents.may_be_nonfinite
    tensors = tuple(
        _describe(tensor, one, is_allowed=tensor.name in allowed) for tensor, one in zip(contents.tensors, stats)
    )
    unknown = sorted({tensor.kind for tensor in contents.tensors if tensor.dtype is None})
    notes = [f"elements of kind {kind} were not examined: torch has no name for them" for kind in unknown]
    return CheckpointScan(
        path=contents.path,
        format=contents.format,
        tensors=tensors,
        duplicates=find_duplicates(contents.tensors, stats),
        bad_numbers=tuple(one for one in contents.numbers if not (contents.manifest and _is_own_start(*one))),
        problems=(*contents.problems, *check_manifest(contents)),
        notes=(*contents.notes, *notes),
    )


def _is_own_start(name: str, value: float) -> bool:
    """Return whether this is an Inf from which a history of the guard begins, as its lowest loss so far does."""
    return name.startswith("guard.") and math.isinf(value)


def check_manifest(contents: Contents) -> list[str]:
    """Return what differs from the recorded sizes and hashes, if there are any."""
    if contents.manifest is None:
        return []
    folder = contents.manifest.parent
    try:
        manifest.check_files(folder, manifest.read_manifest(folder))
    except DamagedCheckpoint as error:
        return [error.reason]
    return []


def measure_tensors(
    tensors: tuple[StoredTensor, ...], progress: Progress | None = None, num_threads: int | None = None
) -> list[Stats]:
    """Return the stats of each tensor; tensors that share their place are read once and share their stats."""
    found = {tensor.place: Stats() for tensor in tensors if tensor.dtype is not None}
    pieces = list(_cut({tensor.place: tensor for tensor in tensors if tensor.dtype is not None}.values()))
    done = 0
    with ReaderPool(num_threads) as pool:
        # Results come in the order of the pieces, so that the sum of squares is rounded alike in every run
        for (tensor, _, length), stats in zip(pieces, pool.map(_measure_piece, pieces)):
            found[tensor.place].add(stats)
            # Here and not in the threads: neither the Stats nor a caller's progress bar is locked
            done += length
            if progress is not None:
                progress(done, tensor.name)
    return [found.get(tensor.place, Stats()) for tensor in tensors]


Piece = tuple[StoredTensor, int, int]


def _cut(tensors: Iterable[StoredTensor]) -> Iterator[Piece]:
    """Split the work into pieces of at most PIECE_BYTES; a tensor with gaps is one piece."""
    for tensor in tensors:
        step = max(1, tensor.num_bytes) if tensor.has_gaps else PIECE_BYTES
        for start in range(0, tensor.num_bytes, step):
            yield tensor, start, min(step, tensor.num_bytes - start)


def _measure_piece(readers: tuple[ChunkReader, ChunkReader], piece: Piece) -> Stats:
    stats, meter = Stats(), ChunkMeter()
    for chunk in readers[0].iterate(*piece):
        stats.add(meter.measure(chunk))
    return stats


def _describe(tensor: StoredTensor, stats: Stats, *, is_allowed: bool) -> TensorScan:
    some = math.isfinite(stats.least)
    return TensorScan(
        name=tensor.name,
        dtype=tensor.kind,
        shape=tensor.shape,
        num_elements=tensor.num_elements,
        num_bytes=tensor.num_bytes,
        num_nan=stats.num_nan,
        num_inf=stats.num_inf,
        num_zeros=stats.num_zeros,
        min=stats.least if some else None,
        max=stats.largest if some else None,
        norm=math.sqrt(stats.sum_squares) if some else None,
        is_allowed=stats.num_nonfinite > 0 and (is_allowed or is_mask(tensor.name, stats)),
    )


def is_mask(name: str, stats: Stats) -> bool:
    """Return whether this is an attention mask, judged by its name and by holding only 0 and Inf."""
    only_zero = stats.num_inf > 0 and stats.num_zeros + stats.num_inf == stats.num_elements
    return only_zero and "mask" in name.lower()


# --- duplicates ---------------------------------------------------------------------------------------------------
# Which tensors of a checkpoint are one and the same: tied weights that share bytes, or have the same bytes twice.
#
# Counts and extremes of equal bytes are equal, so only tensors that agree in them are compared, byte for byte. Constant
# tensors (zero biases, unit scales) are equal by chance and are left out unless they share their place.


MAX_TRIED = 8
"""Different tensors rarely agree in all numbers; a file full of such tensors must not take forever."""
MIN_ELEMENTS = 16
"""Below this, equal values are a coincidence: step counters, scales."""


def find_duplicates(tensors: Sequence[StoredTensor], stats: Sequence[Stats]) -> tuple[tuple[str, ...], ...]:
    """Return groups of two or more names."""
    places: dict[object, list[StoredTensor]] = {}
    likely: dict[object, list[object]] = {}
    for tensor, one in zip(tensors, stats):
        if tensor.num_bytes == 0:
            continue
        if tensor.place not in places and _is_telling(tensor, one):
            counts = (one.num_nan, one.num_inf, one.num_zeros, one.least, one.largest)  # a sum may round differently
            key = (tensor.kind, tensor.shape, tensor.stride, *counts)
            likely.setdefault(key, []).append(tensor.place)
        places.setdefault(tensor.place, []).append(tensor)
    with ChunkReader() as left, ChunkReader() as right:
        for candidates in likely.values():
            _join_equal(candidates, places, left, right)
    return tuple(tuple(tensor.name for tensor in group) for group in places.values() if len(group) > 1)


def _is_telling(tensor: StoredTensor, stats: Stats) -> bool:
    return tensor.dtype is not None and stats.num_elements >= MIN_ELEMENTS and stats.least < stats.largest


def _join_equal(
    candidates: list[object], places: dict[object, list[StoredTensor]], left: ChunkReader, right: ChunkReader
) -> None:
    """Move the tensors of every place that equals an earlier one into the earlier one's group."""
    kept: list[object] = []
    for place in candidates:
        for earlier in kept[-MAX_TRIED:]:  # or a file made for it would be compared pair by pair
            if have_equal_bytes(places[earlier][0], places[place][0], left, right):
                # The group stays where the earlier name was; `places` is not iterated meanwhile
                places[earlier] += places.pop(place)
                break
        else:
            kept.append(place)


def have_equal_bytes(first: StoredTensor, second: StoredTensor, left: ChunkReader, right: ChunkReader) -> bool:
    """Return whether two stored tensors of one layout have the same bytes, including gaps."""
    if first.num_bytes != second.num_bytes:
        return False
    for start in range(0, first.num_bytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, first.num_bytes - start)
        mine = left.read_bytes(first.path, first.offset + start, length)
        if not torch.equal(mine, right.read_bytes(second.path, second.offset + start, length)):
            return False
    return True
