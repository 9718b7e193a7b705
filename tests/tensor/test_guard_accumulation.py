"""Gradient accumulation: invisible while nothing is bad; one bad microbatch skips the step, or only itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from listening import QUIET, last_of, sgd
from torch import Tensor, nn
from training import assert_same, loss_of, make_batches, make_model, snapshot

from steadygrad import FixedNorm, Guard, GuardConfig, Severity
from steadygrad.testing import poison_batches, poison_gradient, poison_loss

DROP = GuardConfig(clip=FixedNorm(max_norm=1e9), drop_bad_microbatches=True)
NUM = 4
"""Microbatches per step: a power of two, so that dividing by it, and by the two or three good ones, is exact."""

Batch = tuple[Tensor, Tensor]


def split(batches: Sequence[Batch], size: int = NUM) -> list[Sequence[Batch]]:
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def accumulate_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Batch]], *, scaler: Any = None
) -> None:
    """Run the user's loop, which divides each loss by the number of microbatches."""
    for step in steps:
        for batch in step:
            loss = loss_of(model)(batch) / len(step)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def accumulate_guarded(
    model: nn.Module,
    guard: Guard,
    steps: Sequence[Sequence[Batch]],
    *,
    form: str = "fn",
    wrap: Callable[[Any], Any] = lambda fn: fn,
) -> None:
    fn = wrap(lambda batch, count: loss_of(model)(batch) / count)
    for step in steps:
        for number, batch in enumerate(step):
            if form == "fn":
                guard.backward(fn, batch, len(step))
            elif form == "loss":
                guard.backward(fn(batch, len(step)))
            elif number < len(step) - 1:  # the last microbatch is part of the step
                guard.backward(fn, batch, len(step))
            else:
                guard.step(fn, batch, len(step))
        if form != "last in step":
            guard.step()
    guard.flush()


def make_pair(make: Callable[[Any], torch.optim.Optimizer], *, norm: bool = True) -> list[tuple[Any, Any]]:
    models = [make_model(norm=norm) for _ in range(2)]
    return [(model, make(model.parameters())) for model in models]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


# --- quiet ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fn", "loss", "last in step"])
@pytest.mark.parametrize("config", [QUIET, DROP], ids=["whole", "drop"])
def test_quiet_accumulation_equals_plain_accumulation_bit_for_bit(config: GuardConfig, form: str) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(12))
    accumulate_plain(plain, plain_optimizer, steps)
    guard = Guard(guarded, optimizer, config=config)
    accumulate_guarded(guarded, guard, steps, form=form)
    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))
    assert guard.findings == []
    assert guard.stats()["num_steps"] == 3


@pytest.mark.parametrize("config", [QUIET, DROP], ids=["whole", "drop"])
def test_an_inexact_number_of_microbatches_is_invisible_too(config: GuardConfig) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(8), size=3)
    accumulate_plain(plain, plain_optimizer, steps)
    accumulate_guarded(guarded, Guard(guarded, optimizer, config=config), steps)
    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))


def test_the_record_shows_the_microbatches_and_the_mean_loss() -> None:
    model, reference = make_model(), make_model()
    guard = Guard(model, sgd(model), config=QUIET)
    batches = make_batches(NUM)
    losses = [loss_of(reference)(batch).item() for batch in batches]
    accumulate_guarded(model, guard, [batches])
    record = last_of(guard)
    assert (record.num_microbatches, record.num_dropped_microbatches) == (NUM, 0)
    # Each fp32 loss was divided in fp32; their sum is float64.
    assert record.loss == pytest.approx(sum(losses) / NUM, rel=1e-6)


def test_only_the_accumulated_gradient_is_clipped() -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(lambda p: torch.optim.SGD(p, lr=0.1), norm=False)
    step = make_batches(NUM)
    for batch in step:
        (loss_of(plain)(batch) / NUM).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    plain_optimizer.step()
    guard = Guard(guarded, optimizer, config=GuardConfig(clip=FixedNorm(max_norm=0.1), drop_bad_microbatches=True))
    accumulate_guarded(guarded, guard, [step])
    assert last_of(guard).grad_norm == pytest.approx(norm.item(), rel=1e-5)  # torch sums in fp32
    for a, b in zip(plain.parameters(), guarded.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # the coefficient differs in its last bit


# --- default: the whole step is skipped -----------------------------------------------------------------------------

PLACES: dict[str, set[int]] = {"first": {0}, "middle": {1}, "last": {NUM - 1}, "all": set(range(NUM))}
every_place = pytest.mark.parametrize("bad", PLACES.values(), ids=PLACES.keys())


@every_place
@pytest.mark.parametrize("form", ["fn", "loss"])
def test_one_bad_microbatch_skips_the_whole_step(form: str, bad: set[int]) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(3 * NUM))
    accumulate_plain(plain, plain_optimizer, [steps[0], steps[2]])
    guard = Guard(guarded, optimizer, config=QUIET)
    poisoned = [steps[0], list(poison_batches(steps[1], at=bad)), steps[2]]
    accumulate_guarded(guarded, guard, poisoned, form=form)
    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))
    assert {incident.step for incident in guard.incidents} == {1}
    stats = guard.stats()
    assert (stats["num_steps"], stats["num_skipped"], stats["num_dropped_microbatches"]) == (3, 1, 0)


def test_the_plain_loop_would_have_failed() -> None:
    model = make_model(norm=True)
    optimizer = adamw(model.parameters())
    accumulate_plain(model, optimizer, [list(poison_batches(make_batches(NUM), at={1}))])
    assert not all(p.isfinite().all() for p in model.parameters())
    assert not model[1].running_mean.isfinite().all()


# --- on request: the bad one is dropped -----------------------------------------------------------------------------


def kept_of(step: Sequence[Batch], bad: Collection[int]) -> list[Batch]:
    return [batch for i, batch in enumerate(step) if i not in bad]


EXACT: dict[str, set[int]] = {
    # two or one of four remain: dividing by 4 and multiplying by 2 or 4 rounds nothing
    "first two": {0, 1},
    "first and last": {0, 3},
    "middle two": {1, 2},
    "all but the first": {1, 2, 3},
    "all but the last": {0, 1, 2},
    "none": set(),
}


@pytest.mark.parametrize("bad", EXACT.values(), ids=EXACT.keys())
@pytest.mark.parametrize("form", ["fn", "loss", "last in step"])
def test_dropped_microbatches_leave_the_average_of_the_good_ones(form: str, bad: set[int]) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(3 * NUM))
    accumulate_plain(plain, plain_optimizer, [steps[0], kept_of(steps[1], bad), steps[2]])
    guard = Guard(guarded, optimizer, config=DROP)
    accumulate_guarded(guarded, guard, [steps[0], list(poison_batches(steps[1], at=bad)), steps[2]], form=form)
    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))
    assert guard.stats()["num_skipped"] == 0


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {3}])
def test_one_of_four_dropped_leaves_the_average_of_three_within_rounding(bad: set[int]) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(lambda p: torch.optim.SGD(p, lr=0.1))
    step = make_batches(NUM)
    accumulate_plain(plain, plain_optimizer, [kept_of(step, bad)])
    guard = Guard(guarded, optimizer, config=DROP)
    accumulate_guarded(guarded, guard, [list(poison_batches(step, at=bad))])
    for a, b in zip(plain.parameters(), guarded.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # / 3 there, / 4 * 4/3 here: a few fp32 roundings
    for a, b in zip(plain.buffers(), guarded.buffers()):
        assert torch.equal(a, b)


def test_the_record_shows_what_was_dropped() -> None:
    model = make_model()
    guard = Guard(model, sgd(model), config=DROP)
    good = make_batches(NUM)
    reference = make_model()
    losses = [loss_of(reference)(batch).item() for batch in kept_of(good, {1, 2})]
    accumulate_guarded(model, guard, [list(poison_batches(good, at={1, 2}))])
    record = last_of(guard)
    assert not record.skipped
    assert record.num_nonfinite == 0
    assert (record.num_microbatches, record.num_dropped_microbatches) == (NUM, 2)
    assert record.loss == pytest.approx(sum(losses) / 2, rel=1e-6)  # the mean of the kept ones
    assert guard.stats()["num_dropped_microbatches"] == 2
    assert {incident.step for incident in guard.incidents} == {0}
    for number in (1, 2):
        skips = [i for i in guard.incidents if f"microbatch {number}" in i.finding.message]
        assert skips
        assert all("left out" in i.outcome.message for i in skips)
    assert not any("microbatch 0" in i.finding.message for i in guard.incidents)


def test_a_step_of_only_bad_microbatches_is_skipped_without_a_trace() -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(3 * NUM))
    accumulate_plain(plain, plain_optimizer, [steps[0], steps[2]])
    guard = Guard(guarded, optimizer, config=DROP)
    everything = set(range(NUM))
    accumulate_guarded(guarded, guard, [steps[0], list(poison_batches(steps[1], at=everything)), steps[2]])
    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))
    stats = guard.stats()
    assert (stats["num_steps"], stats["num_skipped"], stats["num_dropped_microbatches"]) == (3, 1, NUM)


def test_the_record_of_a_skipped_step_shows_its_dropped_microbatches() -> None:
    model = make_model()
    guard = Guard(model, sgd(model), config=DROP)
    accumulate_guarded(model, guard, [list(poison_batches(make_batches(2), at={0, 1}))])
    record = last_of(guard)
    assert record.skipped
    assert (record.step, record.num_microbatches, record.num_dropped_microbatches) == (0, 2, 2)
    assert record.loss is not None
    assert math.isnan(record.loss)


def test_a_bad_gradient_with_a_good_loss_is_dropped() -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(lambda p: torch.optim.SGD(p, lr=0.1))
    step = make_batches(2)
    accumulate_plain(plain, plain_optimizer, [step[:1]])
    guard = Guard(guarded, optimizer, config=DROP)
    poison_gradient(guarded[0].weight, at={1}, value=-math.inf)
    accumulate_guarded(guarded, guard, [step])
    assert_same(snapshot(plain), snapshot(guarded))
    assert [i.finding.kind for i in guard.incidents] == ["nonfinite_gradient"]


def test_a_bad_loss_with_good_gradients_is_dropped() -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(lambda p: torch.optim.SGD(p, lr=0.1))
    step = make_batches(2)
    accumulate_plain(plain, plain_optimizer, [step[1:]])
    guard = Guard(guarded, optimizer, config=DROP)
    accumulate_guarded(guarded, guard, [step], wrap=lambda fn: poison_loss(fn, at={0}))
    assert_same(snapshot(plain), snapshot(guarded))
    assert [i.finding.kind for i in guard.incidents] == ["nonfinite_loss"]


def test_a_single_bad_microbatch_is_a_skipped_step() -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    batches = make_batches(3)
    accumulate_plain(plain, plain_optimizer, [[batches[0]], [batches[2]]])
    guard = Guard(guarded, optimizer, config=DROP)
    for batch in poison_batches(batches, at={1}):
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(plain, plain_optimizer), snapshot(guarded, optimizer))
    assert guard.stats()["num_skipped"] == 1


def test_a_dropped_microbatch_leaves_no_trace_in_batch_statistics() -> None:
    plain, guarded = make_model(norm=True), make_model(norm=True)
    guard = Guard(guarded, sgd(guarded), config=DROP)
    batches = make_batches(NUM)
    for number, batch in enumerate(poison_batches(batches, at={0, 2})):
        before = snapshot(guarded)
        guard.backward(lambda b: loss_of(guarded)(b) / NUM, batch)
        if number in (0, 2):
            assert_same(before, snapshot(guarded))
        else:
            plain(batch[0])
            assert torch.equal(plain[1].running_mean, guarded[1].running_mean)
            assert torch.equal(plain[1].running_var, guarded[1].running_var)
            assert guarded[1].num_batches_tracked == (number + 1) // 2
    guard.step()


class Sparse(nn.Module):
    """A sparse embedding, and one that a microbatch may not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.extra = nn.Embedding(8, 3, sparse=True), nn.Linear(3, 3)

    def loss(self, tokens: list[int], *, extra: bool, factor: float = 0.5) -> Tensor:
        found = self.table(torch.tensor(tokens))
        return (self.extra(found) if extra else found).square().mean() * factor


def test_sparse_and_missing_gradients_accumulate_as_in_torch() -> None:
    plain, guarded = Sparse(), Sparse()
    optimizer = sgd(plain)
    guard = Guard(guarded, sgd(guarded), config=DROP)
    steps = [
        [([1, 1, 2], True), ([2, 5], False)],
        [([7], False), ([7, 0], True)],
        [([3], False), ([3, 4], False)],
    ]
    for step in steps:
        for tokens, extra in step:
            plain.loss(tokens, extra=extra).backward()
            guard.backward(guarded.loss, tokens, extra=extra)
        optimizer.step()
        optimizer.zero_grad()
        guard.step()
    assert_same(snapshot(plain), snapshot(guarded))


def test_a_dropped_microbatch_among_sparse_gradients_does_not_affect_the_others() -> None:
    plain, guarded = Sparse(), Sparse()
    plain.loss([1, 1, 2], extra=True, factor=1.0).backward()
    optimizer = sgd(plain)
    optimizer.step()
    guard = Guard(guarded, sgd(guarded), config=DROP)
    guard.backward(guarded.loss, [1, 1, 2], extra=True)
    guard.backward(guarded.loss, [5], extra=False, factor=math.nan)
    guard.step()
    assert_same(snapshot(plain), snapshot(guarded))


# --- with a GradScaler ----------------------------------------------------------------------------------------------


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


@pytest.mark.parametrize("config", [QUIET, DROP], ids=["whole", "drop"])
def test_quiet_accumulation_under_a_scaler_equals_the_stock_recipe(config: GuardConfig) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(5 * NUM))
    scalers = [make_scaler(), make_scaler()]
    accumulate_plain(plain, plain_optimizer, steps, scaler=scalers[0])
    guard = Guard(guarded, optimizer, config=config, scaler=scalers[1])
    accumulate_guarded(guarded, guard, steps)
    assert_same(snapshot(plain, plain_optimizer, scalers[0]), snapshot(guarded, optimizer, scalers[1]))
    assert scalers[1].get_scale() == 2.0**10


@every_place
def test_a_bad_microbatch_under_a_scaler_skips_the_step_and_holds_the_scale(bad: set[int]) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(3 * NUM))
    scalers = [make_scaler(), make_scaler()]
    accumulate_plain(plain, plain_optimizer, [steps[0], steps[2]], scaler=scalers[0])
    guard = Guard(guarded, optimizer, config=QUIET, scaler=scalers[1])
    accumulate_guarded(guarded, guard, [steps[0], list(poison_batches(steps[1], at=bad)), steps[2]])
    assert_same(snapshot(plain, plain_optimizer, scalers[0]), snapshot(guarded, optimizer, scalers[1]))


@pytest.mark.parametrize("bad", [{0, 1}, {1, 2, 3}], ids=["two", "three"])
def test_a_microbatch_with_a_bad_loss_is_dropped_under_a_scaler_too(bad: set[int]) -> None:
    (plain, plain_optimizer), (guarded, optimizer) = make_pair(adamw)
    steps = split(make_batches(2 * NUM))
    scalers = [make_scaler(), make_scaler()]
    accumulate_plain(plain, plain_optimizer, [kept_of(steps[0], bad), steps[1]], scaler=scalers[0])
    guard = Guard(guarded, optimizer, config=DROP, scaler=scalers[1])
    accumulate_guarded(guarded, guard, [list(poison_batches(steps[0], at=bad)), steps[1]])
    assert_same(snapshot(plain, plain_optimizer, scalers[0]), snapshot(guarded, optimizer, scalers[1]))
    assert all(i.finding.severity is Severity.ERROR for i in guard.incidents)
