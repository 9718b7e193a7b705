"""Guard.from_accelerator in loops like those of accelerate's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad import ConfigError, Guard, GuardConfig, UsageError, ZClip
from steadygrad.testing import poison_batches

accelerate = pytest.importorskip("accelerate")

NUM_BATCHES = 12


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(NUM_BATCHES)
    ]


def run(
    batches: Sequence[Any], *, guarded: str | None = None, accumulate: int = 1, hand_over: bool = False, **options: Any
) -> tuple[nn.Module, Any, Guard | None]:
    """Run one accelerate loop; `guarded`: "guard" calls guard.step(), "optimizer" keeps optimizer.step()."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision="no")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    guard = None
    if guarded is not None:
        config = options.pop("config", GuardConfig(clip=None))
        handed = {"scheduler": scheduler} if hand_over else {}
        guard = Guard.from_accelerator(accelerator, model, optimizer, config=config, **handed, **options)
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            guard.step() if guard is not None and guarded == "guard" else optimizer.step()
            if not hand_over:
                scheduler.step()
            optimizer.zero_grad()
    return model, optimizer, guard


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    for i, moments in saved["state"].items():
        state |= {f"{i}.{name}": v.clone() for name, v in moments.items() if isinstance(v, Tensor)}
    return state | {"lr": torch.tensor(saved["param_groups"][0]["lr"])}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("guarded", ["guard", "optimizer"])
@pytest.mark.parametrize("hand_over", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_quiet_loop_is_bit_identical(guarded: str, hand_over: bool, accumulate: int) -> None:
    model, optimizer, _ = run(make_batches(), accumulate=accumulate)
    expected = state_of(model, optimizer)

    model, optimizer, guard = run(make_batches(), guarded=guarded, hand_over=hand_over, accumulate=accumulate)

    assert_equal(state_of(model, optimizer), expected)
    assert guard is not None
    assert guard.stats()["num_steps"] == NUM_BATCHES / accumulate
    assert not guard.incidents


@pytest.mark.parametrize("hand_over", [False, True])
@pytest.mark.parametrize("guarded", ["guard", "optimizer"])
def test_a_bad_batch_ruins_the_plain_loop_but_not_the_guarded_one(guarded: str, hand_over: bool) -> None:
    spoiled = list(poison_batches(make_batches(), at={3}))
    model, _, _ = run(spoiled)
    assert not all(p.isfinite().all() for p in model.parameters())

    model, optimizer, guard = run(spoiled, guarded=guarded, hand_over=hand_over)
    found = state_of(model, optimizer)
    batches = make_batches()
    del batches[3]
    expected = state_of(*run(batches)[:2])

    assert_equal(found, expected)  # including the learning rate of the schedule
    assert guard is not None
    assert {"nonfinite_loss", "nonfinite_gradient", "nonfinite_input"} <= {f.kind for f in guard.findings}
    assert {f.step for f in guard.findings} == {3}


def test_one_bad_microbatch_skips_its_step() -> None:
    spoiled = list(poison_batches(make_batches(), at={4}))
    model, optimizer, guard = run(spoiled, guarded="guard", accumulate=3)
    batches = make_batches()
    expected = state_of(*run(batches[:3] + batches[6:], accumulate=3)[:2])
    assert_equal(state_of(model, optimizer), expected)
    assert guard is not None
    assert {f.step for f in guard.findings} == {1}


def test_the_loss_in_the_record_is_the_mean_over_the_microbatches() -> None:
    batches, model = make_batches()[:3], make_model()
    expected = sum(float(nn.functional.cross_entropy(model(x), y).detach()) for x, y in batches) / 3
    _, _, guard = run(batches, guarded="guard", accumulate=3)
    assert guard is not None
    assert guard.last is not None
    assert guard.last.loss == pytest.approx(expected, rel=1e-6)
    assert guard.last.num_microbatches == 3


def test_calling_both_steps_steps_once() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    guard = Guard.from_accelerator(accelerator, model, optimizer)
    accelerator.backward(model(torch.ones(4, 6)).square().mean())
    guard.step()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model[0].weight)
    assert guard.stats()["num_steps"] == 1


def test_a_function_given_to_the_guard_is_divided_for_accumulation_like_by_accelerate() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    guard = Guard.from_accelerator(accelerator, model, optimizer, config=GuardConfig(clip=None))
    for x, y in make_batches()[:4]:
        with accelerator.accumulate(model):
            guard.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)
    assert guard.stats()["num_steps"] == 2
    assert all(p.grad is None for p in model.parameters())

    reference = make_model()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for number, (x, y) in enumerate(make_batches()[:4]):
        (nn.functional.cross_entropy(reference(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, model.state_dict().values(), reference.state_dict().values()))


def test_closing_the_guard_restores_accelerate() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    before = set(vars(accelerator)), set(vars(optimizer)), len(model._forward_pre_hooks)
    with Guard.from_accelerator(accelerator, model, optimizer):
        assert "backward" in vars(accelerator)
    assert (set(vars(accelerator)), set(vars(optimizer)), len(model._forward_pre_hooks)) == before
    assert optimizer.step_was_skipped is False
    accelerator.backward(model(torch.ones(4, 6)).square().mean())
    optimizer.step()


def test_an_exception_in_the_forward_leaves_the_guard_usable() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    guard = Guard.from_accelerator(accelerator, model, optimizer)
    with pytest.raises(RuntimeError):
        model(torch.ones(4, 5))
    accelerator.backward(model(torch.ones(4, 6)).square().mean())
    guard.step()
    assert guard.stats()["num_steps"] == 1


def test_steadygrad_off_leaves_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = state_of(*run(make_batches(), accumulate=3)[:2])
    monkeypatch.setenv("STEADYGRAD", "off")
    for guarded in ("guard", "optimizer"):
        model, optimizer, _ = run(make_batches(), guarded=guarded, accumulate=3, config=GuardConfig())
        assert_equal(state_of(model, optimizer), expected)


def test_accelerates_checkpoints_include_the_guard(tmp_path: Path) -> None:
    def begin() -> tuple[Any, nn.Module, Any, Guard]:
        accelerator = accelerate.Accelerator(cpu=True)
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        guard = Guard.from_accelerator(accelerator, model, optimizer, config=GuardConfig(clip=ZClip()))
        accelerator.register_for_checkpointing(guard)
        return accelerator, model, optimizer, guard

    def go_on(accelerator: Any, model: nn.Module, optimizer: Any, guard: Guard, batches: Sequence[Any]) -> None:
        for x, y in batches:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            guard.step()
            optimizer.zero_grad()

    batches = list(poison_batches(make_batches(), at={2}))
    accelerator, model, optimizer, guard = begin()
    go_on(accelerator, model, optimizer, guard, batches[:6])
    accelerator.save_state(str(tmp_path))
    go_on(accelerator, model, optimizer, guard, batches[6:])
    expected, stats = state_of(model, optimizer), guard.stats()

    accelerator, model, optimizer, guard = begin()
    accelerator.load_state(str(tmp_path))
    go_on(accelerator, model, optimizer, guard, batches[6:])

    assert_equal(state_of(model, optimizer), expected)
    assert guard.stats() == {**stats, "num_incidents": 0}
    assert guard.stats()["num_skipped"] == 1, "from before the checkpoint"


def test_invalid_use_is_reported() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=r"must be an accelerate\.Accelerator, got Linear"):
        Guard.from_accelerator(nn.Linear(1, 1), model, optimizer)
    with pytest.raises(ConfigError, match=r"accelerator\.backward runs backward"):
        Guard.from_accelerator(
            accelerate.Accelerator(cpu=True), model, optimizer, config=GuardConfig(drop_bad_microbatches=True)
        )
