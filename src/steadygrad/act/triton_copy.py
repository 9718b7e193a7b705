"""StateCopy: many tensors -> other places on the same device, and how many elements of each are not finite.

One launch for all tensors of a dtype, however many: for the 592 tensors of GPT-2 124M with Adam the host spends 1 ms,
where torch's foreach copy and norm take 8. Floor on an H200: 3 GB read and written, 0.7 ms. Works on the CPU under
TRITON_INTERPRET=1, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadygrad.measure.kernels.triton import AddressTable, Chunks, Launch

DTYPES = {
    torch.float32: (tl.float32, True), torch.bfloat16: (tl.bfloat16, True), torch.float16: (tl.float16, True),
    torch.float64: (tl.float64, True), torch.int64: (tl.int64, False), torch.int32: (tl.int32, False),
    torch.int16: (tl.int16, False), torch.int8: (tl.int8, False), torch.uint8: (tl.uint8, False),
    torch.bool: (tl.uint8, False),
}  # fmt: skip
"""Triton's dtype, and whether its values can be other than finite."""
BITS = {tl.float32: tl.int32, tl.bfloat16: tl.int16, tl.float16: tl.int16, tl.float64: tl.int64}
CHUNK, BLOCK, WARPS = 65536, 2048, 8


# Not specialised: Triton compiles once more for an integer that is 1, and for one that 16 divides.
@triton.jit(do_not_specialize=["first", "num_tensors"])
def _copy_chunks(
    table, numels, chunk_tensor, chunk_index, counts, first, num_tensors,
    DTYPE: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one chunk bit for bit; counts[t] += its elements that are not finite."""
    # table [2 N]: addresses, sources before targets; numels, counts [N]; chunk_tensor, chunk_index [chunks]
    c = tl.program_id(0) + first
    t = tl.load(chunk_tensor + c)
    start = tl.load(chunk_index + c).to(tl.int64) * CHUNK  # int64: a tensor may have more than 2**31 elements
    count = tl.minimum(tl.load(numels + t) - start, CHUNK).to(tl.int32)
    source = tl.load(table + t).to(tl.pointer_type(BITS)) + start
    target = tl.load(table + num_tensors + t).to(tl.pointer_type(BITS)) + start
    bad = tl.zeros([BLOCK], tl.int32)
    for i in range(0, CHUNK, BLOCK):
        lanes = i + tl.arange(0, BLOCK)
        bits = tl.load(source + lanes, mask=lanes < count, other=0)  # [BLOCK]; 0 is finite in every format
        tl.store(target + lanes, bits, mask=lanes < count)
        if IS_FLOAT:
            x = bits.to(DTYPE, bitcast=True)
            bad += ((tl.abs(x) < float("inf")) == 0).to(tl.int32)  # so written that NaN counts
    if IS_FLOAT:
        total = tl.sum(bad, 0)
        if total > 0:
            tl.atomic_add(counts + t, total)


class StateCopy:
    """Copies one list of tensors (sizes and dtypes fixed) repeatedly."""

    def __init__(self, tensors: Sequence[Tensor], chunk: int = CHUNK) -> None:
        device = tensors[0].device
        kinds = [DTYPES[t.dtype] for t in tensors]
        self._chunks = Chunks([t.numel() for t in tensors], kinds, device, chunk)
        self._table = AddressTable(2 * len(tensors), device)
        sizes = {"CHUNK": chunk, "BLOCK": min(BLOCK, chunk), "num_warps": WARPS}
        self._launches = [
            Launch(_copy_chunks, DTYPE=kind, BITS=BITS.get(kind, kind), IS_FLOAT=is_float, **sizes)
            for (kind, is_float), _, _ in self._chunks.spans
        ]

    def copy(self, tensors: Sequence[Tensor], targets: Sequence[int]) -> Tensor:
        """Copy each tensor to the address in `targets`; return int32 [N], how many of its elements are not finite."""
        chunks = self._chunks
        table = self._table.send([*(t.data_ptr() for t in tensors), *targets])
        counts = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
        for launch, (_, first, num) in zip(self._launches, chunks.spans):
            launch(
                (num, 1, 1), None,
                table, chunks.numels, chunks.tensors, chunks.indices, counts, first, len(tensors),
            )  # fmt: skip
        return counts


def fits(tensor: Tensor) -> bool:
    """Return whether the kernel can copy it: a dtype that it knows, aligned to it, without gaps between elements."""
    if tensor.dtype not in DTYPES or tensor.data_ptr() % tensor.element_size():
        return False
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.is_contiguous() or tensor.permute(order).is_contiguous()
