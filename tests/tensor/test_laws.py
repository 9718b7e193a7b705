"""The laws of the guarded step, on every optimizer: a quiet guard is invisible, a bad step leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import (
    DEVICES,
    assert_same,
    loss_of,
    make_batches,
    make_model,
    snapshot,
    train_plain,
)

from steadygrad import FixedNorm, Guard, GuardConfig
from steadygrad.testing import poison_batches, poison_gradient, poison_loss

QUIET = GuardConfig(clip=FixedNorm(max_norm=1e9))
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD momentum fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "SGD nesterov fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD dampened fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
every_device = pytest.mark.parametrize("device", DEVICES)
pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")


@every_device
@every_optimizer
def test_a_quiet_guard_is_invisible(make: Make, device: str) -> None:
    plain, guarded = make_model(device, norm=True), make_model(device, norm=True)
    batches = make_batches(12, device)
    plain_optimizer, optimizer = make(plain.parameters()), make(guarded.parameters())

    train_plain(plain, plain_optimizer, batches)
    guard = Guard(guarded, optimizer, config=QUIET)
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    guard.flush()

    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))
    assert guard.findings == []


@every_device
@pytest.mark.parametrize("bad", [{0}, {3}, {0, 1, 6}], ids=["first", "middle", "several"])
@every_optimizer
def test_a_skipped_batch_leaves_no_trace(make: Make, bad: set[int], device: str) -> None:
    plain, guarded = make_model(device, norm=True), make_model(device, norm=True)
    batches = make_batches(10, device)
    plain_optimizer, optimizer = make(plain.parameters()), make(guarded.parameters())

    train_plain(plain, plain_optimizer, [b for i, b in enumerate(batches) if i not in bad])
    guard = Guard(guarded, optimizer, config=QUIET)
    for batch in poison_batches(batches, at=bad):
        guard.step(loss_of(guarded), batch)
    guard.flush()

    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))
    assert {incident.step for incident in guard.incidents} == bad


@every_device
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@every_optimizer
def test_one_bad_gradient_element_never_reaches_a_weight(make: Make, value: float, device: str) -> None:
    model = make_model(device)
    optimizer = make(model.parameters())
    guard = Guard(model, optimizer, config=QUIET)
    handle = poison_gradient(model[2].weight, at={0, 2}, value=value)

    for step, batch in enumerate(make_batches(4, device)):
        before = snapshot(model, optimizer)
        guard.step(loss_of(model), batch)
        if step in (0, 2):
            assert_same(before, snapshot(model, optimizer))
    handle.remove()
    guard.flush()

    assert all(p.isfinite().all() for p in model.parameters())
    assert [(i.step, i.finding.kind) for i in guard.incidents] == [(0, "nonfinite_gradient"), (2, "nonfinite_gradient")]
    assert guard.incidents[0].finding.evidence["parameters"] == ["2.weight"]


@every_device
def test_a_bad_loss_with_good_gradients_is_skipped_too(device: str) -> None:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = Guard(model, optimizer)
    fn = poison_loss(loss_of(model), at={1})
    batches = make_batches(2, device)
    guard.step(fn, batches[0])
    before = snapshot(model, optimizer)

    guard.step(fn, batches[1])
    guard.flush()

    assert_same(before, snapshot(model, optimizer))
    assert [i.finding.kind for i in guard.incidents] == ["nonfinite_loss"]
    assert guard.last is not None
    assert guard.last.skipped
    assert guard.last.num_nonfinite == 0


@every_device
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [0.05, 0.2])
def test_active_clipping_gives_the_weights_of_clip_grad_norm_within_rounding(
    max_norm: float, fused: bool, device: str
) -> None:
    plain, guarded = make_model(device), make_model(device)
    batches = make_batches(10, device)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=fused)
    optimizer = torch.optim.AdamW(guarded.parameters(), lr=0.01, fused=fused)

    train_plain(plain, plain_optimizer, batches, max_norm=max_norm)
    guard = Guard(guarded, optimizer, config=GuardConfig(clip=FixedNorm(max_norm=max_norm)))
    for batch in batches:
        guard.step(loss_of(guarded), batch)

    assert guard.stats()["num_clipped"] == len(batches)
    for a, b in zip(plain.parameters(), guarded.parameters()):
        # A coefficient differs in its last bit (float64 here, float32 in torch); ten Adam steps amplify it a little.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class _Scheduled:
    """A schedule whose every step changes the learning rate visibly."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


@every_device
@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_does_not_advance_scheduler_and_ema(fused: bool, device: str) -> None:
    plain, guarded = make_model(device, norm=True), make_model(device, norm=True)
    batches = make_batches(8, device)
    bad = {0, 4}
    runs = []
    for model in (plain, guarded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        runs.append((optimizer, _Scheduled(optimizer).inner, ema))

    train_plain(
        plain,
        runs[0][0],
        [b for i, b in enumerate(batches) if i not in bad],
        scheduler=runs[0][1],
        ema=runs[0][2],
    )
    optimizer, scheduler, ema = runs[1]
    guard = Guard(guarded, optimizer, config=QUIET, scheduler=scheduler, ema=ema)
    for batch in poison_batches(batches, at=bad):
        guard.step(loss_of(guarded), batch)
    guard.flush()

    assert_same(snapshot(plain, *runs[0]), snapshot(guarded, *runs[1]))


@every_device
def test_every_form_of_the_step_gives_the_same_weights(device: str) -> None:
    batches = make_batches(6, device)
    results = []
    for form in ("fn", "loss", "backward fn", "backward loss", "own backward"):
        model = make_model(device, norm=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        guard = Guard(model, optimizer, config=QUIET)
        fn = loss_of(model)
        for batch in poison_batches(batches, at={2}):
            if form == "fn":
                guard.step(fn, batch)
            elif form == "loss":
                guard.step(fn(batch))
            elif form == "backward fn":
                guard.backward(fn, batch)
                guard.step()
            elif form == "backward loss":
                guard.backward(fn(batch))
                guard.step()
            else:
                fn(batch).backward()
                guard.step()
                optimizer.zero_grad()
        guard.flush()
        results.append(snapshot(model, optimizer))
        assert guard.stats()["num_skipped"] == 1
    for other in results[1:]:
        assert_same(results[0], other)


@every_device
def test_a_compiled_model_is_guarded_too(device: str) -> None:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    compiled = torch.compile(model, backend="aot_eager")
    guard = Guard(compiled, optimizer, config=QUIET)
    for batch in poison_batches(make_batches(4, device), at={1}):
        guard.step(loss_of(compiled), batch)
    guard.flush()
    assert guard.stats()["num_skipped"] == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert guard.incidents[0].finding.kind == "nonfinite_loss"


class _Spectral(nn.Module):
    """Has a buffer that it replaces, one that it writes like numpy, and one that it never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("hidden", torch.zeros(6))
        self.register_buffer("constant", torch.ones(100_000))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().sum(0)  # replaced, not changed in place
        self.hidden.data += x.detach().sum(0)  # no version changes
        return self.linear(x + self.seen * 0 + self.constant[:6])


@every_device
@pytest.mark.parametrize("form", ["fn", "loss"])
def test_buffers_that_change_invisibly_are_restored(form: str, device: str) -> None:
    torch.manual_seed(0)
    model = _Spectral().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    guard = Guard(model, optimizer)
    fn = loss_of(model)
    for step, batch in enumerate(poison_batches(make_batches(5, device), at={2, 4})):
        before = snapshot(model)
        guard.step(fn, batch) if form == "fn" else guard.step(fn(batch))
        if step in (2, 4):
            assert_same(before, snapshot(model))
    assert model.seen.isfinite().all()
    assert model.seen.any()
