"""Which tensors of a checkpoint are one and the same: tied weights that share bytes, or have the same bytes twice.

Counts and extremes of equal bytes are equal, so only tensors that agree in them are compared, byte for byte. Constant
tensors (zero biases, unit scales) are equal by chance and are left out unless they share their place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steadygrad.scan.readers.chunks import CHUNK_BYTES, ChunkReader
from steadygrad.scan.stats import Stats
from steadygrad.scan.stored import StoredTensor

MAX_TRIED = 8
"""Tensors that agree in all numbers and are different are rare; a file made of them must not take for ever."""
MIN_ELEMENTS = 16
"""Below this, equal values are a coincidence: step counters, scales."""


def find_duplicates(tensors: Sequence[StoredTensor], stats: Sequence[Stats]) -> tuple[tuple[str, ...], ...]:
    """Groups of two names or more."""
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
        for earlier in kept[-MAX_TRIED:]:
            if have_equal_bytes(places[earlier][0], places[place][0], left, right):
                places[earlier] += places.pop(place)
                break
        else:
            kept.append(place)


def have_equal_bytes(first: StoredTensor, second: StoredTensor, left: ChunkReader, right: ChunkReader) -> bool:
    """Whether two stored tensors of one layout have the same bytes, gaps included."""
    if first.num_bytes != second.num_bytes:
        return False
    for start in range(0, first.num_bytes, CHUNK_BYTES):
        length = min(CHUNK_BYTES, first.num_bytes - start)
        mine = left.read_bytes(first.path, first.offset + start, length)
        if not torch.equal(mine, right.read_bytes(second.path, second.offset + start, length)):
            return False
    return True
