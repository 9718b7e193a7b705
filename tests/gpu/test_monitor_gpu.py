"""The monitors on CUDA: one wait per query, no other synchronisation, and the numbers of plain float64 torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from steadygrad.monitor import ActivationMonitor, GradientHealthMonitor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record each event that the host waited for, which the sync debug mode does not see."""
    seen: list[int] = []
    synchronize = torch.cuda.Event.synchronize

    def counting(self: torch.cuda.Event) -> Any:
        seen.append(1)
        return synchronize(self)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", counting)
    return seen


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise on any synchronising call except an event's wait."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_model(num_layers: int) -> nn.Sequential:
    layers = [module for _ in range(num_layers) for module in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers).cuda()


@pytest.mark.parametrize("num_layers", [2, 60])
def test_a_check_waits_once_for_any_number_of_parameters(num_layers: int, waits: list[int]) -> None:
    model = make_model(num_layers)
    monitor = GradientHealthMonitor(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    scaler.scale(model(torch.randn(8, 32, device="cuda")).sum()).backward()
    monitor.check_gradients(scaler=scaler)  # compiles the kernels and copies the table of chunks
    waits.clear()

    with no_synchronisation():
        stats = monitor.check_gradients(scaler=scaler)

    assert len(waits) == 1
    norm = math.hypot(*(torch.linalg.vector_norm(p.grad.double()).item() for p in model.parameters())) / 256
    assert stats["global_grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_the_debug_mode_would_catch_a_second_read() -> None:
    value = torch.ones((), device="cuda")

    with no_synchronisation(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


def test_clipping_equals_clip_grad_norm_and_waits_once(waits: list[int]) -> None:
    model = make_model(4)
    monitor = GradientHealthMonitor(model)
    (100 * model(torch.randn(8, 32, device="cuda")).sum()).backward()
    before = [p.grad.clone() for p in model.parameters()]
    monitor.check_gradients()
    waits.clear()

    with no_synchronisation():
        norm = monitor.apply_gradient_clipping(0.5)

    assert len(waits) == 1
    clipped = [p.grad.clone() for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for ours, parameter in zip(clipped, model.parameters()):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=0)  # two roundings of the coefficient


def test_a_model_moved_and_cast_after_construction_is_measured_on_its_device() -> None:
    model = nn.Linear(32, 32)
    monitor = GradientHealthMonitor(model)
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        model.zero_grad()
        model.to(device, dtype)(torch.randn(8, 32, device=device, dtype=dtype)).square().sum().backward()
        norm = math.hypot(*(torch.linalg.vector_norm(p.grad.double()).item() for p in model.parameters()))

        assert monitor.check_gradients()["global_grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_hooks_never_wait_and_a_query_waits_once(waits: list[int]) -> None:
    model = make_model(6)
    batch = torch.randn(8, 32, device="cuda")
    with ActivationMonitor(model) as monitor:
        model(batch)
        monitor.get_statistics()
        waits.clear()
        with no_synchronisation():
            output = model(batch)
            assert waits == []
            stats = monitor.get_statistics()
            monitor.detect_dead_neurons()
            monitor.detect_saturated()

    assert len(waits) == 3
    assert stats["11"]["mean"] == pytest.approx(output.double().mean().item(), rel=1e-9)
