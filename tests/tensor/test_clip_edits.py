"""ClipValue, AdaptiveUnitClip and AdaGC on the gradients themselves: layouts, dtypes, extreme values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from steadygrad.clip import build_clipper
from steadygrad.clip.edit import multiply, scale_gradients
from steadygrad.config import AdaGC, AdaptiveUnitClip, ClipStrategy, ClipValue
from steadygrad.errors import UnsupportedError
from steadygrad.measure import Measurement, Meter

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def measure(**gradients: Tensor) -> Measurement:
    """Measure `gradients`; each parameter is zero unless `with_weights` is used."""
    return with_weights({name: (torch.zeros(g.shape, dtype=g.dtype), g) for name, g in gradients.items()})


def with_weights(pairs: dict[str, tuple[Tensor, Tensor]]) -> Measurement:
    named = []
    for name, (weight, gradient) in pairs.items():
        parameter = weight.clone().requires_grad_()
        parameter.grad = gradient
        named.append((name, parameter))
    m = Meter(named).measure(torch.tensor(1.0))
    assert m is not None
    return m


def make_embedding_gradient(rows: list[int], width: int = 4, height: int = 6) -> Tensor:
    """A sparse gradient as nn.Embedding(sparse=True) makes it: uncoalesced, with repeated rows."""
    values = torch.randn(len(rows), width)
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (height, width), check_invariants=True)


# --- ClipValue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_value_clamps_as_clip_grad_value_does(dtype: torch.dtype) -> None:
    gradients = {"a": torch.randn(70, 30).to(dtype), "b": torch.randn(5).to(dtype).mul_(0.01), "c": torch.randn(2, 3)}
    expected = {name: g.clone().clamp(-0.5, 0.5) for name, g in gradients.items()}

    build_clipper(ClipValue(value=0.5)).clip(measure(**gradients))

    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (100_003,)])
def test_value_reports_the_ratio_for_any_shape(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape) * 3
    before = torch.linalg.vector_norm(gradient.double())

    coefficient = build_clipper(ClipValue(value=0.1)).clip(measure(w=gradient))

    expected = (
        torch.linalg.vector_norm(gradient.double()) / before if gradient.numel() else torch.ones_like(coefficient)
    )
    # The norm is summed in fp32 pieces of 4096, and equal elements all round the same way.
    torch.testing.assert_close(coefficient, expected, rtol=5e-6, atol=0)


def test_value_keeps_nan_and_bounds_infinity() -> None:
    gradient = torch.tensor([math.nan, math.inf, -math.inf, 5.0, 0.1])
    build_clipper(ClipValue(value=1.0)).clip(measure(w=gradient))
    torch.testing.assert_close(gradient, torch.tensor([math.nan, 1.0, -1.0, 1.0, 0.1]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [1e6, 1e300, math.inf])
def test_a_value_beyond_the_dtype_clips_nothing(value: float) -> None:
    gradient = torch.tensor([65504.0, -1.0], dtype=torch.float16)
    assert build_clipper(ClipValue(value=value)).clip(measure(w=gradient)).item() == 1.0
    assert gradient.tolist() == [65504.0, -1.0]


def test_value_clamps_the_sum_of_a_sparse_gradient_not_its_parts() -> None:
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[2, 2, 0]]), torch.tensor([[0.6, 0.1], [0.6, 0.2], [-3.0, 0.0]]), (4, 2), check_invariants=True
    )
    m = measure(emb=gradient, other=torch.tensor([0.5]))
    before = math.sqrt(1.2**2 + 0.3**2 + 9 + 0.25)

    coefficient = build_clipper(ClipValue(value=1.0)).clip(m)

    torch.testing.assert_close(gradient.to_dense(), torch.tensor([[-1.0, 0.0], [0, 0], [1.0, 0.3], [0, 0]]))
    assert m.parameters[0].grad is gradient
    assert coefficient.item() == pytest.approx(math.sqrt(1 + 1 + 0.09 + 0.25) / before, rel=1e-6)


def test_value_refuses_a_complex_parameter_by_name_and_changes_no_gradient() -> None:
    plain = torch.tensor([9.0])
    m = measure(plain=plain, **{"fourier.weight": torch.randn(3, dtype=torch.complex64)})
    with pytest.raises(UnsupportedError, match=r"'fourier\.weight' is torch\.complex64"):
        build_clipper(ClipValue()).clip(m)
    assert plain.item() == 9.0


# --- AdaptiveUnitClip ----------------------------------------------------------------------------------------------


def clip_units_plainly(weight: Tensor, gradient: Tensor, ratio: float, eps: float) -> Tensor:
    """AGC for each unit, in float64."""
    weight, gradient = weight.detach().double(), gradient.double()
    if gradient.dim() < 2:
        largest, norm = ratio * max(weight.norm().item(), eps), gradient.norm().item()
        return gradient * (largest / norm) if norm > largest else gradient.clone()
    return torch.stack(
        [clip_units_plainly(w.flatten(), g.flatten(), ratio, eps).view_as(g) for w, g in zip(weight, gradient)]
    )


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
"""One rounding to the dtype; the weight norms are summed in fp32, which limits float64 too."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (9,), (8, 5), (6, 3, 2), (4, 3, 3, 3), (0, 4), (4, 0), (0,)])
def test_agc_clips_each_unit_to_its_share(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    gradient = (torch.randn(shape) * 10 ** (torch.rand(shape[:1] + (1,) * (len(shape) - 1)) * 4 - 3)).to(dtype)
    expected = clip_units_plainly(weight, gradient, 0.1, 1e-3) if gradient.numel() else gradient.double()

    build_clipper(AdaptiveUnitClip(ratio=0.1)).clip(with_weights({"w": (weight, gradient)}))

    # Below the smallest normal number of fp16 the spacing is absolute.
    absolute = 2**-24 if dtype is torch.float16 else 0
    torch.testing.assert_close(gradient.double(), expected, rtol=TOLERANCE[dtype], atol=absolute)


def test_agc_clips_the_large_unit_and_not_its_neighbour() -> None:
    weight, gradient = torch.ones(2, 4), torch.tensor([[0.001] * 4, [5.0] * 4])
    build_clipper(AdaptiveUnitClip(ratio=0.01)).clip(with_weights({"w": (weight, gradient)}))
    torch.testing.assert_close(gradient, torch.tensor([[0.001] * 4, [0.01] * 4]))


def test_agc_reads_a_transposed_gradient_by_its_rows() -> None:
    weight, memory = torch.randn(5, 3), torch.randn(3, 5)
    expected = clip_units_plainly(weight, memory.t().clone(), 0.1, 1e-3)
    build_clipper(AdaptiveUnitClip(ratio=0.1)).clip(with_weights({"w": (weight, memory.t())}))
    torch.testing.assert_close(memory.t().double(), expected, rtol=1e-6, atol=0)


def test_agc_lets_a_zero_unit_move() -> None:
    gradient = torch.randn(3, 4)
    build_clipper(AdaptiveUnitClip(ratio=0.01, eps=1e-3)).clip(measure(w=gradient))
    torch.testing.assert_close(gradient.norm(dim=1), torch.full((3,), 0.01 * 1e-3), rtol=1e-5, atol=0)


def test_agc_skips_parameters_by_part_of_their_name_and_still_counts_them() -> None:
    body, head = torch.full((2, 2), 3.0), torch.full((2, 2), 4.0)
    m = with_weights({"body.weight": (torch.ones(2, 2), body), "head.weight": (torch.ones(2, 2), head)})

    coefficient = build_clipper(AdaptiveUnitClip(exclude=("head",))).clip(m)

    assert torch.equal(head, torch.full((2, 2), 4.0))
    assert body.max() < 0.02
    after = math.hypot(body.norm(), head.norm())
    assert coefficient.item() == pytest.approx(after / math.hypot(6.0, 8.0), rel=1e-6)


def test_agc_with_every_parameter_skipped_does_nothing() -> None:
    gradient = torch.full((2, 2), 1e3)
    assert build_clipper(AdaptiveUnitClip(exclude=("",))).clip(measure(w=gradient)).item() == 1.0
    assert torch.equal(gradient, torch.full((2, 2), 1e3))


def test_agc_scales_a_huge_finite_gradient_instead_of_zeroing_it() -> None:
    gradient = torch.tensor([[1e25, -1e25], [1e-3, 0.0]])
    build_clipper(AdaptiveUnitClip(ratio=0.1)).clip(with_weights({"w": (torch.ones(2, 2), gradient)}))
    torch.testing.assert_close(gradient, torch.tensor([[0.1, -0.1], [1e-3, 0.0]]))


def test_agc_never_makes_a_finite_gradient_nonfinite_because_of_its_weight() -> None:
    gradient = torch.randn(3, 2)
    weight = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [1e30, 1e30]])
    build_clipper(AdaptiveUnitClip()).clip(with_weights({"w": (weight, gradient)}))
    assert gradient.isfinite().all()
    assert gradient.all()


def test_agc_clips_the_rows_of_a_sparse_gradient() -> None:
    gradient = make_embedding_gradient([5, 1, 5, 3])
    weight = torch.randn(6, 4)
    expected = clip_units_plainly(weight, gradient.to_dense(), 0.1, 1e-3)
    m = with_weights({"emb": (weight, gradient)})
    before = gradient.to_dense().norm()

    coefficient = build_clipper(AdaptiveUnitClip(ratio=0.1)).clip(m)

    torch.testing.assert_close(gradient.to_dense().double(), expected, rtol=1e-6, atol=0)
    assert m.parameters[0].grad is gradient
    assert coefficient.item() == pytest.approx((expected.norm() / before).item(), rel=1e-6)


def test_agc_names_a_sparse_parameter_with_unknown_units() -> None:
    gradient = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedError, match=r"'graph\.edges' is sparse"):
        build_clipper(AdaptiveUnitClip()).clip(measure(**{"graph.edges": gradient}))


def test_agc_scales_complex_units_by_their_modulus() -> None:
    gradient = torch.tensor([[3 + 4j], [0.001j]])
    weight = torch.tensor([[2.0 + 0j], [2.0 + 0j]])
    build_clipper(AdaptiveUnitClip(ratio=0.5)).clip(with_weights({"w": (weight, gradient)}))
    torch.testing.assert_close(gradient, torch.tensor([[0.6 + 0.8j], [0.001j]]))


# --- AdaGC ---------------------------------------------------------------------------------------------------------


def test_adagc_scales_sparse_complex_and_scalar_gradients() -> None:
    gradients = {
        "emb": make_embedding_gradient([5, 1, 5]),
        "fourier": torch.randn(3, dtype=torch.complex64),
        "gain": torch.tensor(2.0),
        "half": torch.randn(7).to(torch.bfloat16),
    }
    before = {name: g.to_dense().clone() for name, g in gradients.items()}

    coefficient = build_clipper(AdaGC(max_norm=0.5)).clip(measure(**gradients))

    assert 0 < coefficient.item() < 1
    for name, gradient in gradients.items():
        scale = 2**-8 if name == "half" else 1e-6  # one rounding to the dtype
        torch.testing.assert_close(gradient.to_dense(), before[name] * coefficient.item(), rtol=scale, atol=0)


def test_adagc_clips_a_huge_finite_gradient_to_its_average() -> None:
    clipper = build_clipper(AdaGC(warmup=1, max_norm=10.0))
    clipper.clip(measure(w=torch.tensor([3.0, 4.0])))
    gradient = torch.tensor([3e25, 4e25])

    coefficient = clipper.clip(measure(w=gradient))

    torch.testing.assert_close(gradient, 1.05 * torch.tensor([3.0, 4.0]))
    assert coefficient.item() == pytest.approx(1.05e-25, rel=1e-6)


# --- scaling in half precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_a_factor_too_small_for_fp16_does_not_zero_an_fp16_gradient(shape: tuple[int, ...]) -> None:
    gradient = torch.full(shape, 60000.0, dtype=torch.float16)
    scale_gradients([gradient], torch.tensor([1e-9], dtype=torch.float64), [1])
    torch.testing.assert_close(gradient, torch.full(shape, 6e-5, dtype=torch.float16), rtol=2**-9, atol=0)


def test_a_bf16_gradient_is_multiplied_in_fp32_and_rounded_once() -> None:
    gradient = torch.randn(1000).to(torch.bfloat16)
    expected = (gradient.double() * 0.7734).to(torch.bfloat16)
    scale_gradients([gradient], torch.tensor([0.7734], dtype=torch.float64), [1])
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    "settings", [ClipValue(value=0.1), AdaptiveUnitClip(), AdaGC(max_norm=0.1)], ids=lambda s: s.kind
)
def test_edits_reach_the_gradients_of_parameters_that_require_grad(settings: ClipStrategy) -> None:
    layer = torch.nn.Linear(4, 3)
    loss = layer(torch.randn(2, 4)).square().sum() * 100
    loss.backward()
    m = Meter(list(layer.named_parameters())).measure(loss)
    assert m is not None
    before = m.norm.item()

    build_clipper(settings).clip(m)

    after = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
    assert after.item() < 0.5 * before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_multiplied_by_the_unrounded_factor(dtype: torch.dtype) -> None:
    factor = 0.3337  # 0.333984375 in bfloat16, 0.33374... in float16
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(257, generator=generator).to(dtype) for _ in range(3)]
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), gradients[0][:2].clone(), (6,), check_invariants=True)
    expected = [(g.double() * factor).to(dtype) for g in (*gradients, sparse.coalesce().values())]

    multiply([*gradients, sparse], factor)

    for found, wanted in zip((*gradients, sparse.coalesce().values()), expected):
        # one rounding: to the nearest number of the dtype, or its neighbour if fp32 is in between
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(dtype).eps / 2, atol=0)
