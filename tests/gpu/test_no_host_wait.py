"""Law 5: in a healthy steady-state step with a fused optimizer, the host never waits for work of the current step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from steadygrad import (
    AdaGC,
    AdaptiveUnitClip,
    AutoClip,
    ClipValue,
    FixedNorm,
    Guard,
    GuardConfig,
    MeasureConfig,
    ZClip,
    conservative_scaler,
)
from steadygrad.config import ClipStrategy

pytestmark = pytest.mark.gpu


def make(clip: ClipStrategy | None = None, **kwargs: object) -> tuple[nn.Module, Guard]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = GuardConfig(clip=clip, measure=MeasureConfig(parameters_every=3, scan_every=7))
    return model, Guard(model, optimizer, config=config, **kwargs)  # type: ignore[arg-type]


def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: (model(x) - x).square().mean()


STRATEGIES = [None, FixedNorm(), ClipValue(), ZClip(), AutoClip(), AdaptiveUnitClip(), AdaGC()]


@pytest.mark.parametrize("clip", STRATEGIES, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "fp16 scaler"])
def test_fifty_steps_make_no_sync_call(clip: ClipStrategy | None, amp: bool) -> None:
    model, guard = make(clip, scaler=conservative_scaler() if amp else None)
    fn = loss_of(model)
    batches = [torch.randn(64, 256, device="cuda") for _ in range(4)]
    for i in range(8):  # buffers are compared once, kernels compile, memory is pinned
        guard.step(fn, batches[i % 4])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(50):
            guard.step(fn, batches[i % 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.flush()
    assert guard.stats()["num_steps"] == 58
    assert guard.stats()["num_skipped"] == 0


def test_the_call_returns_while_its_step_still_runs() -> None:
    model, guard = make(FixedNorm())
    fn = loss_of(model)
    x = torch.randn(64, 256, device="cuda")
    for _ in range(8):
        guard.step(fn, x)
    cycles = int(1e9)  # about half a second

    def slow(x: Tensor) -> Tensor:
        torch.cuda._sleep(cycles)
        return fn(x)

    torch.cuda.synchronize()
    start = time.perf_counter()
    guard.step(slow, x)
    returned = time.perf_counter() - start
    torch.cuda.synchronize()
    finished = time.perf_counter() - start
    assert returned < finished / 3, f"the call took {returned:.3f} s of the step's {finished:.3f} s"


def test_the_norm_is_the_same_in_every_run() -> None:
    grads = None
    norms = set()
    for _ in range(20):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(700, 900) for _ in range(20)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        grads = grads or [torch.randn_like(p) for p in model.parameters()]
        for p, g in zip(model.parameters(), grads):
            p.grad = g.clone()
        guard = Guard(model, optimizer)
        guard.step()
        guard.flush()
        assert guard.last is not None
        norms.add((guard.last.grad_norm, guard.last.clip_coefficient))
    assert len(norms) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_time_of_judging_a_step_changes_no_bit_of_the_training(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    batches = [torch.randn(64, 64, device="cuda", generator=generator).to(dtype) for _ in range(30)]
    weights = []
    for judged_at_once in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to("cuda", dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        guard = Guard(model, optimizer, config=GuardConfig(clip=FixedNorm(max_norm=0.3)))
        for i, x in enumerate(batches):
            guard.step((10.0 if i % 3 == 0 else 0.1) * (model(x) - x).square().mean())
            if judged_at_once:
                guard.flush()
        assert 5 < guard.stats()["num_clipped"] < 25  # clipped and unclipped, in turns
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_an_unfused_optimizer_gets_a_hint_how_to_avoid_the_wait() -> None:
    model = nn.Linear(4, 4).cuda()
    with pytest.warns(UserWarning, match="fused=True"):
        Guard(model, torch.optim.AdamW(model.parameters()))


def test_device_memory_stays_within_a_mebibyte_and_a_thousandth_of_the_gradients() -> None:
    model = nn.ModuleList([nn.Linear(2048, 2048) for _ in range(16)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = torch.cuda.memory_allocated()
    guard = Guard(model, optimizer)
    for _ in range(20):  # a snapshot stays on the device until it has been fetched, part by part
        guard.step()
    for spare in guard._rollback.snapshots._ring.spare:
        spare._finish()  # its thread reserves the memory of a snapshot in torch's cache, and releases it at once
    torch.cuda.synchronize()
    guard.step()
    held = torch.cuda.memory_allocated() - before
    gradients = sum(p.numel() * 4 for p in model.parameters())
    assert held <= (1 << 20) + gradients // 1000


def test_fifty_steps_with_snapshots_and_scans_make_no_sync_call() -> None:
    model, guard = make(FixedNorm())
    fn = loss_of(model)
    x = torch.randn(64, 256, device="cuda")
    for _ in range(58):
        guard.step(fn, x)
    guard.flush()
    assert guard._rollback.snapshots.newest_good is not None, "the ring was in use and the host never waited"
    assert guard.findings == [] or all(f.severity.value == "info" for f in guard.findings)


def test_a_scan_pins_no_memory_after_the_first() -> None:
    """Pinning waits for the device; with this many tensors, a scan needs larger buffers than other steps."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(150)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    guard = Guard(model, optimizer, config=GuardConfig(measure=MeasureConfig(scan_every=4)))
    fn, x = loss_of(model), torch.randn(8, 16, device="cuda")
    for _ in range(60):  # after the snapshot of step 50, which also pins
        guard.step(fn, x)
    guard.flush()
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    for _ in range(36):
        guard.step(fn, x)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before


def test_three_hundred_steps_with_all_features_and_a_large_state_make_no_sync_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    guard = Guard(model, optimizer, run_dir=tmp_path / "run")
    fn = loss_of(model)
    batches = [torch.randn(64, 1024, device="cuda") for _ in range(4)]
    for i in range(8):
        guard.step(fn, batches[i % 4])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(300):
            guard.step(fn, batches[i % 4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    guard.flush()
    assert guard.stats()["num_skipped"] == 0
    assert "3 snapshots" in guard._rollback.snapshots.describe(), "of steps 50, 150 and 250"
    guard.close()
