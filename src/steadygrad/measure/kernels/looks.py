"""What a scan of the weights computes, in plain torch: the specification, and the code for every device but CUDA.

A tensor becomes three numbers (how many elements are not finite, how many of those are NaN, the L2 norm) and a hash of
its bits: a changed element changes the hash, but for one chance in billions. In host memory many small tensors are
scanned together, and large ones in chunks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from steadygrad.measure.rows import PIECE, split_flat

NONFINITE, NAN, NORM = range(3)
NUM_NUMBERS = 3
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Knuth's multiplicative hash, 2^64 / the golden ratio, as a signed number."""
CHUNK = 1 << 17
"""Elements that are hashed together in host memory."""


@torch.no_grad()
def look_at(tensors: Sequence[Tensor], hashed: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return numbers float64 [N, 3] and hashes int64 [N] of tensors on one device; 0 where no hash is wanted."""
    device = tensors[0].device
    if device.type == "cpu":
        return _measure_on_host(tensors), _hash_on_host(tensors, hashed)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    numbers = torch.stack([_measure(tensor) for tensor in tensors])
    return numbers, torch.stack([hash_bits(t) if yes else zero for t, yes in zip(tensors, hashed)])


def _measure(tensor: Tensor) -> Tensor:
    if not tensor.numel():
        return torch.zeros(NUM_NUMBERS, dtype=torch.float64, device=tensor.device)
    # In fp32: the norm of float16 elements may itself be too large for float16.
    pieces = [piece.float() if piece.element_size() < 4 else piece for piece in split_flat(tensor)]
    nonfinite = torch.stack([(~piece.isfinite()).sum() for piece in pieces]).sum()
    nans = torch.stack([piece.isnan().sum() for piece in pieces]).sum()
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece).double() for piece in pieces]))
    return torch.stack([nonfinite.double(), nans.double(), norm])


def hash_bits(tensor: Tensor) -> Tensor:
    """Return a number that depends on every bit of every element: int64 scalar."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return torch.stack([_hash_piece(piece) for piece in split_flat(tensor)]).sum()


def _hash_piece(piece: Tensor) -> Tensor:
    """Sum the mixed bit patterns. Without mixing, one ulp up here and one ulp down there would cancel."""
    bits = piece.view(INTEGERS[piece.element_size()])
    mixed = bits.to(torch.int64) * MULTIPLIER  # not in place: for float64 the bits share memory with the parameter
    return mixed.bitwise_xor_(mixed >> 32).sum()


# --- in host memory ---------------------------------------------------------------------------------------------------


def _measure_on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Return the three numbers of each: float64 [N, 3]. A norm that is finite says that all elements are."""
    plain = [i for i, t in enumerate(tensors) if t.dtype in (torch.float32, torch.float64) and 0 < t.numel() <= PIECE]
    numbers = np.full((len(tensors), NUM_NUMBERS), [0.0, 0.0, np.nan])
    if plain:
        norms = torch._foreach_norm([tensors[i].detach() for i in plain])
        numbers[plain, NORM] = list(map(float, norms))
    for i in np.flatnonzero(~np.isfinite(numbers[:, NORM])).tolist():
        numbers[i] = _measure(tensors[i]).numpy()
    return torch.from_numpy(numbers)


def _hash_on_host(tensors: Sequence[Tensor], hashed: Sequence[bool]) -> Tensor:
    """Return `hash_bits` of each: int64 [N]; 0 where no hash is wanted."""
    hashes = np.zeros(len(tensors), dtype=np.int64)
    for batch in _batch([(i, tensor) for i, tensor in enumerate(tensors) if hashed[i]]):
        pieces = [piece for _, piece in batch]
        joined = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        mixed = joined.view(INTEGERS[joined.element_size()]).to(torch.int64) * MULTIPLIER
        mixed ^= mixed >> 32
        starts = np.cumsum([0, *(piece.numel() for piece in pieces[:-1])])
        np.add.at(hashes, [i for i, _ in batch], np.add.reduceat(mixed.numpy(), starts))
    return torch.from_numpy(hashes)


def _batch(tensors: Sequence[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield pieces of numbered tensors in lists of at most CHUNK elements of one dtype."""
    batch: list[tuple[int, Tensor]] = []
    num = 0
    for i, tensor in tensors:
        for piece in _cut(tensor):
            if batch and (num + piece.numel() > CHUNK or piece.dtype is not batch[0][1].dtype):
                yield batch
                batch, num = [], 0
            if piece.numel():
                batch.append((i, piece))
                num += piece.numel()
    if batch:
        yield batch


def _cut(tensor: Tensor) -> Sequence[Tensor]:
    """Return the elements in pieces of at most CHUNK. A model has hundreds of small tensors: those take two calls."""
    if tensor.numel() <= CHUNK and not tensor.is_complex():
        return (tensor.detach().reshape(-1),)
    return [piece for whole in split_flat(tensor) for piece in whole.split(CHUNK)]
