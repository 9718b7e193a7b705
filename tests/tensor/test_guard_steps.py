"""The guarded step: what it returns and records, what can be read afterwards, and how it is switched off."""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from listening import QUIET, last_of, listen, sgd
from torch import Tensor, nn
from training import assert_same, loss_of, make_batches, make_model, snapshot, train_plain

from steadygrad import (
    Action,
    FixedNorm,
    Guard,
    GuardConfig,
    Incident,
    Severity,
)
from steadygrad.config import Policy
from steadygrad.testing import corrupt_weight, poison_batches, poison_gradient, poison_loss

# --- what a step returns --------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


class Output:
    """Like the output of Hugging Face models for a loop: attributes."""

    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    loss: Tensor
    logits: tuple[Tensor, ...]


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """Like the one in transformers: a dict whose keys are also attributes."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        for name, value in self.items():
            super().__setattr__(name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def result_of(model: nn.Module, form: Callable[[Tensor, Tensor], Any]) -> Callable[[Any], Any]:
    def training_step(batch: tuple[Tensor, Tensor]) -> Any:
        logits = model(batch[0])
        return form(nn.functional.cross_entropy(logits, batch[1]), logits)

    return training_step


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor | None]]]] = {
    # what the function returns; how to get loss and logits from the result of guard.step
    "scalar": (lambda loss, logits: loss, lambda r: (r, None)),
    "one-element tensor": (lambda loss, logits: loss.reshape(1), lambda r: (r[0], None)),
    "dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda r: (r["loss"], r["logits"])),
    "nested dict": (lambda loss, logits: {"loss": loss, "a": {"b": [logits]}}, lambda r: (r["loss"], r["a"]["b"][0])),
    "tuple": (lambda loss, logits: (loss, logits), lambda r: (r[0], r[1])),
    "tuple with dict": (lambda loss, logits: (loss, {"logits": logits}), lambda r: (r[0], r[1]["logits"])),
    "list": (lambda loss, logits: [loss, logits], lambda r: (r[0], r[1])),
    "named tuple": (lambda loss, logits: Pair(loss, logits), lambda r: (r.loss, r.logits)),
    "object": (lambda loss, logits: Output(loss, logits), lambda r: (r.loss, r.logits)),
    "namespace": (lambda loss, logits: SimpleNamespace(loss=loss, all=[logits]), lambda r: (r.loss, r.all[0])),
    "frozen dataclass with slots": (lambda loss, logits: Sealed(loss, (logits,)), lambda r: (r.loss, r.logits[0])),
    "model output": (lambda loss, logits: ModelOutput(loss=loss, logits=logits), lambda r: (r["loss"], r["logits"])),
    "its attributes": (lambda loss, logits: ModelOutput(loss=loss, logits=logits), lambda r: (r.loss, r.logits)),
    "user dict": (lambda loss, logits: collections.UserDict(loss=loss, b=logits), lambda r: (r["loss"], r["b"])),
}  # fmt: skip


@pytest.mark.parametrize("call", ["step", "backward"])
@pytest.mark.parametrize(("form", "find"), FORMS.values(), ids=FORMS.keys())
def test_a_step_returns_what_the_function_returned_detached(form: Any, find: Any, call: str) -> None:
    model, reference = make_model(), make_model()
    batch = make_batches(1)[0]
    expected = result_of(reference, form)(batch)
    guard = Guard(model, sgd(model))

    result = getattr(guard, call)(result_of(model, form), batch)

    assert type(result) is type(expected)
    for got, want in zip(find(result), find(expected)):
        if want is not None:
            assert torch.equal(got, want)
            assert got.shape == want.shape
            assert not got.requires_grad
            assert got.grad_fn is None


def test_values_that_are_not_tensors_are_returned_unchanged() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    counts = collections.Counter("abc")
    result = guard.step(result_of(model, lambda loss, logits: (loss, 3, "text", counts, None)), make_batches(1)[0])
    assert result[1:] == (3, "text", counts, None)


@pytest.mark.parametrize(
    "keep",
    [Output, Sealed, lambda loss, logits: ModelOutput(loss=loss), lambda loss, logits: collections.UserDict(loss=loss)],
    ids=["object", "sealed", "model output", "user dict"],
)
def test_the_functions_own_object_is_unchanged(keep: Any) -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    made: list[Any] = []

    def form(loss: Tensor, logits: Tensor) -> Any:
        made.append((keep(loss, logits), loss))
        return made[0][0]

    result = guard.step(result_of(model, form), make_batches(1)[0])
    [(own, loss)] = made
    assert own is not result
    assert (own["loss"] if isinstance(own, Mapping) else own.loss) is loss
    assert loss.requires_grad


def test_an_object_that_cannot_be_copied_is_returned_itself() -> None:
    class Bound(Output):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("cannot pickle 'Bound' object")

    model = make_model()
    assert isinstance(Guard(model, sgd(model)).step(result_of(model, Bound), make_batches(1)[0]), Bound)


def test_the_loss_attribute_of_an_object_is_trained_on() -> None:
    plain, guarded = make_model(), make_model()
    batches = make_batches(3)
    optimizer = sgd(plain)
    train_plain(plain, optimizer, batches)
    guard = Guard(guarded, sgd(guarded), config=QUIET)
    for batch in batches:
        result = guard.step(result_of(guarded, Output), batch)
        assert last_of(guard).loss == result.loss.item()
    assert_same(snapshot(plain), snapshot(guarded))


def test_a_step_from_a_loss_returns_the_loss_detached_and_one_from_gradients_nothing() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    loss = loss_of(model)(make_batches(1)[0])
    result = guard.step(loss)
    assert torch.equal(result, loss)
    assert not result.requires_grad
    loss_of(model)(make_batches(1)[0]).backward()
    assert guard.step() is None


def test_arguments_reach_the_function() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    x, y = make_batches(1)[0]

    def training_step(x: Tensor, *, labels: Tensor, weight: float) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels) * weight

    result = guard.step(training_step, x, labels=y, weight=2.0)
    reference = make_model()
    assert torch.equal(result, nn.functional.cross_entropy(reference(x), y) * 2.0)


def test_gradients_are_cleared_after_our_backward_and_kept_after_the_users() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    batch = make_batches(1)[0]
    guard.step(loss_of(model), batch)
    assert all(p.grad is None for p in model.parameters())
    loss_of(model)(batch).backward()
    guard.step()
    assert all(p.grad is not None for p in model.parameters())


# --- the record -----------------------------------------------------------------------------------------------------


def test_steps_are_numbered_from_zero_applied_or_skipped() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    assert guard.last is None
    seen = []
    for batch in poison_batches(make_batches(5), at={0, 3}):
        guard.step(loss_of(model), batch)
        seen.append((last_of(guard).step, last_of(guard).skipped))
    assert seen == [(0, True), (1, False), (2, False), (3, True), (4, False)]


def test_the_record_has_the_numbers_of_the_step() -> None:
    model, reference = make_model(), make_model()
    batch = make_batches(1)[0]
    loss = loss_of(reference)(batch)
    loss.backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in reference.parameters()])).item()  # type: ignore[union-attr]

    guard = Guard(model, sgd(model), config=GuardConfig(clip=FixedNorm(max_norm=norm / 4)))
    guard.step(loss_of(model), batch)

    record = last_of(guard)
    assert record.loss == loss.item()
    assert record.grad_norm == pytest.approx(norm, rel=1e-6)  # fp32 dot products against float64
    assert record.clip_coefficient == pytest.approx(0.25, rel=1e-5)  # 1e-6 is added to the norm, as torch does
    assert record.clipped
    assert not record.skipped
    assert record.num_nonfinite == 0
    assert record.learning_rates == (0.1,)
    assert record.loss_scale is None
    assert (record.num_microbatches, record.num_dropped_microbatches) == (1, 0)
    assert record.time_seconds >= 0.0


def test_the_record_of_a_bad_step_has_nan_and_the_count() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    poison_gradient(model[2].bias, at={0}, value=math.inf)
    guard.step(loss_of(model), make_batches(1)[0])
    record = last_of(guard)
    assert record.skipped
    assert not record.clipped
    assert record.num_nonfinite == 1
    assert record.grad_norm == math.inf
    assert record.loss is not None
    assert math.isfinite(record.loss)


def test_a_step_from_gradients_alone_has_no_loss() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    loss_of(model)(make_batches(1)[0]).backward()
    guard.step()
    assert last_of(guard).loss is None


def test_recorded_learning_rates_are_those_used() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": 0.25}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    guard = Guard(model, optimizer, scheduler=scheduler)
    rates = []
    for batch in poison_batches(make_batches(4), at={1}):
        guard.step(loss_of(model), batch)
        rates.append(last_of(guard).learning_rates)
    assert rates == [(0.5, 0.25), (0.25, 0.125), (0.25, 0.125), (0.125, 0.0625)]  # a skip stops the schedule
    assert guard.stats()["current_learning_rate"] == 0.0625


def test_an_epoch_scheduler_steps_at_the_end_of_an_epoch() -> None:
    model = make_model()
    optimizer = sgd(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard = Guard(model, optimizer, scheduler=scheduler, config=GuardConfig(scheduler_interval="epoch"))  # type: ignore[arg-type]
    for batch in make_batches(2):
        guard.step(loss_of(model), batch)
    assert optimizer.param_groups[0]["lr"] == 1.0
    guard.end_epoch()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert guard.stats()["epoch"] == 1


def test_a_nonfinite_validation_loss_is_reported_and_kept_from_the_scheduler() -> None:
    model = make_model()
    optimizer = sgd(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    guard = Guard(model, optimizer, scheduler=scheduler, config=GuardConfig(policy=Policy.observe()))
    for loss in (1.0, math.nan, math.inf):
        guard.validate(loss)
        assert optimizer.param_groups[0]["lr"] == 1.0
    guard.end_epoch()
    assert scheduler.best == 1.0  # the last finite one
    found = [f for f in guard.findings if f.kind == "nonfinite_validation"]
    assert found
    assert {f.severity for f in found} == {Severity.ERROR}


def test_a_nonfinite_validation_changes_no_healthy_training() -> None:
    model = make_model()
    optimizer = sgd(model, lr=1.0)
    guard = Guard(model, optimizer)
    guard.validate(torch.empty(0).mean())  # an empty validation set says nothing about the weights
    assert [f.kind for f in guard.findings] == ["nonfinite_validation"]
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert {one.verdict.action for one in guard.incidents} == {Action.NONE}


# --- stats and health -----------------------------------------------------------------------------------------------

HEALTHY = {
    "model_healthy": True,
    "gradients_healthy": True,
    "losses_healthy": True,
    "parameters_healthy": True,
    "overall_healthy": True,
}


def test_stats_before_the_first_step_are_empty_numbers() -> None:
    model = make_model()
    stats = Guard(model, sgd(model)).stats()
    assert stats["current_learning_rate"] == 0.1
    assert stats["current_gradient_norm"] is None
    assert stats["current_loss"] is None
    assert (stats["num_steps"], stats["num_skipped"], stats["num_clipped"], stats["num_incidents"]) == (0, 0, 0, 0)


def test_stats_count_steps_skips_clips_and_incidents() -> None:
    model = make_model()
    tape, config = listen(clip=FixedNorm(max_norm=0.7))
    guard = Guard(model, sgd(model), config=config)
    for batch in poison_batches(make_batches(6), at={1, 4}):
        guard.step(loss_of(model), batch)
    stats = guard.stats()
    norms = [reading.grad_norm for reading in tape.readings if not reading.is_nonfinite]
    assert len(norms) == 4
    assert stats["num_steps"] == 6
    assert stats["num_skipped"] == 2
    assert stats["num_clipped"] == sum(norm > 0.7 for norm in norms) > 0
    assert stats["num_incidents"] == len(guard.incidents) > 0
    assert stats["current_gradient_norm"] == last_of(guard).grad_norm
    assert stats["current_loss"] == last_of(guard).loss
    assert stats["max_gradient_norm"] == max(norms)
    assert stats["mean_gradient_norm"] == pytest.approx(sum(norms) / 4)  # summed in another order, perhaps


def test_all_parts_of_a_healthy_training_are_healthy() -> None:
    model = make_model(norm=True)
    guard = Guard(model, sgd(model))
    assert guard.health() == HEALTHY
    for batch in make_batches(3):
        guard.step(loss_of(model), batch)
    assert guard.health() == HEALTHY


def test_a_bad_step_shows_in_gradients_and_losses_until_the_next_good_one() -> None:
    model = make_model(norm=True)
    guard = Guard(model, sgd(model))
    good, bad = make_batches(2)
    guard.step(loss_of(model), next(poison_batches([bad], at={0})))
    assert guard.health() == {
        **HEALTHY,
        "gradients_healthy": False,
        "losses_healthy": False,
        "overall_healthy": False,
    }
    guard.step(loss_of(model), good)
    assert guard.health() == HEALTHY


def test_a_bad_loss_with_good_gradients_shows_only_in_losses() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    guard.step(poison_loss(loss_of(model), at={0}), make_batches(1)[0])
    assert guard.health() == {**HEALTHY, "losses_healthy": False, "overall_healthy": False}


def test_a_bad_gradient_with_a_good_loss_shows_only_in_gradients() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    poison_gradient(model[0].weight, at={0})
    guard.step(loss_of(model), make_batches(1)[0])
    assert guard.health() == {**HEALTHY, "gradients_healthy": False, "overall_healthy": False}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_weight_shows_in_the_parameters(value: float) -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    guard.step(loss_of(model), make_batches(1)[0])
    corrupt_weight(model[2].weight, value)
    assert guard.health() == {
        **HEALTHY,
        "model_healthy": False,
        "parameters_healthy": False,
        "overall_healthy": False,
    }


def test_a_bad_weight_in_no_optimizer_shows_too() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    guard = Guard(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    corrupt_weight(model[0].weight)
    assert not guard.health()["parameters_healthy"]


def test_a_bad_buffer_shows_in_the_model() -> None:
    model = make_model(norm=True)
    guard = Guard(model, sgd(model))
    guard.step(loss_of(model), make_batches(1)[0])
    corrupt_weight(model[1].running_mean)
    assert guard.health() == {**HEALTHY, "model_healthy": False, "overall_healthy": False}


# --- findings -------------------------------------------------------------------------------------------------------


def train_into_a_nan_weight(policy: Policy) -> tuple[Guard, dict[str, Tensor], dict[str, Tensor]]:
    """Return a training whose weight is corrupted before its second step, and its state before and after that."""
    model = make_model()
    optimizer = sgd(model, momentum=0.9)
    guard = Guard(model, optimizer, config=GuardConfig(policy=policy))
    batches = make_batches(2)
    healthy = snapshot(model, optimizer)
    guard.step(loss_of(model), batches[0])
    corrupt_weight(model[2].weight)
    corrupted = {key: value.nan_to_num(7.0) for key, value in snapshot(model, optimizer).items()}
    guard.step(loss_of(model), batches[1])
    guard.flush()
    now = snapshot(model, optimizer)
    return guard, (corrupted if not policy.act else healthy), now


@pytest.mark.parametrize("policy", [Policy(), Policy.observe()], ids=["default", "observe"])
def test_a_nan_weight_is_a_critical_finding_that_names_it(policy: Policy) -> None:
    guard, _, _ = train_into_a_nan_weight(policy)
    found = [f for f in guard.findings if f.kind == "nonfinite_parameter"]
    assert [(f.severity, f.step) for f in found] == [(Severity.CRITICAL, 1)]
    assert "2.weight" in found[0].message
    assert found[0].advice
    assert found[0].kind in [f.kind for incident in guard.incidents for f in incident.findings]


def test_a_step_on_a_nan_weight_does_not_spread_it() -> None:
    guard, corrupted, now = train_into_a_nan_weight(Policy.observe())
    assert last_of(guard).skipped
    assert_same(corrupted, {key: value.nan_to_num(7.0) for key, value in now.items()})


def test_by_default_a_nan_weight_is_restored_from_a_snapshot() -> None:
    guard, healthy, now = train_into_a_nan_weight(Policy())
    assert_same(healthy, now)
    assert guard.health()["parameters_healthy"]


def test_good_weights_are_not_blamed_for_a_bad_batch() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    for batch in poison_batches(make_batches(2), at={1}):
        guard.step(loss_of(model), batch)
    kinds = {f.kind for f in guard.findings}
    assert kinds >= {"nonfinite_loss", "nonfinite_gradient"}
    assert "nonfinite_parameter" not in kinds


def test_every_skip_is_an_incident_with_finding_verdict_and_outcome() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    for batch in poison_batches(make_batches(3), at={1}):
        guard.step(loss_of(model), batch)
    assert guard.incidents
    for incident in guard.incidents:
        assert incident.step == incident.finding.step == 1
        assert incident.finding.severity is Severity.ERROR
        assert incident.verdict.action is incident.outcome.action is Action.SKIP
        assert "no weight was touched" in incident.outcome.message


def test_a_healthy_run_has_no_finding_above_info() -> None:
    model = make_model(norm=True)
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for batch in make_batches(40):
        guard.step(loss_of(model), batch)
    guard.flush()
    assert [f for f in guard.findings if f.severity is not Severity.INFO] == []
    assert guard.incidents == []


def test_on_incident_is_called_with_each_incident() -> None:
    seen: list[Incident] = []
    model = make_model()
    guard = Guard(model, sgd(model), config=GuardConfig(on_incident=seen.append))
    for batch in poison_batches(make_batches(4), at={0, 2}):
        guard.step(loss_of(model), batch)
    guard.flush()
    assert seen == guard.incidents
    assert {incident.step for incident in seen} == {0, 2}


def test_a_failing_on_incident_is_reported_once_and_never_ends_the_training(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def broken(incident: Incident) -> None:
        calls.append(incident.step)
        raise RuntimeError("the pager is off")

    alone, watched = make_model(), make_model()
    guards = [
        Guard(alone, sgd(alone)),
        Guard(watched, sgd(watched), config=GuardConfig(on_incident=broken)),
    ]
    for model, guard in zip((alone, watched), guards):
        for batch in poison_batches(make_batches(5), at={1, 3}):
            guard.step(loss_of(model), batch)
        guard.close()

    assert set(calls) == {1, 3}
    assert_same(snapshot(alone), snapshot(watched))
    assert guards[0].incidents == guards[1].incidents
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "the pager is off" in errors[0]


# --- STEADYGRAD=off -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["off", "OFF"])
@pytest.mark.parametrize("form", ["fn", "loss", "own backward"])
def test_a_disabled_guard_is_the_plain_loop(form: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYGRAD", word)
    plain, guarded = make_model(norm=True), make_model(norm=True)
    batches = make_batches(6)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer = torch.optim.AdamW(guarded.parameters(), lr=0.01)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (plain_optimizer, optimizer)]

    train_plain(plain, plain_optimizer, batches, scheduler=schedulers[0])
    guard = Guard(guarded, optimizer, config=GuardConfig(clip=FixedNorm(max_norm=1e-3)), scheduler=schedulers[1])
    for batch in batches:
        if form == "fn":
            guard.step(loss_of(guarded), batch)
        elif form == "loss":
            guard.step(loss_of(guarded)(batch))
        else:
            loss_of(guarded)(batch).backward()
            guard.step()
            optimizer.zero_grad()

    assert_same(snapshot(plain, plain_optimizer, schedulers[0]), snapshot(guarded, optimizer, schedulers[1]))
    assert guard.findings == []


def test_a_disabled_guard_lets_nan_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    model = make_model()
    guard = Guard(model, sgd(model))
    for batch in poison_batches(make_batches(2), at={1}):
        guard.step(loss_of(model), batch)
    assert all(p.isnan().any() for p in model.parameters())


def test_a_disabled_guard_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    model = make_model()
    with Guard(model, sgd(model), run_dir=tmp_path / "run") as guard:
        guard.step(loss_of(model), make_batches(1)[0])
    assert list(tmp_path.iterdir()) == []


def test_accumulation_and_scaler_of_a_disabled_guard_are_the_stock_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    plain, guarded = make_model(), make_model()
    batches = make_batches(6)
    optimizers = [sgd(plain), sgd(guarded)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    guard = Guard(guarded, optimizers[1], scaler=scalers[1])
    for first, second in zip(batches[::2], batches[1::2]):
        for batch in (first, second):
            scalers[0].scale(loss_of(plain)(batch) / 2).backward()
            guard.backward(lambda b: loss_of(guarded)(b) / 2, batch)
        scalers[0].step(optimizers[0])
        scalers[0].update()
        optimizers[0].zero_grad()
        guard.step()
    assert_same(snapshot(plain, scalers[0]), snapshot(guarded, scalers[1]))
    assert scalers[0].get_scale() == 16.0


def test_any_other_value_leaves_the_guard_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYGRAD", "on")
    model = make_model()
    guard = Guard(model, sgd(model))
    guard.step(loss_of(model), next(poison_batches(make_batches(1), at={0})))
    assert last_of(guard).skipped


# --- closing --------------------------------------------------------------------------------------------------------


def test_the_context_manager_closes_even_if_the_training_fails(tmp_path: Any) -> None:
    model = make_model()
    with Guard(model, sgd(model), run_dir=tmp_path / "a") as guard:
        guard.step(loss_of(model), make_batches(1)[0])
    with pytest.raises(RuntimeError, match="closed"):
        guard.step(loss_of(model), make_batches(1)[0])

    def fail() -> None:
        raise ZeroDivisionError

    guard = Guard(model, sgd(model), run_dir=tmp_path / "b")
    guard.step(loss_of(model), make_batches(1)[0])
    with pytest.raises(ZeroDivisionError), guard:
        fail()
    with pytest.raises(RuntimeError, match="closed"):
        guard.step(loss_of(model), make_batches(1)[0])
    for name in ("a", "b"):  # buffered lines have been written
        assert (tmp_path / name / "steps.jsonl").read_text().count("\n") == 1


def test_batches_yields_every_batch_in_order() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    batches = make_batches(4)
    assert [id(batch) for batch in guard.batches(batches)] == [id(batch) for batch in batches]
    assert list(guard.batches(iter(range(3)))) == [0, 1, 2]


# --- the learning rate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_step_with_a_nonfinite_learning_rate_changes_no_weight(rate: float) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer)
    for step, batch in enumerate(make_batches(6)):
        optimizer.param_groups[0]["lr"] = rate if step in (3, 4) else 1e-3
        before = snapshot(model)
        guard.step(loss_of(model), batch)
        assert last_of(guard).skipped == (step in (3, 4))
        if step in (3, 4):
            assert_same(snapshot(model), before)

    assert [(i.step, i.finding.kind, i.outcome.action.value) for i in guard.incidents] == [
        (3, "nonfinite_rate", "skip"),
        (4, "nonfinite_rate", "skip"),
    ]
    assert guard.incidents[0].finding.message == (
        f"the learning rate of parameter group 0 is {'NaN' if math.isnan(rate) else 'Inf'}"
    )


def test_a_group_without_a_learning_rate_is_stepped() -> None:
    class Signs(torch.optim.Optimizer):
        """Has no learning rate."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= 1e-3 * parameter.grad.sign()

    model = make_model()
    guard = Guard(model, Signs(model.parameters(), {"lr": None}))
    before = snapshot(model)
    guard.step(loss_of(model), make_batches(1)[0])

    assert not last_of(guard).skipped
    assert not any(torch.equal(now, before[name]) for name, now in snapshot(model).items())
