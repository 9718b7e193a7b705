"""StagedFile: named tensors, wherever they live -> the bytes of a safetensors file, in reusable host memory.

The copy from the device goes straight to its place in the file, so that nothing is copied twice and the writer only
has to write. Memory is held in pieces of the size that is hashed, pinned if the tensors are on a GPU: pinning 4 GiB
takes two seconds and fresh memory costs half a `torch.save`, so both are paid only once. Staging returns when the
copies have arrived; the tensors may then change.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from steadygrad.disk.direct import BLOCK_BYTES
from steadygrad.disk.manifest import PIECE_BYTES

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' name for each dtype; tensors of other dtypes go with the plain state."""
ALIGNMENT = 64
"""Alignment in bytes of the first tensor in the file; readers map it."""
COPIERS, LARGE = 2, 1 << 20
"""Threads that copy host memory (two are 1.5 times as fast as one; more would wait for data workers), and the size in
bytes from which a copy is worth a thread."""


def fits_safetensors(tensor: Tensor) -> bool:
    """Whether a safetensors file can hold it."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and tensor.dtype in CODES


class StagedFile:
    """The bytes of one file. Stage, let the writer read `pieces()`, stage again."""

    def __init__(self) -> None:
        self._segments: list[Tensor] = []
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._num_bytes

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Copy the tensors into their places and wait until they have arrived."""
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # keeps every element aligned
        header = _make_header({name: tensors[name] for name in order}, metadata)
        self._num_bytes = len(header) + sum(map(_count_bytes, tensors.values()))
        self._make_room(pinned=any(tensor.is_cuda for tensor in tensors.values()))
        # A bytearray, since frombuffer warns of memory that cannot be written.
        self._put(0, torch.frombuffer(bytearray(header), dtype=torch.uint8))
        position = len(header)
        with ThreadPoolExecutor(COPIERS) as pool:
            copies = []
            for name in order:
                if tensors[name].numel():
                    copies += self._put(position, _as_bytes(tensors[name]), pool)
                    position += _count_bytes(tensors[name])
            for copy in copies:
                copy.result()
        # The copies were queued on these streams. Until they are done the memory holds parts of an earlier save.
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file from its first byte on, in the pieces that are hashed."""
        for i, start in enumerate(range(0, self._num_bytes, PIECE_BYTES)):
            size = min(PIECE_BYTES, self._num_bytes - start)
            # By address: a tensor's buffer needs numpy, which may not be installed. Nothing keeps the memory alive:
            # the view is valid until the next stage(), which may replace the segment.
            yield memoryview((ctypes.c_ubyte * size).from_address(self._segments[i].data_ptr()))

    def _make_room(self, *, pinned: bool) -> None:
        """Allocate pieces for the whole file; existing ones that are large enough are kept."""
        for i, start in enumerate(range(0, self._num_bytes, PIECE_BYTES)):
            wanted = min(PIECE_BYTES, self._num_bytes - start)
            if i < len(self._segments) and self._segments[i].numel() >= wanted:
                continue
            made = _take_memory(1 << (wanted - 1).bit_length(), pinned=pinned)  # room to grow; pinning rounds up anyway
            self._segments[i : i + 1] = [made]

    def _put(self, position: int, data: Tensor, pool: ThreadPoolExecutor | None = None) -> list[Future[None]]:
        """Copy bytes to their place in the file, across pieces; return the copies that `pool` is still making."""
        done, under_way = 0, []
        while done < data.numel():
            piece, offset = divmod(position + done, PIECE_BYTES)
            size = min(PIECE_BYTES - offset, data.numel() - done)
            if not data.is_cpu:
                part = self._segments[piece][offset : offset + size]
                # Blocking unless CUDA: stage() waits for CUDA's streams only. A temporary of `_as_bytes` may be freed
                # before its copy has run: the allocator gives the memory to later work of the same stream only.
                part.copy_(data[done : done + size], non_blocking=data.is_cuda)
            elif pool is None or size < LARGE:
                _move(self._segments[piece].data_ptr() + offset, data, done, size)
            else:
                under_way.append(pool.submit(_move, self._segments[piece].data_ptr() + offset, data, done, size))
            done += size
        return under_way


def _move(to: int, data: Tensor, start: int, size: int) -> None:
    """Copy a part of `data`, which this call keeps alive; other threads run meanwhile."""
    ctypes.memmove(to, data.data_ptr() + start, size)


def _take_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate memory that starts at a block boundary, as direct writes need; pinned memory always does."""
    if pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError:  # the limit on locked memory is reached: slower, not wrong
            pass
    # torch aligns to 64 bytes only; one block more leaves room to start at a block boundary.
    memory = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    return memory[-memory.data_ptr() % BLOCK_BYTES :]


def _make_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Build the header: length as 8 bytes, then JSON with every tensor's place, padded with spaces to the alignment."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for name, tensor in tensors.items():
        end = start + _count_bytes(tensor)
        fields[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)  # 8: the length in front
    return len(text).to_bytes(8, "little") + text


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return its elements in row-major order, as bytes on the same device."""
    # resolve_neg: the sign of a lazily negated view is a flag, which a copy of its bytes would lose.
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
