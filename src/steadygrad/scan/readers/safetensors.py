"""A safetensors file -> Contents, from its header alone.

The header is checked as the format demands before anything is believed: its length against the file, every range
against its shape, all ranges together without gap or overlap up to the end of the file.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import torch

from steadygrad.errors import DamagedCheckpoint
from steadygrad.scan.readers.checks import are_sizes
from steadygrad.scan.stored import Contents, StoredTensor, contiguous_stride

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The format's names and torch's; a name that is not here is listed and not looked into."""


def read_safetensors(path: Path, file: BinaryIO) -> Contents:
    """Return the tensors that the header of `file` describes."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(8)
    length = int.from_bytes(head, "little")
    # Before `read(length)`, which would allocate as much as the file claims
    if len(head) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise DamagedCheckpoint(path, f"the header claims {length} bytes, the file has {size}")
    tensors = [
        _describe_tensor(path, name, entry, 8 + length, size)
        for name, entry in _parse_header(path, file.read(length)).items()
        if name != "__metadata__"
    ]
    _check_ranges(path, tensors, 8 + length, size)
    return Contents(path, "safetensors", tuple(tensors))


def looks_like_safetensors(head: bytes) -> bool:
    """Whether the first 16 bytes are a plausible length and the beginning of a JSON object."""
    return len(head) >= 9 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(path, f"the header is not JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise DamagedCheckpoint(path, "the header is not a JSON object")
    return header


def _describe_tensor(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    code, shape, ends = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(code, str) or not are_sizes(shape) or not are_sizes(ends) or len(ends) != 2:
        raise DamagedCheckpoint(path, f"tensor {name!r} has no dtype, shape or place that makes sense")
    begin, end = ends
    dtype = getattr(torch, DTYPES.get(code, ""), None)
    if begin > end or start + end > size:
        raise DamagedCheckpoint(path, f"tensor {name!r} claims bytes {begin} to {end}, the file ends at {size - start}")
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
        raise DamagedCheckpoint(
            path, f"tensor {name!r} of shape {shape} and {code} does not fit into {end - begin} bytes"
        )
    kind = DTYPES.get(code, code)
    sizes = tuple(shape)
    return StoredTensor(name, path, dtype, kind, sizes, contiguous_stride(sizes), start + begin, end - begin)


def _check_ranges(path: Path, tensors: list[StoredTensor], start: int, size: int) -> None:
    position = start
    # By size too: an empty tensor begins where the next one does, and must come first
    for tensor in sorted(tensors, key=lambda one: (one.offset, one.num_bytes)):
        if tensor.offset != position:
            raise DamagedCheckpoint(path, f"tensor {tensor.name!r} overlaps the one before it or leaves a gap")
        position += tensor.num_bytes
    if position != size:
        raise DamagedCheckpoint(path, f"{size - position} bytes at the end belong to no tensor")
