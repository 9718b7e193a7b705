"""Mixed precision: autocast, the loss scaler, and the choice of a format. All on the CPU; tests/gpu has the rest."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import QUIET, last_of, sgd
from torch import nn
from training import assert_same, loss_of, make_batches, make_model, snapshot

import steadygrad
from steadygrad import FixedNorm, Guard, GuardConfig, Precision, Severity, choose_precision, conservative_scaler
from steadygrad.testing import poison_batches, poison_gradient, poison_loss

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def autocast_config(precision: Precision | None, **settings: Any) -> GuardConfig:
    return GuardConfig(**{"clip": FixedNorm(max_norm=1e9), **settings}, autocast=precision)


def make_scaler(scale: float = 2.0**8, **settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **{"growth_interval": 3, **settings})


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train_stock(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: Iterable[Any],
    *,
    dtype: torch.dtype = torch.float16,
    max_norm: float | None = None,
) -> None:
    """The recipe in torch's documentation."""
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model)(batch)
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


# --- autocast -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", DTYPES)
def test_autocast_from_the_config_equals_the_callers_own(precision: Precision) -> None:
    batches = make_batches(5)
    results = []
    for form in ("plain", "config", "around the step", "around the loss"):
        model = make_model(norm=True)
        optimizer = adamw(model)
        guard = Guard(model, optimizer, config=autocast_config(precision if form == "config" else None))
        for batch in batches:
            mine = torch.autocast("cpu", dtype=DTYPES[precision], enabled=form != "config")
            if form == "plain":
                with mine:
                    loss = loss_of(model)(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            elif form == "around the loss":
                with mine:
                    loss = loss_of(model)(batch)
                guard.step(loss)
            else:
                with mine:
                    guard.step(loss_of(model), batch)
        results.append(snapshot(model, optimizer))
    for other in results[1:]:
        assert_same(results[0], other)


def test_autocast_really_changes_the_numbers() -> None:
    batch = make_batches(1)[0]
    losses = {}
    for precision in (None, Precision.BF16, Precision.FP32):
        model = make_model()
        guard = Guard(model, sgd(model), config=autocast_config(precision))
        seen: list[torch.dtype] = []
        model[0].register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.dtype))
        losses[precision] = guard.step(loss_of(model), batch).item()
        assert seen == [torch.bfloat16 if precision is Precision.BF16 else torch.float32]
    assert losses[Precision.FP32] == losses[None] != losses[Precision.BF16]


def test_fp32_in_the_config_overrides_the_callers_autocast() -> None:
    model = make_model()
    guard = Guard(model, sgd(model), config=autocast_config(Precision.FP32))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guard.step(loss_of(model), make_batches(1)[0])
    assert seen == [torch.float32]


def test_a_bad_step_under_autocast_leaves_no_trace() -> None:
    plain, guarded = make_model(norm=True), make_model(norm=True)
    batches = make_batches(4)
    guards = [Guard(m, adamw(m), config=autocast_config(Precision.BF16)) for m in (plain, guarded)]
    for batch in (batches[0], batches[2], batches[3]):
        guards[0].step(loss_of(plain), batch)
    for batch in poison_batches(batches, at={1}):
        guards[1].step(loss_of(guarded), batch)
    assert_same(snapshot(plain), snapshot(guarded))


# --- a quiet scaler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2.0**8, 1.0, 2.0**-3])
def test_a_quiet_run_equals_the_stock_scaler_recipe_bit_for_bit(scale: float) -> None:
    plain, guarded = make_model(norm=True), make_model(norm=True)
    plain_optimizer, optimizer = adamw(plain), adamw(guarded)
    scalers = [make_scaler(scale), make_scaler(scale)]
    batches = make_batches(8)
    train_stock(plain, plain_optimizer, scalers[0], batches)
    guard = Guard(guarded, optimizer, config=autocast_config(Precision.FP16), scaler=scalers[1])
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, plain_optimizer, scalers[0]), snapshot(guarded, optimizer, scalers[1]))
    assert scalers[1].get_scale() == 4 * scale  # it grew twice, the same in both
    assert guard.findings == []


def test_the_record_has_the_scale_used_and_the_true_norm() -> None:
    model, reference = make_model(), make_model()
    scaler = make_scaler(16.0, growth_interval=1)
    guard = Guard(model, sgd(model), config=QUIET, scaler=scaler)
    batches = make_batches(2)
    loss_of(reference)(batches[0]).backward()
    norm = torch.cat([p.grad.double().flatten() for p in reference.parameters() if p.grad is not None]).norm().item()
    guard.step(loss_of(model), batches[0])
    assert last_of(guard).loss_scale == 16.0
    assert last_of(guard).grad_norm == pytest.approx(norm, rel=1e-6)  # fp32 products against float64
    assert guard.stats()["loss_scale"] == 16.0
    guard.step(loss_of(model), batches[1])
    assert last_of(guard).loss_scale == 32.0


def test_unscaled_gradients_are_clipped() -> None:
    plain, guarded = make_model(), make_model()
    plain_optimizer, optimizer = sgd(plain), sgd(guarded)
    scalers = [make_scaler(), make_scaler()]
    batches = make_batches(5)
    train_stock(plain, plain_optimizer, scalers[0], batches, max_norm=0.2)
    config = autocast_config(Precision.FP16, clip=FixedNorm(max_norm=0.2))
    guard = Guard(guarded, optimizer, config=config, scaler=scalers[1])
    for batch in batches:
        guard.step(loss_of(guarded), batch)
        assert last_of(guard).clipped
    for a, b in zip(plain.parameters(), guarded.parameters()):
        # One product with coefficient / scale here, two products there, and a float64 coefficient; the difference
        # can flip a rounding to fp16 (1e-3) in a later forward, which moves a weight by lr * max_norm * 1e-3.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert scalers[0].get_scale() == scalers[1].get_scale()


@pytest.mark.parametrize("form", ["loss", "backward", "own backward"])
def test_every_form_of_the_step_updates_the_scaler_the_same(form: str) -> None:
    plain, guarded = make_model(), make_model()
    plain_optimizer, optimizer = adamw(plain), adamw(guarded)
    scalers = [make_scaler(), make_scaler()]
    batches = make_batches(5)
    train_stock(plain, plain_optimizer, scalers[0], batches)
    guard = Guard(guarded, optimizer, config=QUIET, scaler=scalers[1])
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(guarded)(batch)
        if form == "loss":
            guard.step(loss)
        elif form == "backward":
            guard.backward(loss)
            guard.step()
        else:
            scalers[1].scale(loss).backward()
            guard.step()
            optimizer.zero_grad()
    assert_same(snapshot(plain, plain_optimizer, scalers[0]), snapshot(guarded, optimizer, scalers[1]))


def test_two_optimizers_share_one_scaler() -> None:
    plain, guarded = make_model(), make_model()
    kinds = [
        [torch.optim.SGD(m[0].parameters(), lr=0.1), torch.optim.AdamW(m[2].parameters())] for m in (plain, guarded)
    ]
    scalers = [make_scaler(), make_scaler()]
    batches = make_batches(4)
    for batch in batches:
        scalers[0].scale(loss_of(plain)(batch)).backward()
        for optimizer in kinds[0]:
            scalers[0].step(optimizer)
            optimizer.zero_grad()
        scalers[0].update()
    guard = Guard(guarded, kinds[1], config=QUIET, scaler=scalers[1])
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, *kinds[0], scalers[0]), snapshot(guarded, *kinds[1], scalers[1]))


def test_a_disabled_scaler_is_ignored() -> None:
    with_it, without = make_model(), make_model()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    guards = [
        Guard(with_it, adamw(with_it), scaler=scaler),
        Guard(without, adamw(without)),
    ]
    for model, guard in zip((with_it, without), guards):
        for batch in poison_batches(make_batches(4), at={1}):
            guard.step(loss_of(model), batch)
    assert_same(snapshot(with_it), snapshot(without))
    assert last_of(guards[0]).loss_scale is None
    assert [f.severity for f in guards[0].findings] == [f.severity for f in guards[1].findings]


# --- overflow -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{0}, {2}, {0, 1, 4}], ids=["first", "middle", "several"])
def test_an_overflow_reduces_the_scale_like_the_stock_recipe(bad: set[int]) -> None:
    plain, guarded = make_model(), make_model()
    plain_optimizer, optimizer = adamw(plain), adamw(guarded)
    scalers = [make_scaler(), make_scaler()]
    batches = make_batches(8)
    for model in (plain, guarded):
        poison_gradient(model[0].weight, at=bad, value=math.inf)
    train_stock(plain, plain_optimizer, scalers[0], batches)
    guard = Guard(guarded, optimizer, config=autocast_config(Precision.FP16), scaler=scalers[1])
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, plain_optimizer, scalers[0]), snapshot(guarded, optimizer, scalers[1]))
    assert guard.stats()["num_skipped"] == len(bad)


def test_a_real_overflow_in_fp16_is_resolved_by_the_scale_search_and_only_an_info() -> None:
    model = make_model()
    scaler = make_scaler(2.0**30)  # far beyond what fp16 gradients can hold
    guard = Guard(model, adamw(model), config=autocast_config(Precision.FP16), scaler=scaler)
    batches = make_batches(24)
    before = snapshot(model)
    guard.step(loss_of(model), batches[0])
    assert last_of(guard).skipped
    assert scaler.get_scale() == 2.0**29
    assert_same(before, snapshot(model))
    for batch in batches[1:]:
        guard.step(loss_of(model), batch)
    assert not last_of(guard).skipped
    assert 1.0 < scaler.get_scale() < 2.0**25
    overflows = [f for f in guard.findings if f.kind == "nonfinite_gradient"]
    assert overflows
    assert {f.severity for f in overflows} == {Severity.INFO}
    assert "loss scale 1.07374e+09 was too high" in overflows[0].advice
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_overflow_resets_the_growth_tracker() -> None:
    model = make_model()
    scaler = make_scaler(16.0)
    guard = Guard(model, sgd(model), scaler=scaler)
    poison_gradient(model[0].weight, at={2}, value=math.inf)
    trackers = []
    for batch in make_batches(5):
        guard.step(loss_of(model), batch)
        trackers.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert trackers == [(16.0, 1), (16.0, 2), (8.0, 0), (8.0, 1), (8.0, 2)]


# --- a loss that is not finite at any scale -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "batch"])
def test_a_nonfinite_loss_changes_neither_scale_nor_growth(where: str, value: float) -> None:
    model = make_model()
    scaler = make_scaler(16.0)
    guard = Guard(model, adamw(model), scaler=scaler)
    good = make_batches(4)
    fn = poison_loss(loss_of(model), at={1, 2}, value=value) if where == "loss" else loss_of(model)
    batches = good if where == "loss" else poison_batches(good, at={1, 2}, value=math.nan)
    seen = []
    for batch in batches:
        guard.step(fn, batch)
        seen.append((last_of(guard).skipped, scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert seen == [(False, 16.0, 1), (True, 16.0, 1), (True, 16.0, 1), (False, 16.0, 2)]
    found = [f for f in guard.findings if f.kind in ("nonfinite_loss", "nonfinite_gradient")]
    assert {f.severity for f in found} == {Severity.ERROR}


def test_the_stock_recipe_would_have_reduced_the_scale() -> None:
    model = make_model()
    scaler = make_scaler(16.0)
    train_stock(model, adamw(model), scaler, poison_batches(make_batches(3), at={1, 2}))
    assert scaler.get_scale() == 4.0


def test_a_bad_loss_leaves_no_trace_in_the_scaler() -> None:
    plain, guarded = make_model(), make_model()
    plain_optimizer, optimizer = adamw(plain), adamw(guarded)
    scalers = [make_scaler(), make_scaler()]
    batches = make_batches(9)
    bad = {0, 4}
    train_stock(plain, plain_optimizer, scalers[0], [b for i, b in enumerate(batches) if i not in bad])
    guard = Guard(guarded, optimizer, config=autocast_config(Precision.FP16), scaler=scalers[1])
    for batch in poison_batches(batches, at=bad):
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, plain_optimizer, scalers[0]), snapshot(guarded, optimizer, scalers[1]))


# --- presets --------------------------------------------------------------------------------------------------------


def test_the_conservative_scaler_starts_low_and_grows_slowly() -> None:
    scaler = conservative_scaler("cpu")
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 2.0**10
    assert scaler.get_growth_factor() == 1.5
    assert scaler.get_backoff_factor() == 0.5
    assert scaler.get_growth_interval() == 1000
    assert not conservative_scaler("cpu", enabled=False).is_enabled()


def test_the_conservative_scaler_guards_a_training() -> None:
    model = make_model()
    scaler = conservative_scaler("cpu")
    guard = Guard(model, adamw(model), config=autocast_config(Precision.FP16), scaler=scaler)
    for batch in make_batches(3):
        guard.step(loss_of(model), batch)
    assert last_of(guard).loss_scale == 2.0**10
    assert guard.stats()["num_skipped"] == 0


def test_a_precision_is_always_chosen() -> None:
    assert choose_precision("cpu") in Precision
    assert choose_precision(torch.device("cpu")) is choose_precision("cpu")
    assert choose_precision() in Precision
    assert choose_precision("meta") is Precision.FP32


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that must not be there")
def test_without_cuda_the_chosen_precision_is_the_safe_one() -> None:
    assert choose_precision("cuda") is Precision.FP32


def test_training_works_in_the_chosen_precision() -> None:
    model = make_model()
    guard = Guard(model, sgd(model), config=GuardConfig(autocast=choose_precision("cpu")))
    guard.step(loss_of(model), make_batches(1)[0])
    assert not last_of(guard).skipped


def test_choosing_a_precision_never_kills_the_process() -> None:
    # Without conftest's cap, a half-precision matmul may die with SIGILL here: only the probe may die.
    env = {**os.environ, "PYTHONPATH": str(Path(steadygrad.__file__).parents[1])}
    env.pop("ONEDNN_MAX_CPU_ISA", None)
    code = "from steadygrad import choose_precision; print(choose_precision('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert Precision(done.stdout.strip()) in (Precision.BF16, Precision.FP32)
