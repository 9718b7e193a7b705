"""The fast statistics equal the specification: every dtype, odd sizes, extremes, many tensors."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from training import DEVICES

from steadygrad.measure.kernels import foreach, reference

Measure = Callable[[Sequence[Tensor], Tensor], None]


def measure_with(num_threads: int) -> Measure:
    """Return the CPU's implementation in a process with so many threads: with one, numpy reduces."""

    def measure(tensors: Sequence[Tensor], out: Tensor) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            foreach.measure_table(tensors, out)
        finally:
            torch.set_num_threads(before)

    return measure


KERNELS: dict[str, Measure] = {"foreach": measure_with(2), "foreach, one thread": measure_with(1)}
WITHOUT_KERNELS = tuple(KERNELS.values())
if importlib.util.find_spec("triton"):
    from steadygrad.measure.kernels import triton

    # Small chunks, so that small tensors reach every boundary; the interpreter is slow on large ones.
    KERNELS["triton"] = partial(triton.measure_table, chunk=256, block=64, width=4)
    if torch.cuda.is_available():
        KERNELS["triton as shipped"] = triton.measure_table

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
every_device = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

# fp32 sums of up to 1e5 squares against float64 ones; half precision is exact once widened.
RTOL = 2e-6


@pytest.fixture(autouse=True)
def _only_possible(kernel: Measure, device: str) -> None:
    if torch.cuda.is_available() and device == "cpu" and kernel not in WITHOUT_KERNELS:
        pytest.skip("on a machine with CUDA the Triton kernels run there")


def assert_equals_reference(kernel: Measure, tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    expected = torch.empty(len(tensors), 5, dtype=torch.float64, device=device)
    measured = torch.full_like(expected, -7.0)
    reference.measure_table(tensors, expected)
    kernel(tensors, measured)
    torch.testing.assert_close(measured, expected, rtol=RTOL, atol=0)
    return measured


@every_device
@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 255, 256, 257, 1000, 5003])
def test_every_dtype_and_odd_size_equals_the_specification(
    kernel: Measure, device: str, dtype: torch.dtype, size: int
) -> None:
    values = torch.randn(size)
    values[::7] = 0.0
    assert_equals_reference(kernel, [values.to(device=device, dtype=dtype)])


@every_device
@every_kernel
def test_mixed_dtypes_work_and_empty_tensors_count_nothing(kernel: Measure, device: str) -> None:
    tensors = [
        torch.randn(300),
        torch.empty(0),
        torch.randn(40, 9).bfloat16(),
        torch.randn(33).half(),
        torch.empty(0, 5).half(),
        torch.randn(700),
        torch.zeros(10),
    ]
    assert_equals_reference(kernel, [t.to(device) for t in tensors])


@every_device
@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [1, 64, 257])
def test_a_bad_value_in_the_last_element_is_counted_and_excluded(
    kernel: Measure, device: str, dtype: torch.dtype, value: float, size: int
) -> None:
    values = torch.randn(size).to(dtype)
    values[-1] = value
    row = assert_equals_reference(kernel, [values.to(device), torch.randn(5).to(device=device, dtype=dtype)])[0]
    assert row[2:4].tolist() == [1, 1 if math.isnan(value) else 0]
    assert row[0].isfinite()


@every_device
@every_kernel
@pytest.mark.parametrize("size", [1, 700])  # part of a chunk, and three chunks
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-30, 1e-22, 1e-16, 1e-13, 1e13, 1e16, 1e19, 1e25, 3e38])
def test_norms_survive_squares_that_over_or_underflow(kernel: Measure, device: str, scale: float, size: int) -> None:
    same = torch.full((size,), scale)
    mixed = torch.linspace(-1, 1, size) * scale
    with_one_nan = same.clone()
    with_one_nan[0] = math.nan
    table = assert_equals_reference(kernel, [t.to(device) for t in (same, mixed, with_one_nan)])
    assert table[0, 2] == 0, "huge or tiny is not non-finite"


@every_device
@every_kernel
def test_ordinary_values_next_to_an_extreme_one_are_exact(kernel: Measure, device: str) -> None:
    large, small = torch.randn(1000), torch.randn(1000)
    large[500], small[3] = 3e38, 1e-44
    assert_equals_reference(kernel, [large.to(device), small.to(device), torch.tensor([1e30, 1e-30]).to(device)])


@every_device
@every_kernel
def test_more_tensors_than_are_folded_at_once(kernel: Measure, device: str) -> None:
    num = 1500 if device == "cuda" or kernel in WITHOUT_KERNELS else 520  # the kernel folds 512
    tensors = [torch.randn(1 + i % 5, device=device) for i in range(num)]
    tensors[-1][0] = math.nan
    table = assert_equals_reference(kernel, tensors)
    assert table[:, 2].nonzero().flatten().tolist() == [num - 1]


@every_device
@every_kernel
def test_large_tensors_keep_precision(kernel: Measure, device: str) -> None:
    size = 3_000_000 if device == "cuda" or kernel in WITHOUT_KERNELS else 20_000
    assert_equals_reference(kernel, [torch.randn(size, device=device) + 1.0])
