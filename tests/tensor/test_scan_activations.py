"""ActivationWatch compared with plain torch: dead, saturated, constant; and training is not affected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import DEVICES, clone, loss_of, make_batches, make_model

from steadygrad.facts import ActivationScan
from steadygrad.measure.activations import ActivationWatch

every_device = pytest.mark.parametrize("device", DEVICES)


def watch(model: nn.Module, *args: Any) -> ActivationScan:
    seen = ActivationWatch(model)
    with seen:
        model(*args)
    return seen.read(3)


@every_device
def test_units_that_are_zero_in_the_whole_batch_are_dead(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2)).to(device)
    with torch.no_grad():
        model[0].bias[:7] = -100.0
        model[0].bias[7:] = 100.0

    scan = watch(model, torch.randn(8, 4, device=device))

    assert scan.step == 3
    assert list(scan.modules) == ["1"]
    assert scan.modules["1"].dead_share == pytest.approx(0.7)
    assert scan.modules["1"].saturated_share is None


def test_units_are_channels_after_a_convolution_and_features_after_a_linear_layer() -> None:
    images = nn.Sequential(nn.Conv1d(1, 4, 1), nn.ReLU())
    tokens = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    with torch.no_grad():
        images[0].bias.copy_(torch.tensor([-99.0, 99.0, 99.0, 99.0]))
        tokens[0].bias.copy_(torch.tensor([-99.0, 99.0, 99.0, 99.0]))

    assert watch(images, torch.randn(3, 1, 5)).modules["1"].dead_share == 0.25
    assert watch(tokens, torch.randn(3, 5, 6)).modules["1"].dead_share == 0.25


@every_device
@pytest.mark.parametrize(
    ("module", "is_near"),
    [
        (nn.Tanh(), lambda y: y.abs() >= 0.99),
        (nn.Softsign(), lambda y: y.abs() >= 0.99),
        (nn.Sigmoid(), lambda y: (y <= 0.005) | (y >= 0.995)),
        (nn.Hardtanh(-2.0, 4.0), lambda y: (y <= -1.97) | (y >= 3.97)),
        (nn.ReLU6(), lambda y: (y <= 0.03) | (y >= 5.97)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_elements_near_a_limit_are_saturated(module: nn.Module, is_near: Any, device: str) -> None:
    x = torch.randn(16, 12, device=device) * 5

    stats = watch(nn.Sequential(module), x).modules["0"]

    assert stats.saturated_share == pytest.approx(is_near(module(x)).double().mean().item())


@pytest.mark.parametrize("shape", [(1, 4), (4,)])
def test_a_single_sample_gives_no_result_for_units(shape: tuple[int, ...]) -> None:
    assert watch(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(shape)).modules["1"].dead_share is None


def test_a_nan_is_not_a_dead_unit() -> None:
    x = torch.zeros(4, 3)
    x[0, 0] = math.nan

    assert watch(nn.Sequential(nn.ReLU()), x).modules["0"].dead_share == pytest.approx(2 / 3)


@every_device
def test_spread_and_size_of_the_output_equal_plain_torch(device: str) -> None:
    model, x = make_model(device), torch.randn(8, 6, device=device)
    y = model(x).detach().double()

    scan = watch(model, x)

    assert scan.output_std == pytest.approx(y.std(0, correction=0).mean().item(), rel=1e-5)  # computed in float32
    assert scan.output_scale == pytest.approx(y.square().mean().sqrt().item(), rel=1e-5)


def test_a_constant_output_has_no_spread() -> None:
    scan = watch(make_model(), torch.ones(8, 6))

    assert scan.output_std is not None
    assert scan.output_scale is not None
    assert scan.output_std < 1e-6 * scan.output_scale


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def test_the_output_is_found_in_the_results_of_models() -> None:
    x = torch.randn(6, 4)
    expected = watch(Returns(lambda x: x), x).output_std

    assert expected is not None
    assert watch(Returns(lambda x: (x, None)), x).output_std == expected
    assert watch(Returns(lambda x: {"loss": x.sum(), "hidden": x + 1, "logits": x}), x).output_std == expected
    assert watch(Returns(lambda x: {"loss": x.sum(), "y": x}), x).output_std == expected
    for nothing in (lambda x: x.sum(), lambda x: x[:1], lambda x: x.long(), lambda x: "text", lambda x: None):
        assert watch(Returns(nothing), x).output_std is None


def test_a_large_output_is_subsampled_with_a_small_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadygrad.measure.activations.PIECE", 1 << 10)
    scan = watch(Returns(lambda x: x), torch.randn(16, 20, 300))

    assert scan.output_std == pytest.approx(1.0, abs=0.1)
    assert scan.output_scale == pytest.approx(1.0, abs=0.1)


def test_the_last_call_of_a_module_counts() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) + self.act(-x.abs() - 1)

    assert watch(Twice(), torch.randn(8, 5)).modules["act"].dead_share == 1.0


def test_a_pending_check_survives_the_next_one() -> None:
    model = make_model()
    seen = ActivationWatch(model)
    with seen:
        model(torch.ones(8, 6))
    first = seen.pending
    expected = first.read(0)
    with seen:
        model(torch.randn(8, 6))

    assert first.read(0) == expected != seen.read(0)


def test_eval_mode_and_compiled_models_give_no_result() -> None:
    model = make_model()
    assert watch(model.eval(), torch.randn(8, 6)).modules == {}

    compiled = torch.compile(model.train(), backend="eager", fullgraph=True)
    scan = watch(compiled, torch.randn(8, 6))  # type: ignore[arg-type]
    inner = ActivationWatch(model)
    with inner:
        compiled(torch.randn(8, 6))

    assert scan.modules == inner.read(0).modules == {}
    assert scan.output_std is None


def test_hooks_are_removed_even_after_an_error() -> None:
    model = make_model()
    with pytest.raises(RuntimeError), ActivationWatch(model):
        model(torch.randn(8, 5))

    assert not any(m._forward_hooks for m in model.modules())


def test_a_failing_check_does_not_affect_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr("steadygrad.measure.activations._measure_saturated", fail)

    assert watch(make_model(), torch.randn(8, 6)) == ActivationScan(step=3)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.use_reentrant)


@every_device
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_a_watched_step_has_the_same_gradients_and_random_numbers(use_reentrant: bool | None, device: str) -> None:
    batch = make_batches(1, device)[0]
    plain: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).to(device)
    if use_reentrant is not None:
        plain = Checkpointed(plain, use_reentrant=use_reentrant)
    watched = clone(plain)

    torch.manual_seed(5)
    loss_of(plain)(batch).backward()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    seen = ActivationWatch(watched)
    with seen:
        loss = loss_of(watched)(batch)
    loss.backward()

    assert torch.equal(torch.get_rng_state(), state)
    assert len(seen.read(0).modules) == 1
    for p, q in zip(plain.parameters(), watched.parameters()):
        assert torch.equal(p, q)
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
