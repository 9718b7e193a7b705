"""Diagnosis on CUDA: backward runs in its own thread, generators are on the device, memory stays bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steadygrad.diagnose import Capture, diagnose, diagnose_capture

pytestmark = pytest.mark.gpu


class Root(nn.Module):
    """A length that is 0 for a zero row."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h / (h.square().sum(-1, keepdim=True).sqrt() + 1e-6)


class Net(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.scale = nn.Parameter(torch.ones(4))
        self.block, self.drop, self.head = Root(), nn.Dropout(0.1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        if self.form == "plain":
            h = self.block(x)
        else:
            h = checkpoint(self.block, x, use_reentrant=self.form == "reentrant")
        return self.head(self.drop(h))


def bad_batch() -> Tensor:
    x = torch.randn(8, 4, device="cuda")
    x[5] = 0.0
    return x


@pytest.mark.parametrize("form", ["plain", "checkpointed", "reentrant"])
def test_a_derivative_that_fails_in_the_backward_thread_is_named(form: str) -> None:
    model = Net(form).cuda()

    cause = diagnose(lambda x: model(x).square().mean(), bad_batch(), model=model)

    assert cause is not None
    assert (cause.kind, cause.phase, cause.op, cause.module) == ("nan", "backward", "aten.sqrt", "block")
    assert cause.source is not None
    assert "sqrt()" in cause.source
    assert cause.samples == (5,)


def test_a_graph_of_a_graph_is_traced() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    with torch.no_grad():
        model[0].bias.fill_(-0.5)
    x = torch.randn(6, 4, device="cuda")
    x[1] = 0.0

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.square().sum(1).sqrt() - 1).square().mean()

    cause = diagnose(step, x, model=model)

    assert cause is not None
    assert (cause.phase, cause.op) == ("backward", "aten.sqrt")
    assert cause.source == "return (slope.square().sum(1).sqrt() - 1).square().mean()"


def test_everything_is_unchanged_and_the_replay_is_bit_for_bit() -> None:
    model = Net("plain").cuda()
    x = bad_batch()
    before = [p.detach().clone() for p in model.parameters()]
    states = torch.cuda.get_rng_state(), torch.get_rng_state()

    cause = diagnose(lambda x: model(x).square().mean(), x, model=model)

    assert cause is not None
    assert cause.reproducible == "yes, bit for bit (software, not hardware)"
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before))
    assert torch.equal(torch.cuda.get_rng_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


def test_a_captured_step_repeats_its_dropout() -> None:
    """The step fails only with the mask that it drew."""
    model = nn.Linear(4, 4).cuda()
    seen: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones(4096, device="cuda"), 0.5)
        seen.append(kept)
        wanted = seen[0].sum()
        return model(x).mean() + torch.log((kept.sum() - wanted).abs())

    x = torch.randn(3, 4, device="cuda")
    capture = Capture.take(step, (x,), {}, model=model, devices=[torch.device("cuda", 0)])
    assert torch.isinf(step(x))
    torch.cuda.manual_seed(99)

    cause = diagnose_capture(capture, expects="inf")

    assert cause is not None
    assert (cause.kind, cause.op) == ("inf", "aten.log")


def test_capturing_never_waits() -> None:
    x = torch.randn(3, 4, device="cuda")
    model = nn.Linear(4, 1).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        Capture.take(lambda x: x, (x,), {}, model=model, devices=[torch.device("cuda", 0)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_overflow_in_half_precision_is_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).cuda()
    x = torch.randn(4, 64, device="cuda")
    x[2] = 6e4 * model[0].weight.detach()[7].sign()

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            return model(x).float().square().mean()

    cause: Any = diagnose(step, x, model=model)

    assert cause is not None
    assert (cause.kind, cause.phase, cause.module) == ("inf", "forward", "0")
    assert cause.samples == (2,)


def test_memory_stays_near_that_of_a_step() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]).cuda()
    x = torch.randn(8192, 1024, device="cuda")

    def step(x: Tensor) -> Tensor:
        return model(x).square().mean() + (model[0][0].bias * 0).sum().sqrt()

    def peak_of(run: Any) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()

    def train() -> None:
        step(x).backward()
        model.zero_grad()

    peaks = peak_of(train), peak_of(lambda: diagnose(step, x, model=model))

    assert peaks[1] <= 1.1 * peaks[0] + x.numel() * x.element_size()
