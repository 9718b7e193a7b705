"""The safe functions: equal to the plain ones on healthy inputs, finite otherwise, and never a host read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from steadygrad.losses import (
    masked_mean,
    safe_acos,
    safe_asin,
    safe_atan2,
    safe_div,
    safe_log,
    safe_log_softmax,
    safe_norm,
    safe_normalize,
    safe_softmax,
    safe_sqrt,
    safe_std,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
HALF = [torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Piece:
    safe: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    low: float
    """Healthy inputs are uniform between `low` and `high`."""
    high: float
    num_inputs: int = 1
    exact: bool = True
    """Bit for bit equal to plain; otherwise equal up to the order of a sum."""
    autocast_keeps: bool = True
    """CUDA's autocast runs the plain operation in fp32 and returns fp32."""


PIECES: dict[str, Piece] = {
    "sqrt": Piece(safe_sqrt, torch.sqrt, 0.01, 5.0, autocast_keeps=False),
    "log": Piece(safe_log, torch.log, 0.01, 5.0),
    "div": Piece(safe_div, torch.div, 0.1, 5.0, num_inputs=2, autocast_keeps=False),
    "div_negative": Piece(safe_div, torch.div, -5.0, -0.1, num_inputs=2, autocast_keeps=False),
    "acos": Piece(safe_acos, torch.acos, -0.95, 0.95),
    "asin": Piece(safe_asin, torch.asin, -0.95, 0.95),
    "atan2": Piece(safe_atan2, torch.atan2, 0.1, 3.0, num_inputs=2, exact=False, autocast_keeps=False),
    "norm": Piece(lambda x: safe_norm(x, -1), lambda x: torch.linalg.vector_norm(x, dim=-1), -2.0, 2.0),
    "normalize": Piece(safe_normalize, lambda x: F.normalize(x, dim=-1), -2.0, 2.0),
    "std": Piece(lambda x: safe_std(x, -1), lambda x: x.std(-1), -2.0, 2.0, exact=False, autocast_keeps=False),
    "softmax": Piece(safe_softmax, lambda x: x.softmax(-1), -5.0, 5.0),
    "log_softmax": Piece(safe_log_softmax, lambda x: x.log_softmax(-1), -5.0, 5.0),
    "masked_mean": Piece(lambda x: masked_mean(x, None, -1), lambda x: x.mean(-1), -5.0, 5.0),
}

every_piece = pytest.mark.parametrize("name", list(PIECES))


def make_inputs(piece: Piece, dtype: torch.dtype, shape: tuple[int, ...] = (6, 5)) -> list[Tensor]:
    spread = piece.high - piece.low
    made = [piece.low + spread * torch.rand(shape, dtype=torch.float64) for _ in range(piece.num_inputs)]
    return [x.to(dtype).requires_grad_() for x in made]


def differentiate(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    value = function(*inputs)
    return value, torch.autograd.grad(value.sum(), inputs)


def assert_finite(function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    value, gradients = differentiate(function, inputs)
    assert value.isfinite().all(), f"value {value.tolist()} of {[x.tolist() for x in inputs]}"
    for gradient in gradients:
        assert gradient.isfinite().all(), f"gradient {gradient.tolist()} at {[x.tolist() for x in inputs]}"


# --- equal to the plain operation on healthy inputs -----------------------------------------------------------------


@every_piece
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_healthy_values_and_gradients_equal_the_plain_operation(name: str, dtype: torch.dtype) -> None:
    piece = PIECES[name]
    inputs = make_inputs(piece, dtype)

    value, gradients = differentiate(piece.safe, inputs)
    plain_value, plain_gradients = differentiate(piece.plain, inputs)

    assert value.dtype == plain_value.dtype
    if piece.exact:
        assert torch.equal(value, plain_value)
    torch.testing.assert_close(value, plain_value)
    # Gradients pass through a scaling by a power of two and a select: the same up to the order of operations.
    torch.testing.assert_close(gradients, plain_gradients)


@every_piece
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_value_equals_float64_within_one_rounding(name: str, dtype: torch.dtype) -> None:
    piece = PIECES[name]
    inputs = make_inputs(piece, dtype)
    value = piece.safe(*inputs)
    expected = piece.plain(*(x.double() for x in inputs))
    assert value.dtype == dtype
    # Half precision is computed in fp32 and rounded once; sums of five fp32 numbers lose two more digits of it.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(value.double(), expected, rtol=eps if dtype in HALF else 8 * eps, atol=4 * eps)


@every_piece
def test_gradcheck_on_healthy_inputs(name: str) -> None:
    piece = PIECES[name]
    inputs = make_inputs(piece, torch.float64, (2, 4))
    assert gradcheck(piece.safe, inputs)
    assert gradgradcheck(piece.safe, inputs)


@every_piece
@pytest.mark.parametrize("dtype", HALF)
def test_under_autocast_the_dtype_is_that_of_cudas_plain_operation(name: str, dtype: torch.dtype) -> None:
    piece = PIECES[name]
    inputs = make_inputs(piece, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = piece.safe(*inputs)
    assert value.dtype == (torch.float32 if piece.autocast_keeps else dtype)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA's own autocast")
@every_piece
def test_on_cuda_the_dtype_is_that_of_the_plain_operation(name: str) -> None:
    piece = PIECES[name]
    for dtype in (torch.float16, torch.float32):
        inputs = [x.detach().cuda() for x in make_inputs(piece, dtype)]
        with torch.autocast("cuda", dtype=torch.float16):
            if name != "masked_mean":  # a mean is not on autocast's list, but a sum is; losses return fp32
                assert piece.safe(*inputs).dtype == piece.plain(*inputs).dtype


# --- finite everywhere ----------------------------------------------------------------------------------------------

EDGES = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.2e-38, 1e-38, -1e-38, 1e-30, 1e-19, 1e-8, 6e-8, 1e38, -1e38, 3.4e38]


def draw_numbers(dtype: torch.dtype) -> st.SearchStrategy[float]:
    """Every finite number of the dtype: hypothesis finds corner cases, and the usual ones are always included."""
    largest = float(torch.finfo(dtype).max)
    width = 16 if dtype is torch.float16 else 32
    top = largest if width == 16 else 3.3895313892515355e38  # bfloat16's largest, a float32 as well
    edges = st.sampled_from([max(-largest, min(largest, x)) for x in EDGES])
    return edges | st.floats(-top, top, width=width, allow_nan=False)


@every_piece
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_value_and_gradient_are_finite_for_every_finite_input(name: str, dtype: torch.dtype, data: Any) -> None:
    piece = PIECES[name]
    rows = st.lists(draw_numbers(dtype), min_size=4, max_size=4)
    inputs = [torch.tensor([data.draw(rows)]).to(dtype).requires_grad_() for _ in range(piece.num_inputs)]
    assert_finite(piece.safe, inputs)


# Inputs on which the plain operation fails, to show that each protection is needed.
BROKEN: dict[str, list[list[float]]] = {
    "sqrt": [[0.0], [-1e-9]],
    "log": [[0.0], [-1.0], [1e-45]],
    "div": [[1.0, 0.0], [0.0, 0.0], [1e38, 1e-12], [1e20, 1e-12], [1.0, 1e-30]],
    "acos": [[1.0], [-1.0], [1.0000001]],
    "asin": [[1.0], [-1.0], [-1.0000001]],
    "atan2": [[math.inf, 1.0], [1.0, -math.inf]],
}


@pytest.mark.parametrize(("name", "numbers"), [(n, case) for n, cases in BROKEN.items() for case in cases])
def test_the_safe_operation_is_finite_where_the_plain_one_fails(name: str, numbers: list[float]) -> None:
    piece = PIECES[name]
    inputs = [torch.tensor([x], requires_grad=True) for x in numbers]

    value, gradients = differentiate(piece.plain, inputs)
    assert not all(t.isfinite().all() for t in (value, *gradients))

    assert_finite(piece.safe, inputs)


@every_piece
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_is_never_hidden(name: str, value: float) -> None:
    piece = PIECES[name]
    if value != value or name in ("norm", "normalize", "std", "masked_mean"):
        inputs = [torch.tensor([[0.5, value, 0.25]]) for _ in range(piece.num_inputs)]
        assert not piece.safe(*inputs).isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,), (1, 1), ()])
@every_piece
def test_empty_and_single_inputs_have_finite_gradients(name: str, shape: tuple[int, ...]) -> None:
    piece = PIECES[name]
    if shape == () and name == "masked_mean":
        pytest.skip("there is no last dimension to take the mean of")
    assert_finite(piece.safe, make_inputs(piece, torch.float32, shape))


@every_piece
def test_the_host_reads_nothing(name: str) -> None:
    piece = PIECES[name]
    with FakeTensorMode():  # a tensor without values: reading one raises
        inputs = [torch.empty(4, 3, requires_grad=True) for _ in range(piece.num_inputs)]
        value, _ = differentiate(piece.safe, inputs)
        with pytest.raises(DataDependentOutputException):
            value.sum().item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_piece
def test_on_cuda_it_never_waits(name: str) -> None:
    piece = PIECES[name]
    inputs = [x.detach().cuda().requires_grad_() for x in make_inputs(piece, torch.float32)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        differentiate(piece.safe, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_piece
def test_it_compiles_as_one_graph(name: str) -> None:
    piece = PIECES[name]
    inputs = make_inputs(piece, torch.float32)
    compiled = torch.compile(piece.safe, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(differentiate(compiled, inputs), differentiate(piece.safe, inputs))
    torch.compiler.reset()


# --- guarantees of single functions ---------------------------------------------------------------------------------


def test_a_root_and_its_gradient_are_zero_at_and_below_zero() -> None:
    x = torch.tensor([0.0, -0.0, -3.0], requires_grad=True)
    value, (gradient,) = differentiate(safe_sqrt, [x])
    assert value.tolist() == [0.0, 0.0, 0.0]
    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_below_eps_the_root_is_a_line_and_continuous() -> None:
    x = torch.tensor([1e-6, 5e-7, 1e-12, 1.0], dtype=torch.float64, requires_grad=True)
    value, (gradient,) = differentiate(lambda v: safe_sqrt(v, eps=1e-6), [x])
    torch.testing.assert_close(value, torch.tensor([1e-3, 5e-4, 1e-9, 1.0], dtype=torch.float64))
    torch.testing.assert_close(gradient, torch.tensor([500.0, 1000.0, 1000.0, 0.5], dtype=torch.float64))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: safe_sqrt(x, eps=1e-24),
        lambda x: safe_log(x, eps=1e-18),
        safe_norm,
        safe_normalize,
        safe_std,
        safe_softmax,
        safe_log_softmax,
    ],
    ids=["sqrt", "log", "norm", "normalize", "std", "softmax", "log_softmax"],
)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e-24, 1e-18, 1e-8, 1.0, 1e30])
def test_second_derivatives_are_finite(function: Callable[[Tensor], Tensor], size: float) -> None:
    for direction in ([1.0, 1.0, 1.0], [1.0, 0.0, -1.0]):
        x = (size * torch.tensor(direction)).requires_grad_()
        value = function(x)
        weights = torch.linspace(0.5, 1.0, value.numel()).reshape(value.shape)
        (gradient,) = torch.autograd.grad((value * weights).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((gradient * torch.tensor([1.0, -0.5, 0.25])).sum(), x)
        assert gradient.isfinite().all()
        assert second.isfinite().all()


def test_a_gradient_penalty_on_a_norm_at_zero_is_finite() -> None:
    layer = torch.nn.Linear(3, 3)
    x = torch.zeros(2, 3, requires_grad=True)
    torch.nn.init.zeros_(layer.bias)
    (gradient,) = torch.autograd.grad(safe_norm(layer(x), -1).sum(), x, create_graph=True)
    penalty = (safe_norm(gradient, -1) - 1).square().mean()
    penalty.backward()
    assert penalty.item() == 1.0
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_a_quotient_keeps_the_sign_of_its_denominator() -> None:
    quotient = safe_div(torch.ones(4), torch.tensor([-1e-20, 1e-20, -2.0, 0.0]))
    assert quotient.sign().tolist() == [-1.0, 1.0, -1.0, 1.0]
    assert quotient[2].item() == -0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quotient_too_large_for_the_dtype_is_its_largest_number(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    assert safe_div(torch.tensor([top, -top], dtype=dtype), 1e-3).tolist() == [top, -top]


def test_a_quotient_by_infinity_is_zero_with_zero_gradients() -> None:
    top, bottom = torch.tensor([3.0, 1e38], requires_grad=True), torch.tensor([math.inf, -math.inf], requires_grad=True)
    value, gradients = differentiate(safe_div, [top, bottom])
    assert value.tolist() == [0.0, 0.0]
    assert all(gradient.tolist() == [0.0, 0.0] for gradient in gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_quotients_equal_torchs(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    x = torch.tensor([top, 0.75 * top, -0.5 * top], dtype=dtype)
    assert torch.equal(safe_div(x, torch.ones(3, dtype=dtype)), x)


def test_either_side_of_a_quotient_may_be_a_number() -> None:
    x = torch.tensor([2.0, 0.0])
    assert safe_div(1.0, x, eps=1e-3).tolist() == [0.5, pytest.approx(1000.0)]
    assert safe_div(x, 4).tolist() == [0.5, 0.0]
    assert safe_div(torch.tensor([7]), torch.tensor([2])).tolist() == [3.5]


@pytest.mark.parametrize("numbers", [(math.inf, 1.0), (1.0, -math.inf), (math.inf, -math.inf), (0.0, -0.0)])
def test_angles_at_infinity_and_zero_equal_torchs(numbers: tuple[float, float]) -> None:
    y, x = (torch.tensor([v], requires_grad=True) for v in numbers)
    assert torch.equal(safe_atan2(y, x), torch.atan2(y, x))
    assert_finite(safe_atan2, [y, x])


def test_the_angle_of_tiny_coordinates_has_the_true_gradient_where_torchs_is_zero() -> None:
    y, x = (torch.tensor([v], requires_grad=True) for v in (3e-30, 4e-30))
    _, (plain, _) = differentiate(torch.atan2, [y, x])
    _, gradients = differentiate(safe_atan2, [y, x])
    assert plain.item() == 0.0
    torch.testing.assert_close(gradients, (torch.tensor([1.6e29]), torch.tensor([-1.2e29])))


@pytest.mark.parametrize("size", [1.2e-38, 1e-30, 1e-12, 1.0, 1e19, 3e38])
def test_a_norm_is_limited_only_by_the_range_of_its_result(size: float) -> None:
    x = torch.tensor([size, 0.5 * size, 0.0])
    expected = torch.linalg.vector_norm(x.double())
    # Half of the smallest one is subnormal and has one digit less.
    torch.testing.assert_close(safe_norm(x).double(), expected, rtol=3e-7, atol=2e-45)
    if size > 1e-11:  # eps of F.normalize
        torch.testing.assert_close(safe_normalize(x).double(), x.double() / expected, rtol=3e-7, atol=0)


def test_without_dimensions_the_whole_tensor_is_used_as_in_torch() -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(safe_norm(x), torch.linalg.vector_norm(x))
    torch.testing.assert_close(safe_std(x), x.std())


def test_a_norm_of_fp16_does_not_overflow_internally() -> None:
    x = torch.full((16,), 1000.0, dtype=torch.float16)
    assert safe_norm(x).item() == 4000.0
    assert safe_norm(torch.full((10_000,), 1000.0, dtype=torch.float16)).item() == 65504.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_unit_vector_of_zero_and_its_gradient_are_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=dtype, requires_grad=True)
    value, (gradient,) = differentiate(lambda v: safe_normalize(v) * torch.tensor([1.0, 0.0], dtype=dtype), [x])
    assert value[0].tolist() == [0.0, 0.0]
    assert gradient[0].tolist() == [0.0, 0.0]
    assert gradient[1].abs().sum() > 0


@pytest.mark.parametrize("dim", [0, -1, (0, 2), None])
def test_norms_and_deviations_accept_the_dimensions_that_torch_accepts(dim: int | tuple[int, ...] | None) -> None:
    x = torch.randn(3, 4, 5)
    for keepdim in (False, True):
        torch.testing.assert_close(
            safe_norm(x, dim, keepdim=keepdim), torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim)
        )
        torch.testing.assert_close(
            safe_std(x, dim, correction=0, keepdim=keepdim), x.std(dim, correction=0, keepdim=keepdim)
        )


@pytest.mark.parametrize("values", [[7.0], [], [2.5, 2.5, 2.5], [1e38, -1e38], [1e-40, 0.0]])
def test_a_deviation_of_one_no_equal_or_extreme_samples_is_finite(values: list[float]) -> None:
    assert_finite(safe_std, [torch.tensor(values, requires_grad=True)])
    if len(set(values)) < 2:
        assert safe_std(torch.tensor(values)).item() == 0.0


@pytest.mark.parametrize("function", [safe_softmax, safe_log_softmax])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fully_masked_row_and_its_gradients_are_zero(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, math.nan], [0.5, 1.5, 2.5]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[False, False, False], [True, True, False]])

    value, (gradient,) = differentiate(lambda v: function(v, mask=mask) * torch.tensor([0.1, 0.7, 0.2]).to(dtype), [x])

    assert value[0].tolist() == [0.0, 0.0, 0.0]
    assert gradient[0].tolist() == [0.0, 0.0, 0.0]
    assert gradient[1, 2].item() == 0.0
    assert value.isfinite().all()
    expected = x[1, :2].detach().double().softmax(-1)
    got = function(x, mask=mask)[1].detach().double()
    got = got if function is safe_softmax else got.exp()
    torch.testing.assert_close(got, torch.cat([expected, torch.zeros(1).double()]), rtol=0, atol=0.01)


@pytest.mark.parametrize("function", [safe_softmax, safe_log_softmax])
def test_a_row_of_minus_infinity_has_finite_gradients_without_a_mask(function: Callable[..., Tensor]) -> None:
    x = torch.full((1, 3), -math.inf, requires_grad=True)
    _, (plain,) = differentiate(lambda v: v.softmax(-1) * torch.arange(3), [x])
    assert plain.isnan().all()
    value, (gradient,) = differentiate(lambda v: function(v) * torch.arange(3), [x])
    assert value.tolist() == gradient.tolist() == [[0.0, 0.0, 0.0]]


def test_entropy_of_a_masked_distribution_is_finite() -> None:
    x = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    assert_finite(lambda v: -(safe_softmax(v) * safe_log_softmax(v)).sum(-1), [x])


@pytest.mark.parametrize("dim", [None, 0, (0, 1)])
def test_a_masked_mean_is_the_mean_of_the_rest(dim: int | tuple[int, ...] | None) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0]])
    kept = torch.where(mask.bool(), x, math.nan)
    expected = kept.nanmean() if dim is None else kept.nanmean(dim)
    torch.testing.assert_close(masked_mean(kept, mask, dim), expected.nan_to_num(0.0))


def test_a_mask_may_be_broadcast() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert masked_mean(x, torch.tensor([[True], [False]])).item() == 1.0
    assert masked_mean(x, torch.tensor([True, False, False]), 1).tolist() == [0.0, 3.0]


def test_the_mean_of_no_elements_is_a_zero_connected_to_the_graph() -> None:
    x = torch.full((3,), math.nan, requires_grad=True)
    mean = masked_mean(x, torch.zeros(3))
    mean.backward()
    assert mean.item() == 0.0
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 0.0]
