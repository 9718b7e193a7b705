"""The multiway loss on the device: real kernels and tensor cores, memory, no host wait, deterministic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from steadygrad.losses.multiway import align_gain, multiway_contrastive

pytestmark = pytest.mark.gpu


def make_features(num: int, size: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    common = torch.randn(size, dim, device="cuda", dtype=torch.float64)
    rows = [common + 0.7 * torch.randn(size, dim, device="cuda", dtype=torch.float64) for _ in range(num)]
    return [torch.nn.functional.normalize(row, dim=1).to(dtype).requires_grad_() for row in rows]


def evaluate(features: list[Tensor], scale: float, **options: object) -> list[Tensor]:
    loss = multiway_contrastive(features, scale, **options)
    return [loss.detach(), *torch.autograd.grad(loss, features)]


def differ(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the norm of the difference over the norm, for each tensor."""
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected)]


# Relative error of loss and gradients against float64, halves of 11 and 8 bits of mantissa; logits of a few tens.
LIMITS = {"fp32": 2e-5, "tf32": 6e-3, "fp16": 6e-3, "bf16": 4e-2}


@pytest.mark.parametrize("precision", list(LIMITS))
@pytest.mark.parametrize("impl", ["triton", "tiled"])
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize(("num", "size", "dim"), [(2, 301, 65), (3, 37, 64), (4, 19, 100), (5, 11, 96), (6, 9, 512)])
def test_every_engine_equals_float64(num: int, size: int, dim: int, negatives: str, impl: str, precision: str) -> None:
    features, scale = make_features(num, size, dim), 10.0 * align_gain(num, dim)
    exact = [f.detach().double().requires_grad_() for f in features]
    found = evaluate(features, scale, negatives=negatives, impl=impl, precision=precision)
    expected = evaluate(exact, scale, negatives=negatives, impl="tiled")
    assert max(differ(found, expected)) < LIMITS[precision]


def test_six_modalities_equal_the_specification() -> None:
    features, scale = make_features(6, 5, 48), 10.0 * align_gain(6, 48)
    exact = [f.detach().double().requires_grad_() for f in features]
    expected = evaluate(exact, scale, impl="naive")
    assert max(differ(evaluate(features, scale, precision="fp32"), expected)) < LIMITS["fp32"]
    assert max(differ(evaluate(features, scale), expected)) < LIMITS["fp16"]


@pytest.mark.parametrize("weight", [1e-20, 2.0**16])
@pytest.mark.parametrize("size", [1e-4, 1e3])
def test_fp16_has_the_accuracy_of_tf32_at_any_size(size: float, weight: float) -> None:
    exact = [f.detach().double().requires_grad_() for f in make_features(4, 19, 100)]
    features = [(f.detach() * size).float().requires_grad_() for f in exact]
    scale = 10.0 * align_gain(4, 100)
    loss = multiway_contrastive(features, scale / size**4, precision="fp16", impl="triton")
    grads = [grad * (size / weight) for grad in torch.autograd.grad(loss * weight, features)]
    assert max(differ([loss.detach(), *grads], evaluate(exact, scale, impl="tiled"))) < LIMITS["fp16"]


def test_fp16_sums_are_fp32_even_if_the_program_allows_fp16_sums() -> None:
    features, scale = make_features(4, 19, 512), 10.0 * align_gain(4, 512)
    plain = evaluate(features, scale)
    switch = torch.backends.cuda.matmul
    before, switch.allow_fp16_accumulation = switch.allow_fp16_accumulation, True
    try:
        found = evaluate(features, scale)
        assert switch.allow_fp16_accumulation
    finally:
        switch.allow_fp16_accumulation = before
    assert all(torch.equal(a, b) for a, b in zip(plain, found))


def test_bf16_features_use_bf16_and_get_bf16_gradients() -> None:
    features = make_features(4, 12, 64, torch.bfloat16)
    found = evaluate(features, 640.0)
    exact = [f.detach().double().requires_grad_() for f in features]
    expected = evaluate(exact, 640.0, impl="tiled")
    assert {grad.dtype for grad in found[1:]} == {torch.bfloat16}
    assert max(differ(found, expected)) < LIMITS["bf16"]


@pytest.mark.parametrize("precision", list(LIMITS))
@pytest.mark.parametrize("negatives", ["all", "fibre"])
def test_features_may_have_any_memory_layout(negatives: str, precision: str) -> None:
    dense, scale = make_features(4, 19, 64), 10.0 * align_gain(4, 64)
    expected = evaluate(dense, scale, negatives=negatives, precision=precision)
    columns_first = [f.detach().t().contiguous().t().requires_grad_() for f in dense]
    interleaved = [f.requires_grad_() for f in torch.stack([f.detach() for f in dense], 1).unbind(1)]
    for strange in (columns_first, interleaved):
        found = evaluate(strange, scale, negatives=negatives, precision=precision)
        # Positives are summed in another order, and a few weights round the other way.
        assert max(differ(found, expected)) < LIMITS[precision] / 10


def test_absent_modalities_on_the_device() -> None:
    features, scale = make_features(4, 13, 64), 640.0
    present = torch.rand(13, 4, device="cuda") > 0.2
    exact = [f.detach().double().requires_grad_() for f in features]
    found = evaluate(features, scale, present=present, impl="triton")
    expected = evaluate(exact, scale, present=present, impl="tiled")
    assert max(differ(found, expected)) < LIMITS["tf32"]


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_results_are_deterministic(precision: str) -> None:
    features = make_features(5, 16, 128)
    runs = [evaluate(features, 1e4, precision=precision) for _ in range(3)]
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits() -> None:
    features = make_features(4, 16, 64)
    scale = torch.tensor(640.0, device="cuda")
    multiway_contrastive(features, scale).backward()  # compiles, loads
    multiway_contrastive(features, scale, negatives="fibre").backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        multiway_contrastive(features, scale).backward()
        multiway_contrastive(features, scale, negatives="fibre").backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_six_modalities_of_32_samples_stay_under_a_gibibyte(precision: str) -> None:
    features, scale = make_features(6, 32, 512), 14.0 * align_gain(6, 512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    evaluate(features, scale, precision=precision)
    assert torch.cuda.max_memory_allocated() - before <= 1 << 30


# Like LIMITS; three products have the error of fp32, and the scale of 14.3 gives logits of a few tens.
SIMILAR_LIMITS = {"fp32": 3e-5, "fp16x3": 3e-5, "tf32": 6e-3, "fp16": 6e-3, "bf16": 4e-2}


@pytest.mark.parametrize("precision", list(SIMILAR_LIMITS))
@pytest.mark.parametrize("similarity", ["norm", "cosine", "distance"])
@pytest.mark.parametrize("negatives", ["all", "fibre"])
@pytest.mark.parametrize(("num", "size", "dim"), [(2, 301, 65), (3, 37, 64), (4, 19, 100), (6, 9, 512)])
def test_every_similarity_equals_float64_in_the_kernels(
    num: int, size: int, dim: int, negatives: str, similarity: str, precision: str
) -> None:
    features = make_features(num, size, dim)
    exact = [f.detach().double().requires_grad_() for f in features]
    options = {"similarity": similarity, "negatives": negatives}
    found = evaluate(features, 14.3, impl="triton", precision=precision, **options)
    assert max(differ(found, evaluate(exact, 14.3, impl="tiled", **options))) < SIMILAR_LIMITS[precision]


@pytest.mark.parametrize("scale", [14.3, 100.0])
def test_nearly_equal_samples_have_the_right_distance_by_default(scale: float) -> None:
    """With one fp16 product, gradients would be off by a tenth."""
    features = make_features(4, 9, 256)
    with torch.no_grad():
        for feature in features:
            feature[0] = torch.nn.functional.normalize(features[0][0] + 1e-3 * torch.randn(256, device="cuda"), dim=0)
            feature[1] = torch.nn.functional.normalize(features[0][0] + 1e-3 * torch.randn(256, device="cuda"), dim=0)
    exact = [f.detach().double().requires_grad_() for f in features]
    found = evaluate(features, scale, similarity="distance")
    expected = evaluate(exact, scale, similarity="distance", impl="tiled")
    # fp32 itself is off by 1e-3 here: a difference of squares that leaves 1e-3
    assert max(differ(found, expected)) < 1e-2


@pytest.mark.parametrize("similarity", ["norm", "cosine", "distance"])
def test_the_other_similarities_are_deterministic_and_never_wait(similarity: str) -> None:
    features = make_features(5, 12, 128)
    runs = [evaluate(features, 14.3, similarity=similarity) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    scale = torch.tensor(14.3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        multiway_contrastive(features, scale, similarity=similarity).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("similarity", "dtype", "most"),
    [("mip", torch.float32, 40), ("mip", torch.bfloat16, 50), ("cosine", torch.float32, 60),
     ("norm", torch.float32, 60), ("distance", torch.float32, 70)],
)  # fmt: skip
def test_a_small_batch_takes_few_launches(similarity: str, dtype: torch.dtype, most: int) -> None:
    """Before the kernels of `fused.py` it was 273 for mip. cuBLAS may use two launches for a split product."""
    features, scale = make_features(6, 16, 512, dtype), 14.0 * (align_gain(6, 512) if similarity == "mip" else 1.0)
    evaluate(features, scale, similarity=similarity)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        evaluate(features, scale, similarity=similarity)
        torch.cuda.synchronize()
    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 10 < len(on_device) <= most, sorted(event.name for event in on_device)
