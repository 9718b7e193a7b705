"""The precision of the products in the multiway loss: what `auto` selects, how each rounds, the range of fp16."""

from __future__ import annotations

import pytest
import torch
from multiway_inputs import assert_same, evaluate, make_features, make_scale

from steadygrad.errors import UnsupportedError
from steadygrad.losses.multiway import multiway_contrastive
from steadygrad.losses.multiway.precision import Precision, choose_precision, find_gain, round_half, use_precision
from steadygrad.losses.multiway.similarity import Similarity

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "dtype", "device", "similarity", "masked", "expected"),
    [
        ("auto", torch.float32, CUDA, "mip", False, "fp16"),
        ("auto", torch.float16, CUDA, "mip", False, "fp16"),
        ("auto", torch.float32, CUDA, "mip", True, "tf32"),
        ("auto", torch.bfloat16, CUDA, "mip", True, "bf16"),
        ("auto", torch.float32, CUDA, "cosine", False, "fp16"),
        ("auto", torch.bfloat16, CUDA, "cosine", True, "tf32"),
        ("auto", torch.float32, CUDA, "norm", False, "fp16x3"),
        ("auto", torch.bfloat16, CUDA, "distance", False, "fp16x3"),
        ("auto", torch.float32, CUDA, "norm", True, "fp32"),
        ("auto", torch.float32, CUDA, "distance", True, "fp32"),
        ("auto", torch.float32, CPU, "mip", False, "fp32"),
        ("auto", torch.float32, CPU, "distance", False, "fp32"),
        ("auto", torch.float64, CUDA, "mip", False, "fp64"),
        ("tf32", torch.float32, CPU, "mip", False, "tf32"),
        ("bf16", torch.float32, CUDA, "mip", True, "bf16"),
        ("fp16", torch.bfloat16, CUDA, "mip", False, "fp16"),
        ("fp16", torch.float32, CUDA, "norm", False, "fp16"),
        ("fp32", torch.float32, CUDA, "mip", False, "fp32"),
    ],
)
def test_auto_selects_the_precision(
    asked: str, dtype: torch.dtype, device: torch.device, similarity: Similarity, masked: bool, expected: str
) -> None:
    assert choose_precision(asked, dtype, device, similarity=similarity, masked=masked) == expected


@pytest.mark.parametrize(("precision", "bits"), [("tf32", 11), ("fp16", 11), ("bf16", 8), ("fp32", 24)])
def test_a_half_is_rounded_to_the_nearest_value_of_the_precision(precision: Precision, bits: int) -> None:
    half = (1 + torch.rand(4096)) * torch.logspace(-3, 3, 4096) * torch.tensor([-1.0, 1.0]).repeat(2048)
    mantissa, exponent = torch.frexp(half.double())
    expected = torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)
    rounded = round_half(half, precision).double()
    ties = (mantissa * 2**bits).frac().abs() == 0.5  # both neighbours are equally near
    assert torch.equal(rounded[~ties], expected[~ties])
    assert (~ties).sum() > 4000


@pytest.mark.parametrize("sign", [0, -(1 << 31)])
def test_rounding_keeps_every_nan_and_infinity(sign: int) -> None:
    # Between the infinity and CUDA's NaN, which has all mantissa bits set
    mantissas = [0, 1, 0xFFF, 0x1000, 0x400000, 0x7FF000, 0x7FFFFF]
    bits = torch.tensor([(0x7F800000 | mantissa) + sign for mantissa in mantissas], dtype=torch.int32)
    half = bits.view(torch.float32)
    rounded = round_half(half, "tf32")
    assert rounded[0] == half[0]
    assert rounded[1:].isnan().all()


@pytest.mark.parametrize("bound", [1e-29, 3e-8, 1.0, 1.999, 65504.0, 1e30])
def test_a_gain_is_a_power_of_two_that_uses_the_range_and_leaves_room_for_rounding(bound: float) -> None:
    gain = float(find_gain(torch.tensor(bound)))
    assert 2**14 <= bound * gain < 2**15
    assert torch.frexp(torch.tensor(gain)).mantissa == 0.5


@pytest.mark.parametrize("size", [0.0, 1e-38])
def test_the_gain_of_tiny_values_is_finite(size: float) -> None:
    assert torch.isfinite(find_gain(torch.tensor(size)))


@pytest.mark.parametrize(("precision", "inside"), [("tf32", "tf32"), ("fp32", "ieee")])
@pytest.mark.parametrize("outside", [True, False])
def test_the_programs_own_switch_is_restored(precision: Precision, inside: str, outside: bool) -> None:
    switch = torch.backends.cuda.matmul
    before = switch.allow_tf32
    try:
        switch.allow_tf32 = outside
        with use_precision(precision, CUDA):
            assert switch.fp32_precision == inside
        assert switch.allow_tf32 == outside
        assert torch.get_float32_matmul_precision() == ("high" if outside else "highest")
    finally:
        switch.allow_tf32 = before


def test_a_switch_that_followed_another_still_follows_it() -> None:
    """It returns the other's value: if written back as its own, it would no longer follow the other."""
    matmul = torch.backends.cuda.matmul
    before = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision, matmul.fp32_precision = "tf32", "none"
        with use_precision("fp32", CUDA):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = before


@pytest.mark.parametrize("outside", [True, False])
def test_fp16_is_never_summed_in_fp16(outside: bool) -> None:
    switch = torch.backends.cuda.matmul
    before = switch.allow_fp16_accumulation
    try:
        switch.allow_fp16_accumulation = outside
        with use_precision("fp16", CUDA):
            assert not switch.allow_fp16_accumulation
        assert switch.allow_fp16_accumulation == outside
    finally:
        switch.allow_fp16_accumulation = before


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
def test_a_lower_precision_stays_close_and_its_loss_above_zero(precision: str) -> None:
    exact = make_features(4, 5, 32, noise=0.7)
    scale = make_scale(4, 32)
    features = [f.detach().float().requires_grad_() for f in exact]
    single = scale.detach().float().requires_grad_()
    # Logits of about 30 with 8, 11 and 24 bits of mantissa in each half.
    rtol = {"bf16": 2e-2, "fp16": 3e-3, "tf32": 3e-3, "fp32": 1e-5}[precision]
    found = evaluate(features, single, precision=precision, impl="tiled")
    assert_same(found, evaluate(exact, scale, impl="naive"), rtol=rtol)
    peaked = multiway_contrastive(features, 1e3 * single, precision=precision, impl="tiled", reduction="none")
    assert bool((peaked >= 0).all())


@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize("weight", [1e-20, 1.0, 2.0**16])
@pytest.mark.parametrize("size", [1e-5, 1.0, 1e4])
def test_fp16_has_the_accuracy_of_tf32_at_any_size(size: float, weight: float, negatives: str) -> None:
    """fp16 alone ranges from 6e-8 to 65504; weights of the backward pass near 1e-20 would all be zero."""
    exact, scale = make_features(4, 6, 32, noise=0.7), make_scale(4, 32)
    features = [(f.detach() * size).float().requires_grad_() for f in exact]
    single = (scale.detach() / size**4).float()
    expected = evaluate(exact, scale, impl="naive", negatives=negatives)
    loss = multiway_contrastive(features, single, precision="fp16", impl="tiled", negatives=negatives)
    grads = [grad / weight * size for grad in torch.autograd.grad(loss * weight, features)]
    assert_same([loss, *grads], [expected[0], *expected[2:]], rtol=3e-3)


def test_fp16_keeps_nearly_correct_samples_next_to_a_wrong_one() -> None:
    """One sample has all the loss: 1e5 times less weight is still well within fp16."""
    exact, scale = make_features(4, 6, 64, noise=0.1), make_scale(4, 64)
    with torch.no_grad():
        exact[1][0] *= -1
    features = [f.detach().float().requires_grad_() for f in exact]
    single = scale.detach().float().requires_grad_()
    found = evaluate(features, single, precision="fp16", impl="tiled")
    expected = evaluate(exact, scale, impl="naive")
    for f, e in zip(found[2:], expected[2:]):
        assert float(((f - e).norm(dim=1) / e.norm(dim=1)).max()) < 2e-2


@pytest.mark.parametrize("precision", ["fp16", "fp16x3"])
def test_fp16_is_refused_beyond_its_range(precision: str) -> None:
    features = make_features(3, 4, 8, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="precision='tf32'"):
        multiway_contrastive(features, 1.0, precision=precision, present=torch.ones(4, 3, dtype=torch.bool))


def test_an_outer_autocast_changes_nothing() -> None:
    features, scale = make_features(3, 4, 8, dtype=torch.float32), make_scale(3, 8, dtype=torch.float32)
    plain = evaluate(features, scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = evaluate(features, scale)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside))


@pytest.mark.parametrize("anchor", range(5))
def test_fp16_does_not_overflow_if_one_side_has_all_the_weight(anchor: int) -> None:
    """The gain of the weights comes from the rows for anchors 0 to 2, and from the columns for 3 and 4."""
    exact, scale = make_features(5, 4, 64, noise=0.2), make_scale(5, 64)
    with torch.no_grad():
        exact[0][2] *= -1
    features = [f.detach().float().requires_grad_() for f in exact]
    single = scale.detach().float().requires_grad_()
    found = evaluate(features, single, precision="fp16", impl="tiled", anchors=[anchor])
    assert_same(found, evaluate(exact, scale, impl="naive", anchors=[anchor]), rtol=1e-2)
