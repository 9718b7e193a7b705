"""StoredTensor: where in a file the elements of a tensor lie, and how they are laid out. No element is read here.

Every format that can be read (safetensors, torch's archives, distributed checkpoints) becomes a list of these, so that
what scans, compares, repairs and loads knows one noun. A StoredTensor never reaches past the end of its file: the
reader that makes one checks that first, with Python's unbounded integers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    name: str
    path: Path
    """The file that holds it."""
    dtype: torch.dtype | None
    """None for an element type that torch does not have; such a tensor is listed but not read."""
    kind: str
    """The element's kind as text: 'float32'."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements; a view that was saved has gaps, a transposed one another order."""
    offset: int
    """Offset of its first element in the file."""
    num_bytes: int
    """From the first byte of its first element to the last one of its last."""
    archive: tuple[int, int] | None = None
    """Where the archive that it is a record of begins, and how long that is: its checksums must fit what is in it."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[Path, int, int, str]:
        """Two tensors of one place are one tensor with two names: tied weights."""
        # The layout too: a transposed view of the same bytes is another tensor
        return self.path, self.offset, self.num_bytes, f"{self.kind}{self.shape}{self.stride}"

    def renamed(self, name: str) -> StoredTensor:
        """Return the same tensor under another name."""
        return dataclasses.replace(self, name=name)

    @property
    def has_gaps(self) -> bool:
        """Whether bytes that are not its own lie between its elements. Overlapping ones count as without."""
        return self.dtype is not None and math.prod(self.stored_layout[0]) * self.dtype.itemsize < self.num_bytes

    @property
    def stored_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and stride without the dimensions that repeat the same elements: what `expand` made."""
        kept = [(size, step) for size, step in zip(self.shape, self.stride) if step or size == 0]
        return tuple(size for size, _ in kept), tuple(step for _, step in kept)


@dataclass(frozen=True, slots=True)
class Contents:
    """What one file, or one folder of files that belong together, holds."""

    path: Path
    format: str
    tensors: tuple[StoredTensor, ...]
    numbers: tuple[tuple[str, float], ...] = ()
    """Plain numbers that are NaN or Inf, such as a learning rate."""
    problems: tuple[str, ...] = ()
    """What does not fit together: a tensor that the index names and no file has."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
    may_be_nonfinite: frozenset[str] = frozenset()
    """Tensors that are known to hold NaN or Inf on purpose."""
    manifest: Path | None = None
    """Sizes and hashes that the files must have, where they are recorded."""


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def count_extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one, both included; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride))
