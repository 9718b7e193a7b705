"""What every loss guarantees: the plain value in float64, true gradients, finite on every input, no host read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.nn import functional as F

from steadygrad.errors import ConfigError
from steadygrad.losses import (
    clip_loss,
    dice,
    focal,
    info_nce,
    iou,
    masked_cross_entropy,
    normalized_mse,
    stable_bce_with_logits,
    stable_kl,
    structure_loss,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SMALL = 3.0  # healthy logits


@dataclass(frozen=True)
class Case:
    """A loss of a differentiable tensor `x` of `shape`, with a target made from that shape."""

    safe: Callable[..., Tensor]
    plain: Callable[[Tensor, Tensor], Tensor]
    """The formula in float64, with the default reduction."""
    make_target: Callable[[tuple[int, ...]], Tensor]
    shape: tuple[int, ...] = (4, 5)
    none_shape: tuple[int, ...] = (4,)
    """Shape of reduction="none"."""


def draw_labels(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, max(shape[1], 1), (shape[0], *shape[2:]))


def draw_hard(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 2, shape).float()


def draw_vectors(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape)


def draw_probabilities(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape).softmax(-1)


def plain_focal(x: Tensor, y: Tensor) -> Tensor:
    p = x.sigmoid()
    p_t = p * y + (1 - p) * (1 - y)
    alpha_t = 0.25 * y + 0.75 * (1 - y)
    return (alpha_t * (1 - p_t) ** 2 * F.binary_cross_entropy_with_logits(x, y, reduction="none")).mean()


def plain_dice(x: Tensor, y: Tensor) -> Tensor:
    p, y = x.sigmoid().flatten(1), y.flatten(1)
    return (1 - (2 * (p * y).sum(1) + 1) / (p.sum(1) + y.sum(1) + 1)).mean()


def plain_iou(x: Tensor, y: Tensor) -> Tensor:
    p, y = x.sigmoid().flatten(1), y.flatten(1)
    overlap = (p * y).sum(1)
    return (1 - (overlap + 1) / (p.sum(1) + y.sum(1) - overlap + 1)).mean()


def plain_structure(x: Tensor, y: Tensor) -> Tensor:
    weight = 1 + 5 * (F.avg_pool2d(y, 31, stride=1, padding=15) - y).abs()
    bce = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    wbce = (weight * bce).sum((2, 3)) / weight.sum((2, 3))
    p = x.sigmoid()
    overlap, union = (p * y * weight).sum((2, 3)), ((p + y) * weight).sum((2, 3))
    return (wbce + 1 - (overlap + 1) / (union - overlap + 1)).mean()


def plain_nce(x: Tensor, y: Tensor) -> Tensor:
    logits = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T / 0.07
    return F.cross_entropy(logits, torch.arange(len(x)))


def plain_kl(x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), y, reduction="batchmean")


def kl_of(x: Tensor, y: Tensor, reduction: str = "batchmean") -> Tensor:
    return stable_kl(x.log_softmax(-1), y, reduction=reduction)


CASES: dict[str, Case] = {
    "cross_entropy": Case(masked_cross_entropy, F.cross_entropy, draw_labels),
    "cross_entropy_pixels": Case(masked_cross_entropy, F.cross_entropy, draw_labels, (2, 5, 3), (2, 3)),
    "cross_entropy_smooth": Case(
        functools.partial(masked_cross_entropy, label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        draw_labels,
    ),
    "cross_entropy_z": Case(
        functools.partial(masked_cross_entropy, z_loss=0.01),
        lambda x, y: F.cross_entropy(x, y) + 0.01 * x.logsumexp(1).square().mean(),
        draw_labels,
    ),
    "normalized_mse": Case(
        normalized_mse,
        lambda x, y: F.mse_loss(F.normalize(x, dim=-1), F.normalize(y, dim=-1)),
        draw_vectors,
        none_shape=(4, 5),
    ),
    "bce": Case(stable_bce_with_logits, F.binary_cross_entropy_with_logits, draw_hard, none_shape=(4, 5)),
    "focal": Case(focal, plain_focal, draw_hard, none_shape=(4, 5)),
    "dice": Case(dice, plain_dice, draw_hard, (3, 1, 4, 4), (3,)),
    "iou": Case(iou, plain_iou, draw_hard, (3, 1, 4, 4), (3,)),
    "structure": Case(structure_loss, plain_structure, draw_hard, (2, 1, 6, 5), (2, 1)),
    "kl": Case(kl_of, plain_kl, draw_probabilities, none_shape=(4, 5)),
    "info_nce": Case(info_nce, plain_nce, draw_vectors),
    "clip": Case(clip_loss, lambda x, y: (plain_nce(x, y) + plain_nce(y, x)) / 2, draw_vectors),
}

every_loss = pytest.mark.parametrize("name", list(CASES))


def make_inputs(case: Case, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    shape = case.shape if shape is None else shape
    target = case.make_target(shape)
    x = (SMALL * torch.randn(shape)).to(dtype).requires_grad_()
    return x, target.to(dtype) if target.is_floating_point() else target


def assert_finite(loss: Tensor, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isfinite().all(), f"loss {loss.tolist()} of {x.tolist()}"
    assert gradient.isfinite().all(), f"gradient {gradient.tolist()} at {x.tolist()}"


@every_loss
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_equals_the_plain_formula_in_float64(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x, target = make_inputs(case, dtype)
    loss = case.safe(x, target)
    wide = target.double() if target.is_floating_point() else target
    expected = case.plain(x.detach().double(), wide)
    assert loss.dtype == dtype
    # fp32 sums of up to sixty terms, rounded once to the dtype; the log_softmax before `kl` is torch's, in that dtype.
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.05 if name == "kl" else torch.finfo(dtype).eps)
    torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=1e-6 if dtype is not torch.float64 else 1e-12)


@every_loss
def test_the_gradient_equals_that_of_the_plain_formula(name: str) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float64)
    (gradient,) = torch.autograd.grad(case.safe(x, target), x)
    (expected,) = torch.autograd.grad(case.plain(x, target), x)
    torch.testing.assert_close(gradient, expected)


@every_loss
def test_gradcheck(name: str) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float64)
    assert gradcheck(lambda v: case.safe(v, target), [x])


@every_loss
def test_reductions_agree(name: str) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float64)
    each = case.safe(x, target, reduction="none")
    assert each.shape == case.none_shape
    torch.testing.assert_close(case.safe(x, target, reduction="sum"), each.sum())
    torch.testing.assert_close(case.safe(x, target, reduction="mean"), each.mean())


@every_loss
def test_an_unknown_reduction_is_refused_by_name(name: str) -> None:
    case = CASES[name]
    with pytest.raises(ConfigError, match=r"reduction must be one of .*mean.*, got 'avg'"):
        case.safe(*make_inputs(case, torch.float32), reduction="avg")


@every_loss
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_the_loss_is_fp32(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x, target = make_inputs(case, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = case.safe(x, target)
    assert loss.dtype is torch.float32
    expected = case.plain(x.detach().double(), target.double() if target.is_floating_point() else target)
    # Matrix products are computed in fp32 too; only `kl` has a step of torch's in half precision.
    torch.testing.assert_close(loss.double(), expected, rtol=0.05 if name == "kl" else 1e-5, atol=1e-6)
    assert_finite(loss, x)


EDGES = [0.0, -0.0, 1.0, 88.0, -104.0, 1e-45, 1e-38, -1e-38, 1e-20, 1e4, 1e38, -1e38, 3.38e38, -3.38e38]


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_value_and_gradient_are_finite_for_every_finite_input(name: str, dtype: torch.dtype, data: Any) -> None:
    case = CASES[name]
    top = float(torch.finfo(dtype).max)
    numbers = st.sampled_from([max(-top, min(top, v)) for v in EDGES]) | st.floats(
        -65504.0, 65504.0, width=16, allow_nan=False
    )
    _, target = make_inputs(case, dtype)
    flat = data.draw(st.lists(numbers, min_size=math.prod(case.shape), max_size=math.prod(case.shape)))
    x = torch.tensor(flat).to(dtype).reshape(case.shape).requires_grad_()
    if target.is_floating_point() and case.make_target is draw_vectors and data.draw(st.booleans()):
        target = x.detach().roll(1, 0)
    for reduction in ("mean", "none"):
        assert_finite(case.safe(x, target, reduction=reduction), x)


@every_loss
@pytest.mark.parametrize("fill", [0.0, 1e38, -1e38, 1e-38])
def test_constant_inputs_are_finite(name: str, fill: float) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float32)
    x = torch.full_like(x, fill).requires_grad_()
    for t in (target, torch.zeros_like(target)):
        assert_finite(case.safe(x, t), x)


@every_loss
@pytest.mark.parametrize("size", [0, 1])
def test_empty_and_single_sample_batches_are_finite(name: str, size: int) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float32, (size, *case.shape[1:]))
    loss = case.safe(x, target)
    assert_finite(loss, x)
    if size == 0:
        assert loss.item() == 0.0


@every_loss
def test_a_single_class_or_column_is_finite(name: str) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float32, (case.shape[0], 1, *case.shape[2:]))
    assert_finite(case.safe(x, target), x)


@every_loss
def test_nan_is_never_hidden(name: str) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float32)
    with torch.no_grad():
        x.view(-1)[1] = math.nan
    assert case.safe(x, target).isnan()


@every_loss
def test_the_host_reads_nothing(name: str) -> None:
    case = CASES[name]
    real = make_inputs(case, torch.float32)
    mode = FakeTensorMode()  # tensors without values: reading one raises
    x, target = (mode.from_tensor(t) for t in real)
    with mode:
        (gradient,) = torch.autograd.grad(case.safe(x, target), x)
    assert gradient.shape == real[0].shape


@every_loss
def test_it_compiles_as_one_graph(name: str) -> None:
    case = CASES[name]
    x, target = make_inputs(case, torch.float32)
    compiled = torch.compile(case.safe, backend="aot_eager", fullgraph=True)
    loss = compiled(x, target)
    torch.testing.assert_close(loss, case.safe(x, target))
    assert_finite(loss, x)
    torch.compiler.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_cuda_it_never_waits_and_is_finite(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    x, target = (t.detach().cuda() for t in make_inputs(case, dtype))
    x.requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = case.safe(x, target)
        (gradient,) = torch.autograd.grad(loss, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.dtype is torch.float32
    assert loss.isfinite()
    assert gradient.isfinite().all()
