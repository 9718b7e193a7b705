"""The kernels that check weights and Adam's moments equal the specification in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training import DEVICES, loss_of, make_batches, make_model

from steadygrad.measure.kernels import looks
from steadygrad.measure.leading import AdamWatch
from steadygrad.measure.leading import _measure as measure_rms

triton_looks = pytest.importorskip("steadygrad.measure.kernels.triton_looks")
DEVICE = DEVICES[-1]
"""CUDA if available; otherwise the interpreter runs the kernels on the CPU."""


def assert_equals_plain(tensors: list[Tensor], chunk: int = 256) -> tuple[Tensor, Tensor]:
    numbers, hashes = triton_looks.WeightLook(tensors, chunk=chunk).look(tensors)
    expected, expected_hashes = looks.look_at(tensors, [True] * len(tensors))
    torch.testing.assert_close(numbers, expected, rtol=2e-6, atol=0, equal_nan=True)  # fp32 sums of squares
    assert torch.equal(hashes, expected_hashes)
    return numbers, hashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 63, 64, 255, 256, 257, 1000])
def test_a_check_of_weights_equals_the_specification(dtype: torch.dtype, size: int) -> None:
    assert_equals_plain([torch.randn(size, dtype=dtype, device=DEVICE)])


def test_dtypes_layouts_and_empty_tensors_can_be_mixed() -> None:
    tensors = [
        torch.randn(300, device=DEVICE),
        torch.empty(0, device=DEVICE),
        torch.randn(9, 40, device=DEVICE).bfloat16().t(),
        torch.randn(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last),
        torch.randn(33, device=DEVICE).half(),
    ]
    assert all(map(triton_looks.fits, tensors))
    assert_equals_plain(tensors)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_are_counted(value: float) -> None:
    tensors = [torch.randn(600, device=DEVICE), torch.randn(5, device=DEVICE)]
    tensors[0][-1] = value
    numbers, _ = assert_equals_plain(tensors)
    assert numbers[0, :2].tolist() == [1, 1 if math.isnan(value) else 0]
    assert numbers[1, :2].tolist() == [0, 0]


def test_one_bit_changes_only_the_hash_of_its_tensor() -> None:
    tensors = [torch.randn(600, device=DEVICE) for _ in range(3)]
    plan = triton_looks.WeightLook(tensors, chunk=256)
    _, before = plan.look(tensors)
    tensors[1].view(torch.int32)[599] ^= 1
    _, after = plan.look(tensors)
    assert (before != after).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("shape", "stride"), [((4, 4), (8, 1)), ((4, 4), (0, 1)), ((3,), (2,))], ids=["gaps", "expanded", "strided"]
)
def test_a_layout_that_the_kernels_would_misread_is_refused(shape: Any, stride: Any) -> None:
    assert not triton_looks.fits(torch.randn(64).as_strided(shape, stride))


def test_a_tensor_with_freed_or_foreign_memory_is_refused() -> None:
    whole = torch.randn(64, device=DEVICE)
    freed = whole[8:40].view(4, 8)
    assert triton_looks.fits(freed)
    whole.untyped_storage().resize_(0)  # like a parameter under FSDP between two uses
    assert not triton_looks.fits(freed)
    # Like DTensor: it has a shape and a dtype, but its elements are elsewhere.
    wrapper = Tensor._make_wrapper_subclass(DTensor, (4, 8), dtype=torch.float32, device=DEVICE)  # type: ignore[attr-defined]
    assert not triton_looks.fits(wrapper)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("capturable", [False, True])
def test_the_rms_equals_the_specification(num_steps: int, capturable: bool) -> None:
    if capturable and DEVICE == "cpu":
        pytest.skip("a step counter on the device needs CUDA")
    model = make_model(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-3, capturable=capturable)
    for batch in make_batches(num_steps, DEVICE):
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.step()
    group = optimizer.param_groups[0]
    held = [(p, group, optimizer.state[p]) for p in model.parameters()]
    states = [triton_looks.read_state(*one) for one in held]
    found = triton_looks.RmsLook(states, chunk=64).look(states)
    torch.testing.assert_close(found, torch.stack([measure_rms(*one) for one in held]), rtol=1e-5, atol=0)


def test_the_rms_before_the_first_step_of_adam_is_nan() -> None:
    weight = nn.Parameter(torch.ones(8, device=DEVICE))
    weight.grad = torch.ones(8, device=DEVICE)
    state = triton_looks.read_state(
        weight, {"betas": (0.9, 0.999)}, {"step": torch.zeros(()), "exp_avg_sq": torch.zeros(8, device=DEVICE)}
    )
    assert triton_looks.RmsLook([state]).look([state]).isnan().all()


def test_many_tensors_in_host_memory_equal_one_at_a_time() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (700, 300), (), (1,), (looks.CHUNK,), (looks.CHUNK + 1,), (0, 4), (3 * looks.CHUNK,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors += [t.to(d) for t in tensors[:3] for d in (torch.bfloat16, torch.float64, torch.complex64)]
    tensors += [torch.randn(5, 7).t(), torch.tensor([1.0, math.nan, math.inf]), torch.full((4,), 3e38)]
    hashed = [i % 5 != 2 for i in range(len(tensors))]
    numbers, hashes = looks.look_at(tensors, hashed)
    expected = torch.stack([looks._measure(tensor) for tensor in tensors])
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0, equal_nan=True)
    assert hashes.tolist() == [int(looks.hash_bits(t)) if yes else 0 for t, yes in zip(tensors, hashed)]


def test_adams_ratio_of_many_tensors_in_host_memory_equals_one_at_a_time() -> None:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(3,), (40, 7), (1,)]]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-3)
    watch = AdamWatch([optimizer], [(str(i), p) for i, p in enumerate(parameters)])
    for num_steps in range(1, 4):
        for i, p in enumerate(parameters):
            p.grad = torch.randn_like(p) * 10.0 ** -(2 * i)
        optimizer.step()
        found, group = watch.measure(), optimizer.param_groups[0]
        assert found is not None
        expected = {str(i): float(measure_rms(p, group, optimizer.state[p])) for i, p in enumerate(parameters)}
        assert found.read() == pytest.approx(expected, rel=1e-6), num_steps


def test_moments_on_another_device_are_not_passed_to_the_kernels() -> None:
    parameter = nn.Parameter(torch.randn(4, device=DEVICE))
    parameter.grad = torch.randn(4, device=DEVICE)
    group, step = {"betas": (0.9, 0.95), "eps": 1e-8}, torch.tensor(1.0)
    there = {"exp_avg_sq": torch.ones(4, device=DEVICE), "step": step}
    assert triton_looks.read_state(parameter, group, there) is not None
    assert triton_looks.read_state(parameter, group, {**there, "exp_avg_sq": torch.ones(4, device="meta")}) is None
