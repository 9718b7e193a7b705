"""Fast paths for small steps: each gives the result of the slow path, and falls back when it must."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad.act.buffers import BufferKeeper
from steadygrad.config import DetectConfig, Implementation
from steadygrad.detect import standard_rules
from steadygrad.facts import GradientTable, Reading
from steadygrad.measure import Meter, StepContext, Transfer
from steadygrad.measure.kernels import reference
from steadygrad.measure.measurement import split_by_size

SHAPES = [(64, 4), (64,), (3, 5, 7), (1,), (2, 2)]
LARGE = (600, 512)
"""More elements than are measured at once."""


def make_parameters(*, seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    named = []
    for i, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=generator)
        parameter.grad[..., 0] = 0.0
        named.append((f"p{i}", parameter))
    return named


def measure_twice(named: list[tuple[str, Tensor]], loss: Tensor | None = None) -> tuple[Any, list[float]]:
    """Measure like the second step of a run, which may use the fast path."""
    meter = Meter(named, max_norm=0.5)
    meter.measure(loss)
    m = meter.measure(loss)
    assert m is not None
    return m, list(m.take_to_host(Transfer()))


# --- all gradients at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [SHAPES, [*SHAPES[:2], LARGE, *SHAPES[2:], LARGE], [LARGE]])
def test_gradients_measured_on_the_fast_path_equal_the_specification(shapes: Sequence[tuple[int, ...]]) -> None:
    named = make_parameters(shapes=shapes)
    m, numbers = measure_twice(named, torch.tensor(2.5))
    expected = torch.empty(len(named), 5, dtype=torch.float64)
    reference.measure_table([p.grad for _, p in named if p.grad is not None], expected)
    # fp32 sums of a few hundred squares, or of 300,000 by BLAS, against float64 ones
    torch.testing.assert_close(torch.tensor(numbers[8:], dtype=torch.float64).view(-1, 5), expected, rtol=2e-6, atol=0)
    norm = math.hypot(*expected[:, 0].tolist())
    assert numbers[0] == 2.5
    assert numbers[1] == pytest.approx(norm, rel=1e-6)
    assert numbers[5] == pytest.approx(0.5 / (norm + 1e-6), rel=1e-6)
    assert m.packed.tolist() == numbers
    torch.testing.assert_close(m.flags, torch.tensor([0.0, 1.0 / numbers[5]]))


@pytest.mark.parametrize("large", [[], [LARGE]], ids=["small", "large"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e25, 1e-25])
def test_extreme_numbers_take_the_slow_path_and_are_exact(poison: float, large: list[tuple[int, ...]]) -> None:
    named = make_parameters(shapes=[*SHAPES, *large])
    for _, parameter in named[:1]:
        assert parameter.grad is not None
        parameter.grad.zero_()
        parameter.grad[3, 2] = poison
    m, numbers = measure_twice(named)
    reading = m.read(numbers, StepContext(step=1), skipped=False)
    first = reading.gradients["p0"]
    assert (first.num_nan, first.num_nonfinite) == (int(math.isnan(poison)), int(not math.isfinite(poison)))
    if math.isfinite(poison):
        assert first.norm == pytest.approx(poison, rel=1e-6)
    assert first.num_zeros == 64 * 4 - 1


@pytest.mark.parametrize("num", [1, 2, 5])
def test_measuring_changes_no_gradient(num: int) -> None:
    named = make_parameters()[:num]
    before = [p.grad.clone() for _, p in named if p.grad is not None]
    measure_twice(named)
    assert all(torch.equal(p.grad, kept) for (_, p), kept in zip(named, before) if p.grad is not None)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e25, 1e-25])
def test_a_large_gradient_among_small_ones_is_exact_too(poison: float) -> None:
    named = make_parameters(shapes=[*SHAPES[:2], LARGE, *SHAPES[2:]])
    gradient = named[2][1].grad
    assert gradient is not None
    gradient.zero_()
    gradient[300, 100], gradient[301, 7] = poison, -0.0
    m, numbers = measure_twice(named)
    found = m.read(numbers, StepContext(step=1), skipped=False).gradients["p2"]
    assert (found.num_nan, found.num_nonfinite) == (int(math.isnan(poison)), int(not math.isfinite(poison)))
    assert found.num_zeros == gradient.numel() - 1
    if math.isfinite(poison):
        assert found.norm == pytest.approx(poison, rel=1e-6)


def test_the_smallest_gradients_are_measured_at_once() -> None:
    assert split_by_size([8, 1 << 18, 1 << 17, 4]) == ([0, 2, 3], [1])
    assert split_by_size([1 << 19]) == ([], [0])
    assert split_by_size([]) == ([], [])


def test_plans_with_shared_memory_measure_their_own_gradients() -> None:
    named = make_parameters()
    meter = Meter(named)
    whole, second = [p.grad for _, p in named], named[1][1]
    expected = [p.grad.norm().item() for _, p in named if p.grad is not None]
    for has_second in (True, False, True, False):
        second.grad = whole[1] if has_second else None
        wanted = expected if has_second else [expected[0], *expected[2:]]
        # fp32 sums of a few hundred squares
        assert list(read_table(meter).norms.values()) == pytest.approx(wanted, rel=2e-6)


def test_the_buffer_for_magnitudes_has_the_dtype_of_the_gradients_under_any_default() -> None:
    named = make_parameters()
    expected = measure_twice(named)[1]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert measure_twice(named)[1] == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("is_part_of_a_graph", [False, True])
@pytest.mark.parametrize("change", ["reshaped", "strided", "negated"])
def test_views_of_the_same_numbers_give_the_same_bits(change: str, is_part_of_a_graph: bool) -> None:
    named = make_parameters()
    expected = measure_twice(named)[1]
    meter = Meter(named, max_norm=0.5)
    meter.measure()
    weight = named[0][1]
    assert weight.grad is not None
    gradient, weight.grad = weight.grad, None
    if change == "reshaped":
        weight.data = weight.data.view(4, 64)
        weight.grad = gradient.reshape(4, 64)
    elif change == "strided":
        weight.grad = torch.stack([gradient, gradient], dim=-1)[..., 0]
    else:
        weight.grad = torch.complex(torch.zeros_like(gradient), -gradient).conj().imag
        assert weight.grad.is_neg()
    weight.grad.requires_grad_(is_part_of_a_graph)
    m = meter.measure()
    assert m is not None
    assert m.take_to_host(Transfer())[1:] == expected[1:]


def test_a_gradient_that_disappears_or_changes_its_type_is_noticed() -> None:
    named = make_parameters()
    meter = Meter(named)
    assert meter.measure() is not None
    named[2][1].grad = None
    m = meter.measure()
    assert m is not None
    assert m.names == ("p0", "p1", "p3", "p4")
    sparse = nn.Parameter(torch.zeros(4, 2))
    sparse.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.tensor([[3.0, 4.0]]), (4, 2), check_invariants=True
    )
    named = [*make_parameters(), ("sparse", sparse)]
    m, numbers = measure_twice(named)
    assert m.read(numbers, StepContext(step=1), skipped=False).gradients["sparse"].norm == pytest.approx(5.0)


IMPLEMENTATIONS = [Implementation.FOREACH, Implementation.TRITON, Implementation.REFERENCE]


def make_meter(named: list[tuple[str, Tensor]], implementation: Implementation) -> Meter:
    """Return a Meter whose kernels run in Triton's interpreter: a Meter itself tries CUDA first."""
    if implementation is Implementation.TRITON:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("on a machine with CUDA Triton interprets nothing")
    meter = Meter(named, Implementation.AUTO if implementation is Implementation.TRITON else implementation)
    meter._implementation = implementation
    return meter


def read_table(meter: Meter) -> GradientTable:
    m = meter.measure()
    assert m is not None
    return m.read(m.take_to_host(Transfer()), StepContext(step=0), skipped=False).gradients


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [5, 40], ids=["shrunk", "grown"])
@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_a_parameter_of_another_size_is_measured_exactly(
    implementation: Implementation, size: int, is_large: bool
) -> None:
    named = [("resized", nn.Parameter(torch.zeros(20))), ("same", nn.Parameter(torch.zeros(7)))]
    if is_large:  # too many for the fast path
        named.append(("large", nn.Parameter(torch.zeros(1 << 18))))
    memory = torch.ones(40)  # both gradients start at the same address
    meter = make_meter(named, implementation)
    for num in (20, size):
        named[0][1].data, named[0][1].grad = torch.zeros(num), None
        named[0][1].grad = memory[:num]
        for _, parameter in named[1:]:
            parameter.grad = torch.ones_like(parameter)
        table = read_table(meter)
        # fp32 sums of equal squares
        assert [table["resized"].norm, table["same"].norm] == pytest.approx([num**0.5, 7**0.5], rel=1e-6)
        assert table.numels[:2] == (num, 7)


# --- rules ----------------------------------------------------------------------------------------------------------


def test_rules_that_skip_plain_readings_would_have_reported_and_learnt_nothing() -> None:
    table = GradientTable(("a", "b"), (4, 4), [1.0, 0.5, 0.0, 0.0, 0.0] * 2)
    left_out = [rule for rule in standard_rules(DetectConfig()) if not getattr(rule, "hears_plain", True)]
    assert len(left_out) >= 6
    for rule in left_out:
        before = rule.state_dict()
        for step in range(50):
            reading = Reading(
                step=step, loss=1.0 + 0.1 * (step % 3), grad_norm=1.4, finite_grad_norm=1.4, num_nonfinite=0, num_nan=0,
                clip_coefficient=1.0, skipped=False, learning_rates=(0.1,), gradients=table,
            )  # fmt: skip
            assert reading.is_plain
            assert list(rule.observe(reading)) == [], rule.name
        assert rule.state_dict() == before, rule.name


# --- buffers ---------------------------------------------------------------------------------------------------------


def test_a_buffer_added_later_is_protected_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    keeper = BufferKeeper(model)
    keeper.begin(anew=True)
    model.append(nn.BatchNorm1d(3))
    keeper.begin(anew=True)
    model(torch.randn(8, 3))
    keeper.restore()
    assert torch.equal(model[2].running_mean, torch.zeros(3))
    model[0].register_buffer("extra", torch.ones(2))
    keeper.begin(anew=True)
    model[0].extra.mul_(3.0)
    keeper.restore()
    assert torch.equal(model[0].extra, torch.ones(2))
