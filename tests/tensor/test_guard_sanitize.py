"""The other two actions on a non-finite step, SANITIZE and RAISE, and the functions for custom loops."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from listening import Tape, last_of, listen, sgd
from torch import Tensor, nn
from training import assert_same, loss_of, make_batches, make_model, snapshot

from steadygrad import (
    Action,
    DetectConfig,
    FixedNorm,
    Guard,
    GuardConfig,
    NonFiniteError,
    Severity,
    TrainingHalted,
    check_nan_inf,
    handle_nan_inf,
)
from steadygrad.config import ClipStrategy
from steadygrad.facts import EpochEnd
from steadygrad.testing import poison_batches, poison_gradient, poison_loss

NAN, INF = math.nan, math.inf


def sanitizing(value: float = 0.0, clip: ClipStrategy | None = None) -> GuardConfig:
    return GuardConfig(clip=clip, on_nonfinite=Action.SANITIZE, sanitize_value=value)


def train_by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, *, value: float, max_norm: float | None = None
) -> None:
    """A hand-written loop: replace in every gradient, clip, step."""
    for batch in batches:
        loss_of(model)(batch).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            torch.nan_to_num_(parameter.grad, nan=value, posinf=value, neginf=value)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


# --- SANITIZE -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_sanitize_replaces_bad_elements_with_the_value_and_steps(value: float, poison: float) -> None:
    by_hand, guarded = make_model(), make_model()
    batches = make_batches(5)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (by_hand, guarded)]
    for model in (by_hand, guarded):
        poison_gradient(model[0].weight, at={0, 3}, value=poison)
    train_by_hand(by_hand, optimizers[0], batches, value=value)
    guard = Guard(guarded, optimizers[1], config=sanitizing(value))
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(by_hand, optimizers[0]), snapshot(guarded, optimizers[1]))
    assert guard.stats()["num_skipped"] == 0


def test_sanitize_then_clip_equals_the_hand_written_loop() -> None:
    by_hand, guarded = make_model(), make_model()
    batches = make_batches(5)
    for model in (by_hand, guarded):
        poison_gradient(model[2].weight, at={1})
    train_by_hand(by_hand, sgd(by_hand), batches, value=2.0, max_norm=0.3)
    guard = Guard(guarded, sgd(guarded), config=sanitizing(2.0, FixedNorm(max_norm=0.3)))
    for step, batch in enumerate(batches):
        guard.step(loss_of(guarded), batch)
        if step == 1:
            assert last_of(guard).clipped  # replaced values count towards the norm
    for a, b in zip(by_hand.parameters(), guarded.parameters()):
        # A coefficient differs in its last bit (float64 here, float32 in torch).
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_nan_batch_becomes_a_step_of_zeros() -> None:
    by_hand, guarded = make_model(), make_model()
    batches = list(poison_batches(make_batches(4), at={2}))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (by_hand, guarded)]
    train_by_hand(by_hand, optimizers[0], batches, value=0.0)
    guard = Guard(guarded, optimizers[1], config=sanitizing())
    for batch in batches:
        guard.step(loss_of(guarded), batch)
    assert_same(snapshot(by_hand, optimizers[0]), snapshot(guarded, optimizers[1]))


def test_the_record_of_a_sanitized_step_has_finding_and_action() -> None:
    model = make_model()
    tape, settings = listen(clip=None, on_nonfinite=Action.SANITIZE)
    guard = Guard(model, sgd(model), config=settings)
    poison_gradient(model[0].weight, at={0}, value=NAN)
    poison_gradient(model[2].bias, at={0}, value=INF)
    guard.step(loss_of(model), make_batches(1)[0])
    record = last_of(guard)
    assert not record.skipped
    assert record.num_nonfinite == 2
    assert math.isnan(record.grad_norm)
    reading = tape.readings[0]
    assert (reading.num_nan, list(reading.gradients.nonfinite())) == (1, ["0.weight", "2.bias"])
    assert math.isfinite(reading.applied_norm)
    assert reading.applied_norm > 0
    [incident] = guard.incidents
    assert incident.finding.kind == "nonfinite_gradient"
    assert incident.finding.severity is Severity.ERROR
    assert incident.verdict.action is incident.outcome.action is Action.SANITIZE
    assert "2 gradient elements were replaced" in incident.outcome.message


def test_sanitize_does_not_change_a_healthy_step() -> None:
    plain, sanitized = make_model(norm=True), make_model(norm=True)
    for model, config in ((plain, GuardConfig(clip=None)), (sanitized, sanitizing(9.0))):
        guard = Guard(model, sgd(model), config=config)
        for batch in make_batches(4):
            guard.step(loss_of(model), batch)
        assert guard.incidents == []
    assert_same(snapshot(plain), snapshot(sanitized))


def test_a_sanitized_loss_keeps_the_mean_of_its_epoch_finite() -> None:
    model = make_model()
    ends: list[EpochEnd] = []

    class Ends(Tape):
        def observe(self, fact: Any) -> Any:
            ends.extend([fact] if isinstance(fact, EpochEnd) else [])
            return ()

    config = GuardConfig(clip=None, on_nonfinite=Action.SANITIZE, detect=DetectConfig(rules=(Ends(),)))
    guard = Guard(model, sgd(model), config=config)
    losses = []
    for batch in poison_batches(make_batches(4), at=(1,)):
        guard.step(loss_of(model), batch)
        assert guard.last is not None
        losses.append(guard.last.loss)
    guard.end_epoch()

    assert math.isnan(losses.pop(1) or 0.0)
    assert [end.train_loss for end in ends] == pytest.approx([sum(losses) / 3])


def test_sanitize_repairs_sparse_gradients() -> None:
    by_hand, guarded = (nn.Embedding(6, 3, sparse=True) for _ in range(2))
    by_hand.load_state_dict(guarded.state_dict())
    tokens, factors = torch.tensor([1, 4, 4]), torch.tensor([[NAN], [1.0], [2.0]])

    def loss_on(table: nn.Embedding) -> Tensor:
        return (table(tokens) * factors).nansum()

    loss_on(by_hand).backward()
    assert by_hand.weight.grad is not None
    torch.nan_to_num_(by_hand.weight.grad._values(), nan=0.5)
    sgd(by_hand).step()
    guard = Guard(guarded, sgd(guarded), config=sanitizing(0.5))
    guard.step(loss_on, guarded)
    assert_same(snapshot(by_hand), snapshot(guarded))
    assert last_of(guard).num_nonfinite == 3


def test_a_sanitized_step_keeps_the_previous_batch_statistics() -> None:
    model = make_model(norm=True)
    guard = Guard(model, sgd(model), config=sanitizing())
    for step, batch in enumerate(poison_batches(make_batches(3), at={1})):
        before = [buffer.clone() for buffer in model.buffers()]
        guard.step(loss_of(model), batch)
        if step == 1:
            assert all(torch.equal(a, b) for a, b in zip(before, model.buffers()))
    assert model[1].num_batches_tracked == 2
    assert guard.health()["overall_healthy"]


def test_the_hand_written_loop_would_have_poisoned_them() -> None:
    model = make_model(norm=True)
    train_by_hand(model, sgd(model), poison_batches(make_batches(2), at={0}), value=0.0)
    assert not model[1].running_mean.isfinite().all()


def test_an_overflow_under_a_scaler_reduces_the_scale_and_is_sanitized() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    guard = Guard(model, sgd(model), config=sanitizing(), scaler=scaler)
    poison_gradient(model[0].weight, at={0}, value=INF)
    guard.step(loss_of(model), make_batches(1)[0])
    assert scaler.get_scale() == 8.0
    assert all(p.isfinite().all() for p in model.parameters())


# --- RAISE ----------------------------------------------------------------------------------------------------------


def raising() -> GuardConfig:
    return GuardConfig(on_nonfinite=Action.RAISE)


FAULTS = [(form, fault) for form in ("fn", "loss") for fault in ("gradient", "loss", "batch")]
FAULTS += [("own backward", fault) for fault in ("gradient", "batch")]  # gradients alone: there is no loss to check


@pytest.mark.parametrize(("form", "fault"), FAULTS)
def test_raise_raises_before_anything_changes(form: str, fault: str) -> None:
    model = make_model(norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    guard = Guard(model, optimizer, config=raising(), scheduler=scheduler)
    batches = make_batches(2)
    guard.step(loss_of(model), batches[0])
    before = copy.deepcopy(snapshot(model, optimizer, scheduler))

    fn = poison_loss(loss_of(model), at={0}) if fault == "loss" else loss_of(model)
    batch = next(poison_batches([batches[1]], at={0})) if fault == "batch" else batches[1]
    if fault == "gradient":
        poison_gradient(model[3].weight, at={0})
    if form == "own backward":
        fn(batch).backward()
    calls = {
        "fn": lambda: guard.step(fn, batch),
        "loss": lambda: guard.step(fn(batch)),
        "own backward": lambda: guard.step(),
    }
    with pytest.raises(NonFiniteError) as caught:
        calls[form]()

    assert_same(before, snapshot(model, optimizer, scheduler))
    error = caught.value
    assert isinstance(error, TrainingHalted)
    assert isinstance(error, RuntimeError)
    assert "step 1" in str(error)
    assert "no weight was touched" in str(error).lower()
    assert error.incidents
    assert error.incidents == tuple(guard.incidents)
    assert {i.step for i in error.incidents} == {1}
    about_step = [i for i in error.incidents if i.finding.kind != "nonfinite_input"]
    assert about_step
    assert all(i.verdict.action is Action.HALT for i in about_step)
    by_gradient = fault == "gradient" or form == "own backward"
    assert error.incidents[0].finding.kind == ("nonfinite_gradient" if by_gradient else "nonfinite_loss")


def test_without_raise_the_same_step_only_skips() -> None:
    model = make_model()
    guard = Guard(model, sgd(model))
    guard.step(loss_of(model), next(poison_batches(make_batches(1), at={0})))
    assert last_of(guard).skipped


def test_a_raised_step_is_in_the_record_and_on_disk(tmp_path: Any) -> None:
    model = make_model()
    seen: list[Any] = []
    config = GuardConfig(on_nonfinite="raise", on_incident=seen.append)  # type: ignore[arg-type]
    guard = Guard(model, sgd(model), config=config, run_dir=tmp_path)
    with pytest.raises(NonFiniteError):
        guard.step(loss_of(model), next(poison_batches(make_batches(1), at={0})))
    assert last_of(guard).skipped
    assert seen == guard.incidents
    assert '"action":"halt"' in (tmp_path / "incidents.jsonl").read_text(encoding="utf-8")
    guard.close()


def test_training_can_continue_after_the_exception_was_caught() -> None:
    plain, guarded = make_model(norm=True), make_model(norm=True)
    batches = make_batches(3)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, guarded)]
    guards = [Guard(plain, optimizers[0]), Guard(guarded, optimizers[1], config=raising())]
    for batch in (batches[0], batches[2]):
        guards[0].step(loss_of(plain), batch)
    raised = 0
    for batch in poison_batches(batches, at={1}):
        try:
            guards[1].step(loss_of(guarded), batch)
        except NonFiniteError:
            raised += 1
    assert raised == 1
    assert_same(snapshot(plain, optimizers[0]), snapshot(guarded, optimizers[1]))


def test_an_overflow_during_the_loss_scale_search_does_not_raise() -> None:
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    guard = Guard(model, sgd(model), config=raising(), scaler=scaler)
    poison_gradient(model[0].weight, at={0}, value=INF)
    guard.step(loss_of(model), make_batches(1)[0])
    assert last_of(guard).skipped
    assert scaler.get_scale() == 8.0


# --- functions for custom loops -------------------------------------------------------------------------------------

LOGGER = "steadygrad"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, NAN], "NaN detected in encoder.weight"),
        ([INF, 1.0], "Inf detected in encoder.weight"),
        ([-INF, 1.0], "Inf detected in encoder.weight"),
        ([INF, NAN], "NaN detected in encoder.weight"),
    ],
)
def test_check_nan_inf_warns_and_names_the_tensor(
    values: list[float], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        assert check_nan_inf(torch.tensor(values), "encoder.weight") is True
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", expected)]


def test_check_nan_inf_describes_an_unnamed_tensor_as_a_tensor(caplog: pytest.LogCaptureFixture) -> None:
    check_nan_inf(torch.tensor([NAN]))
    assert caplog.messages == ["NaN detected in tensor"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.tensor([3.4e38, -3.4e38]),
        torch.zeros(0),
        torch.tensor(1.0),
        torch.arange(3),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.layout}",
)
def test_check_nan_inf_is_silent_on_finite_tensors(tensor: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    assert check_nan_inf(tensor, "t") is False
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_check_nan_inf_works_for_every_floating_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(4, dtype=dtype)
    tensor[3] = INF
    assert check_nan_inf(tensor)
    assert check_nan_inf(torch.diag(tensor).to_sparse())


@pytest.mark.parametrize("value", [0.0, -1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_handle_nan_inf_replaces_each_bad_element_and_no_other(dtype: torch.dtype, value: float) -> None:
    tensor = torch.tensor([[1.0, NAN, -2.0], [INF, 0.5, -INF]], dtype=dtype)
    before = tensor.clone()
    result = handle_nan_inf(tensor, replacement_value=value)
    assert result.dtype == dtype
    assert result.tolist() == [[1.0, value, -2.0], [value, 0.5, value]]
    assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0))  # the input is left as it was


def test_handle_nan_inf_writes_zeros_by_default() -> None:
    assert handle_nan_inf(torch.tensor([NAN, 2.0])).tolist() == [0.0, 2.0]


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.zeros(0), torch.arange(4), torch.tensor([True, False])])
def test_handle_nan_inf_does_not_change_a_finite_tensor(tensor: Tensor) -> None:
    assert torch.equal(handle_nan_inf(tensor, 5.0), tensor)


def test_handle_nan_inf_replaces_a_complex_number_with_one_bad_part() -> None:
    tensor = torch.tensor([complex(1, 2), complex(NAN, 1), complex(0, INF)])
    assert handle_nan_inf(tensor).tolist() == [complex(1, 2), 0j, 0j]


def test_handle_nan_inf_accepts_the_same_tensors_as_check_nan_inf() -> None:
    sparse = torch.tensor([[0.0, NAN], [2.0, 0.0]]).to_sparse()
    result = handle_nan_inf(sparse)
    assert result.layout is torch.sparse_coo
    assert result.to_dense().tolist() == [[0.0, 0.0], [2.0, 0.0]]
    assert check_nan_inf(sparse)  # the input is left as it was


def test_handle_nan_inf_replaces_a_repeated_element_once() -> None:
    twice = torch.sparse_coo_tensor([[1, 1, 2]], [INF, 5.0, 3.0], (4,), check_invariants=True)
    assert handle_nan_inf(twice, 0.5).to_dense().tolist() == [0.0, 0.5, 3.0, 0.0]


def test_handle_nan_inf_passes_the_gradient_of_good_values() -> None:
    tensor = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    (handle_nan_inf(tensor) * torch.tensor([2.0, 2.0, 2.0])).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [2.0, 0.0, 2.0]
