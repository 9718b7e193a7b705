"""fp16 with a GradScaler on CUDA: overflow reduces the scale, a bad loss does not, unscaling is exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from steadygrad import FixedNorm, Guard, GuardConfig, Precision
from steadygrad.testing import poison_gradient, poison_loss

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*runs without fused=True")]


@pytest.mark.parametrize("fused", [False, True])
def test_a_quiet_fp16_run_equals_the_stock_recipe_bit_for_bit(fused: bool) -> None:
    results = []
    batches = [torch.randn(32, 64, device="cuda") for _ in range(10)]
    for guarded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler(init_scale=2.0**24, growth_interval=3)
        config = GuardConfig(clip=FixedNorm(max_norm=1e9), autocast=Precision.FP16)
        guard = Guard(model, optimizer, config=config, scaler=scaler) if guarded else None
        for x in batches:
            if guard is not None:
                guard.step(lambda x, m=model: (m(x) - x).square().mean(), x)
                continue
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (model(x) - x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(([p.detach().clone() for p in model.parameters()], scaler.get_scale()))
        if guard is not None:
            assert guard.stats()["num_skipped"] > 0, "the scale starts too high, so that it has to be found"
            assert all(f.severity.value == "info" for f in guard.findings)
    assert results[0][1] == results[1][1]
    for a, b in zip(results[0][0], results[1][0]):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_reduces_the_scale_and_a_bad_loss_does_not(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler(init_scale=1024.0, growth_interval=1000)
    guard = Guard(model, optimizer, scaler=scaler)
    fn = poison_loss(lambda x: model(x).square().mean(), at={1})
    poison_gradient(model.weight, at={2}, value=math.inf)
    x = torch.randn(4, 8, device="cuda")
    scales = []
    for _ in range(4):
        guard.step(fn, x)
        scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
    guard.flush()
    assert scales == [(1024.0, 1), (1024.0, 1), (512.0, 0), (512.0, 1)]
    assert guard.stats()["num_skipped"] == 2
