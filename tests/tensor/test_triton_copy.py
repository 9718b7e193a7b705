"""The kernel that copies a state on its device: bit for bit, counting non-finite values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from training import DEVICES

triton_copy = pytest.importorskip("steadygrad.act.triton_copy")
DEVICE = DEVICES[-1]


def copy(tensors: list[Tensor], chunk: int = 4096) -> tuple[list[Tensor], list[int]]:
    targets = [torch.full_like(tensor, 7) for tensor in tensors]
    plan = triton_copy.StateCopy(tensors, chunk=chunk)
    counts = plan.copy(tensors, [target.data_ptr() for target in targets])
    return targets, counts.tolist()


def test_every_dtype_and_layout_is_copied_bit_for_bit() -> None:
    dtypes = list(triton_copy.DTYPES)
    tensors = [torch.randint(0, 2, (size,), device=DEVICE).to(d) for d in dtypes for size in (1, 4095, 4097)]
    tensors += [
        torch.randn(9, 40, device=DEVICE).bfloat16().t(),
        torch.randn(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last),
        torch.randn(10_000, device=DEVICE, dtype=torch.float64),
    ]
    assert all(map(triton_copy.fits, tensors))
    copies, counts = copy(tensors)
    for one, other in zip(tensors, copies):
        assert torch.equal(one, other), (one.dtype, one.shape)
    assert counts == [0] * len(tensors)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nonfinite_values_are_counted_and_copied_unchanged(value: float, dtype: torch.dtype) -> None:
    tensors = [torch.randn(9000, device=DEVICE).to(dtype), torch.randn(3, device=DEVICE).to(dtype)]
    tensors[0][::1000] = value
    copies, counts = copy(tensors)
    assert counts == [9, 0]
    assert torch.equal(tensors[0].view(torch.uint8), copies[0].view(torch.uint8))


def test_the_payload_of_a_nan_survives() -> None:
    odd = torch.tensor([0x7FC01234, 0x7F800001], dtype=torch.int32, device=DEVICE).view(torch.float32)
    (copied,), counts = copy([odd])
    assert torch.equal(copied.view(torch.int32), odd.view(torch.int32))
    assert counts == [2]


def test_gaps_between_elements_are_refused() -> None:
    assert not triton_copy.fits(torch.randn(8, 8, device=DEVICE)[:, ::2])
    assert not triton_copy.fits(torch.zeros(4, dtype=torch.complex64, device=DEVICE))
