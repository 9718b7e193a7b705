"""What every clip strategy guarantees: no host read, state safe from bad steps, exact resume, true ratios."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad.clip import Clipper, build_clipper
from steadygrad.clip.base import limit, shrink
from steadygrad.clip.edit import find_ratio
from steadygrad.config import AdaGC, AdaptiveUnitClip, AutoClip, ClipStrategy, ClipValue, FixedNorm, ZClip
from steadygrad.errors import UsageError
from steadygrad.facts import NUM_COLUMNS
from steadygrad.measure import Measurement, Meter
from steadygrad.measure.measurement import HEADER, Plan

# Short warm-ups and windows, so that a few steps reach every branch.
STRATEGIES: dict[str, ClipStrategy] = {
    "fixed_norm": FixedNorm(max_norm=0.5),
    "value": ClipValue(value=0.3),
    "zclip": ZClip(warmup=5, max_norm=50.0),
    "autoclip": AutoClip(percentile=60.0, window=8),
    "adaptive_unit": AdaptiveUnitClip(ratio=0.05, exclude=("head",)),
    "adagc": AdaGC(warmup=5, max_norm=0.5),
}
STATEFUL = ("zclip", "autoclip", "adagc")
SHAPES: dict[str, tuple[int, ...]] = {
    "conv.weight": (4, 3, 2, 2),
    "body.weight": (5, 7),
    "body.bias": (5,),
    "gain": (),
    "head.weight": (2, 5),
}

every_strategy = pytest.mark.parametrize("kind", list(STRATEGIES))
every_stateful_strategy = pytest.mark.parametrize("kind", STATEFUL)


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


class Model:
    """Parameters whose gradients the test sets, with their Meter."""

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.named = [(name, self.draw(shape).requires_grad_()) for name, shape in SHAPES.items()]
        self.meter = Meter(self.named)

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.device, self.dtype)

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for _, parameter in self.named if parameter.grad is not None]

    def step(self, size: float = 1.0, *, poison: float | None = None, loss: float = 1.0) -> Measurement:
        """Set new gradients of about `size`, optionally with one bad element."""
        for _, parameter in self.named:
            parameter.grad = self.draw(tuple(parameter.shape)) * size
        if poison is not None:
            self.gradients()[1].view(-1)[-1] = poison
        measurement = self.meter.measure(torch.tensor(loss, device=self.device))
        assert measurement is not None
        return measurement


def run(clipper: Clipper, model: Model, num_steps: int) -> list[Tensor]:
    """Clip healthy steps with occasional spikes; return the coefficients."""
    return [clipper.clip(model.step(30.0 if i % 7 == 6 else 1.0)) for i in range(num_steps)]


def assert_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


# --- no host read --------------------------------------------------------------------------------------------------


class HostReadError(AssertionError):
    """A tensor's value was read on the host."""


class NoHostRead(TorchDispatchMode):
    """Raises on every operator behind .item(), bool(), nonzero(), boolean masks and torch.equal."""

    forbidden = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype is torch.bool
            for arg in args
            if isinstance(arg, list | tuple)
            for i in arg
        )
        if is_mask or name in self.forbidden or name.startswith(("_unique", "unique_", "nonzero_")):
            raise HostReadError(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [Tensor.item, bool, float, torch.nonzero, lambda t: torch.equal(t, t), lambda t: torch.ones(1)[t.bool().view(1)]],
)
def test_host_reads_are_detected(read: Callable[[Tensor], object]) -> None:
    value = torch.tensor(1.0)
    with NoHostRead(), pytest.raises(HostReadError):
        read(value)


@every_strategy
def test_clipping_never_reads_back_to_the_host(kind: str, device: torch.device) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model(device)
    for i in range(12):
        m = model.step(30.0 if i % 5 == 4 else 1.0, poison=math.nan if i == 8 else None)
        with NoHostRead():
            clipper.clip(m)


@every_strategy
def test_clipping_works_on_tensors_without_data(kind: str) -> None:
    # On the meta device there is nothing to read: tolist() and numpy(), invisible to dispatch modes, fail here.
    parameters = [torch.empty(shape, device="meta") for shape in SHAPES.values()]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    m = Measurement(
        packed=torch.empty(HEADER + NUM_COLUMNS * len(SHAPES), dtype=torch.float64, device="meta"),
        flags=torch.empty(2, device="meta"),
        plan=Plan(tuple(SHAPES), parameters, torch.device("meta")),
        has_loss=True,
    )
    clipper = build_clipper(STRATEGIES[kind])

    for _ in range(3):
        coefficient = clipper.clip(m)

    assert coefficient.shape == ()
    assert coefficient.dtype == torch.float64
    assert coefficient.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_strategy
def test_clipping_never_makes_cuda_wait(kind: str) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model("cuda")
    clipper.clip(model.step())  # the first step may create state
    m = model.step(30.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clipper.clip(m)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- a bad step ----------------------------------------------------------------------------------------------------


@every_stateful_strategy
@pytest.mark.parametrize("num_before", [1, 3, 20])
@pytest.mark.parametrize(
    "bad", [{"poison": math.nan}, {"poison": math.inf}, {"poison": -math.inf}, {"loss": math.nan}, {"loss": math.inf}]
)
def test_a_bad_step_leaves_the_state_bit_identical(
    kind: str, num_before: int, bad: dict[str, float], device: torch.device
) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model(device)
    run(clipper, model, num_before)
    before = clipper.state_dict()

    clipper.clip(model.step(1e4, **bad))

    assert_same_state(clipper.state_dict(), before)
    clipper.clip(model.step())
    with pytest.raises(AssertionError):  # a healthy step does move it
        assert_same_state(clipper.state_dict(), before)


@every_stateful_strategy
def test_bad_steps_leave_no_trace_in_later_coefficients(kind: str) -> None:
    disturbed, calm = build_clipper(STRATEGIES[kind]), build_clipper(STRATEGIES[kind])
    one, other, noise = Model(), Model(), Model(seed=1)
    for i in range(40):
        if i % 3 == 0:
            disturbed.clip(noise.step(1e6, poison=math.nan))
        size = 30.0 if i % 7 == 6 else 1.0
        assert torch.equal(disturbed.clip(one.step(size)), calm.clip(other.step(size)))
    assert_same_state(disturbed.state_dict(), calm.state_dict())


@every_stateful_strategy
def test_a_bad_first_step_is_survived(kind: str) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model()

    coefficient = clipper.clip(model.step(poison=math.nan))

    assert 0 < coefficient.item() <= 1
    assert not any(value.any() for value in clipper.state_dict().values() if isinstance(value, Tensor))


@every_strategy
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_the_coefficient_is_between_0_and_1_even_on_a_bad_step(kind: str, poison: float, device: torch.device) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model(device)
    for i in range(20):
        coefficient = clipper.clip(model.step(10.0 ** (i % 9 - 4), poison=poison if i % 2 else None))
        assert coefficient.shape == ()
        assert coefficient.dtype == torch.float64
        assert coefficient.device.type == device.type
        assert 0 < coefficient.item() <= 1


@every_stateful_strategy
def test_the_state_never_has_a_nonfinite_value(kind: str) -> None:
    # A checkpoint is scanned for them, so "empty" must not be spelled inf.
    clipper, model = build_clipper(STRATEGIES[kind]), Model()
    for i in range(12):
        clipper.clip(model.step(1e25 if i == 6 else 1.0, poison=math.inf if i % 4 == 0 else None))
        for value in clipper.state_dict().values():
            assert not isinstance(value, Tensor) or value.isfinite().all()


# --- zero ----------------------------------------------------------------------------------------------------------


@every_strategy
def test_zero_gradients_are_reported_as_not_clipped(kind: str) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model()
    for _ in range(3):
        m = model.step(0.0)
        assert clipper.clip(m).item() == 1.0
        assert all(torch.equal(g, torch.zeros_like(g)) for g in m.gradients)


@every_stateful_strategy
def test_zero_gradients_never_freeze_the_training(kind: str) -> None:
    # With zeros in the statistics the threshold is 0, every later step is clipped to it, and it stays 0.
    clipper, model = build_clipper(STRATEGIES[kind]), Model()
    for _ in range(20):
        clipper.clip(model.step(0.0))
    coefficients = run(clipper, model, 6)

    assert coefficients[0].item() > 0.01
    assert all(parameter.grad is not None and parameter.grad.any() for _, parameter in model.named)


# --- resume --------------------------------------------------------------------------------------------------------


def save_and_load(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@every_strategy
@pytest.mark.parametrize("num_before", [0, 3, 30])
@pytest.mark.parametrize("num_steps_of_another_run", [0, 4])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    kind: str, num_before: int, num_steps_of_another_run: int, device: torch.device
) -> None:
    clipper, model, twin = build_clipper(STRATEGIES[kind]), Model(device), Model(device)
    run(clipper, model, num_before)
    run(build_clipper(STRATEGIES[kind]), twin, num_before)
    resumed = build_clipper(STRATEGIES[kind])
    run(resumed, Model(device, seed=9), num_steps_of_another_run)

    resumed.load_state_dict(save_and_load(clipper.state_dict()))
    ours, theirs = run(clipper, model, 40), run(resumed, twin, 40)

    assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert all(torch.equal(a, b) for a, b in zip(model.gradients(), twin.gradients()))
    assert_same_state(clipper.state_dict(), resumed.state_dict())


@every_strategy
def test_before_the_first_step_the_state_is_empty(kind: str) -> None:
    assert build_clipper(STRATEGIES[kind]).state_dict() == {}


@every_stateful_strategy
def test_a_saved_state_shares_no_memory_with_the_live_one(kind: str) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model()
    run(clipper, model, 10)
    saved = clipper.state_dict()
    kept = save_and_load(saved)

    run(clipper, model, 3)
    assert_same_state(saved, kept)

    clipper.load_state_dict(saved)
    overwrite(saved)
    assert_same_state(clipper.state_dict(), kept)
    overwrite(clipper.state_dict())
    assert_same_state(clipper.state_dict(), kept)


def overwrite(state: Mapping[str, Any]) -> None:
    for value in state.values():
        if isinstance(value, Tensor):
            value.fill_(1e9)


@every_stateful_strategy
def test_the_state_of_another_strategy_is_refused_and_changes_nothing(kind: str) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model()
    run(clipper, model, 10)
    before = clipper.state_dict()
    for other in STATEFUL:
        if other != kind:
            foreign = build_clipper(STRATEGIES[other])
            run(foreign, Model(), 10)
            with pytest.raises(UsageError, match="saved from"):
                clipper.load_state_dict(foreign.state_dict())
    assert_same_state(clipper.state_dict(), before)


# --- the interface -------------------------------------------------------------------------------------------------


@every_strategy
def test_only_declared_strategies_edit_gradients(kind: str) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model()
    run(clipper, model, 10)
    m = model.step(30.0)
    before = [g.clone() for g in m.gradients]

    coefficient = clipper.clip(m)

    assert coefficient.item() < 1
    changed = not all(torch.equal(a, b) for a, b in zip(before, m.gradients))
    assert changed == clipper.edits_gradients


@pytest.mark.parametrize("kind", ["value", "adaptive_unit", "adagc"])
def test_the_reported_coefficient_is_the_norm_after_over_the_norm_before(kind: str, device: torch.device) -> None:
    clipper, model = build_clipper(STRATEGIES[kind]), Model(device)
    num_clipped = 0
    for i in range(20):
        m = model.step(30.0 if i % 7 == 6 else 0.01 if i % 3 else 1.0)
        before = torch.linalg.vector_norm(torch.cat([g.double().view(-1) for g in m.gradients]))

        coefficient = clipper.clip(m)

        after = torch.linalg.vector_norm(torch.cat([g.double().view(-1) for g in m.gradients]))
        # fp32 gradients are rounded once by the edit, and their norm is measured in fp32 on some devices.
        torch.testing.assert_close(coefficient, after / before, rtol=2e-6, atol=0)
        num_clipped += int(coefficient < 1)
    assert num_clipped > 5


@pytest.mark.parametrize(
    "settings",
    [
        ClipValue(value=1e3),
        ZClip(max_norm=None),
        AutoClip(percentile=100),
        AdaptiveUnitClip(ratio=1e3),
        AdaGC(max_norm=1e3),
    ],
    ids=lambda s: s.kind,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_inactive_clipping_is_reported_as_exactly_1_and_changes_no_bit(
    settings: ClipStrategy, dtype: torch.dtype, device: torch.device
) -> None:
    clipper, model = build_clipper(settings), Model(device, dtype)
    for size in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        m = model.step(size)
        before = [g.clone() for g in m.gradients]
        assert clipper.clip(m).item() == 1.0
        assert all(torch.equal(a, b) for a, b in zip(before, m.gradients))


@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.01, 1.0, 1e4])
def test_fixed_norm_has_the_coefficient_of_clip_grad_norm(size: float) -> None:
    model = Model(dtype=torch.float64)
    m = model.step(size)
    before = model.gradients()[1].clone()

    coefficient = build_clipper(FixedNorm(max_norm=0.5)).clip(m)
    torch.nn.utils.clip_grad_norm_([p for _, p in model.named], 0.5)

    # float64 throughout: two norms summed in another order differ in the last bits.
    torch.testing.assert_close(before * coefficient, model.gradients()[1], rtol=1e-13, atol=0)


def test_a_norm_equal_to_its_threshold_is_clipped_by_limit_but_not_by_shrink() -> None:
    norm = torch.tensor(1e-7, dtype=torch.float64)
    assert shrink(norm, norm).item() == 1.0
    assert limit(norm, norm).item() < 0.1
    assert shrink(norm, torch.tensor(math.nan, dtype=torch.float64)).item() == 1.0


@pytest.mark.parametrize(
    ("before", "after"), [(1.0, 1.0), (1.0, 1.0 + 1e-9), (1.0, 0.0), (1.0, math.nan), (math.inf, 1.0)]
)
def test_the_ratio_of_active_clipping_is_strictly_between_0_and_1(before: float, after: float) -> None:
    numbers = torch.tensor([before, after], dtype=torch.float64)
    assert 0 < find_ratio(numbers[0], numbers[1], torch.tensor(True)).item() < 1
    assert find_ratio(numbers[0], numbers[1], torch.tensor(False)).item() == 1


def test_settings_without_a_clipper_are_named() -> None:
    with pytest.raises(TypeError, match=r"no clipper for int\. Use one of FixedNorm"):
        build_clipper(3)  # type: ignore[arg-type]
