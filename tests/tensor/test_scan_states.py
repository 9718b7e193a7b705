"""ParameterWatch, the RMS of g^2/v, the update norm, missing gradients, edits and modes, on real steps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import DEVICES, assert_same, loss_of, make_batches, make_model, snapshot

from steadygrad.facts import GradientTable, Reading
from steadygrad.measure import Meter, StepContext
from steadygrad.measure.edits import EditWatch
from steadygrad.measure.leading import measure_adam_rms
from steadygrad.measure.modes import ModeWatch
from steadygrad.measure.states import ParameterWatch
from steadygrad.measure.updates import UpdateMeter
from steadygrad.state.trained_parameters import find_trained_parameters
from steadygrad.testing.faults import corrupt_weight

every_device = pytest.mark.parametrize("device", DEVICES)


def reading_of(step: int, norms: dict[str, float], **facts: Any) -> Reading:
    cells = [cell for norm in norms.values() for cell in (norm, norm, 0.0, 0.0, 0.0)]
    given = {"skipped": False, "learning_rates": (0.1,), "clip_coefficient": 1.0} | facts
    return Reading(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        finite_grad_norm=1.0,
        num_nonfinite=0,
        num_nan=0,
        gradients=GradientTable(tuple(norms), (1,) * len(norms), cells),
        **given,
    )


def make_watch(model: nn.Module, **options: Any) -> tuple[ParameterWatch, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    return ParameterWatch(find_trained_parameters(model, optimizer)), optimizer


def unit_norms(model: nn.Module) -> dict[str, float]:
    return {name: 1.0 for name, _ in model.named_parameters()}


# --- ParameterWatch -----------------------------------------------------------------------------------------------


@every_device
def test_the_first_scan_counts_nonfinite_values(device: str) -> None:
    model = make_model(device, norm=True)
    corrupt_weight(model[0].weight, math.nan)
    corrupt_weight(model[0].weight, math.inf, index=5)
    corrupt_weight(model[1].running_var, -math.inf)

    scan = make_watch(model)[0].scan(-1)

    assert scan.step == -1
    assert scan.nonfinite_parameters == {"0.weight": 2}
    assert scan.nonfinite_buffers == {"1.running_var": 1}
    assert scan.unchanged == ()
    assert scan.num_changed == 0


@every_device
def test_moving_parameters_are_counted_and_others_named(device: str) -> None:
    model = make_model(device)
    watch, _ = make_watch(model)
    watch.scan(-1)
    with torch.no_grad():
        model[0].weight.view(-1)[3].mul_(1 + 2**-20)
    watch.note_step(reading_of(0, unit_norms(model)))

    scan = watch.scan(0)

    assert scan.unchanged == ("0.bias", "2.weight", "2.bias")
    assert scan.num_changed == 1


@pytest.mark.parametrize(
    "facts",
    [{"skipped": True}, {"learning_rates": (0.0,)}, {"clip_coefficient": 0.0}],
    ids=["skipped", "no rate", "clipped away"],
)
def test_a_step_that_changes_nothing_expects_no_movement(facts: dict[str, Any]) -> None:
    model = make_model()
    watch, _ = make_watch(model)
    watch.scan(-1)

    watch.note_step(reading_of(0, unit_norms(model), **facts))

    assert watch.scan(0).unchanged == ()


def test_a_zero_gradient_expects_no_movement_and_each_scan_starts_fresh() -> None:
    model = make_model()
    watch, _ = make_watch(model)
    watch.scan(-1)
    watch.note_step(reading_of(0, {"0.weight": 0.0, "0.bias": 1.0}))
    assert watch.scan(0).unchanged == ("0.bias",)

    assert watch.scan(1).unchanged == ()


def test_a_bias_before_batchnorm_is_not_expected_to_move() -> None:
    model = make_model()
    watch, _ = make_watch(model)
    watch.scan(-1)

    watch.note_step(reading_of(0, {"0.weight": 1.0, "0.bias": 1e-7, "2.weight": 1e-3}))

    assert watch.scan(0).unchanged == ("0.weight", "2.weight")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_only_a_plain_step_that_float32_would_round_off_need_not_move_a_weight(kind: type[Any]) -> None:
    """Adam divides by the gradient's own size, so the gradient says nothing about the step."""
    model = make_model()
    watch = ParameterWatch(find_trained_parameters(model, kind(model.parameters(), lr=1e-5)))
    watch.scan(-1)

    watch.note_step(reading_of(0, {"0.weight": 1.0, "2.weight": 1e-4}, learning_rates=(1e-5,)))

    assert watch.scan(0).unchanged == (("0.weight",) if kind is torch.optim.SGD else ("0.weight", "2.weight"))


def test_momentum_adds_up_what_one_step_would_round_off() -> None:
    model = make_model()
    watch, _ = make_watch(model, momentum=0.999)
    watch.scan(-1)

    watch.note_step(reading_of(0, {"0.weight": 1.0, "2.weight": 1e-4}, learning_rates=(1e-5,)))

    assert watch.scan(0).unchanged == ("0.weight", "2.weight")


def test_a_rate_that_moves_nothing_at_all_leaves_out_no_weight() -> None:
    model = make_model()
    watch, _ = make_watch(model)
    watch.scan(-1)

    watch.note_step(reading_of(0, unit_norms(model), learning_rates=(1e-10,)))

    assert watch.scan(0).unchanged == tuple(name for name, _ in model.named_parameters())


def test_each_parameter_has_the_learning_rate_of_its_group() -> None:
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}]
    watch = ParameterWatch(find_trained_parameters(model, torch.optim.SGD(groups, lr=0.1)))
    watch.scan(-1)

    watch.note_step(reading_of(0, unit_norms(model), learning_rates=(0.1, 0.0)))

    assert watch.scan(0).unchanged == ("0.weight", "0.bias")


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_ulp_up_or_down_is_a_change(dtype: torch.dtype, device: str) -> None:
    model = nn.Linear(8, 8, bias=False).to(device, dtype)
    watch, _ = make_watch(model)
    watch.scan(-1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    watch.scan(0)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = model.weight.detach().view(integers[dtype.itemsize])
    bits[0, 0] += 1
    bits[0, 1] -= 1

    assert watch.scan(1).num_changed == 1


def test_updates_lost_to_rounding_in_a_real_training_are_found() -> None:
    model = nn.Linear(6, 3).to(torch.bfloat16)
    watch, optimizer = make_watch(model)
    meter = Meter(list(model.named_parameters()))
    with torch.no_grad():
        model.weight.fill_(256.0)  # an update of 0.1 is rounded away in bfloat16
        model.bias.zero_()
    watch.scan(-1)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    m = meter.measure()
    assert m is not None
    watch.note_step(m.read(m.packed.tolist(), StepContext(step=0, learning_rates=(0.1,)), skipped=False))
    optimizer.step()

    scan = watch.scan(0)

    assert scan.unchanged == ("weight",)
    assert scan.num_changed == 1


@every_device
def test_a_scan_changes_nothing(device: str) -> None:
    model = make_model(device, norm=True)
    watch, optimizer = make_watch(model, momentum=0.9)
    before, state = snapshot(model, optimizer), torch.get_rng_state()

    watch.scan(-1)
    watch.begin().read(0)

    assert_same(before, snapshot(model, optimizer))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_unusual_parameters_do_no_harm() -> None:
    model = nn.Module()
    model.lazy = nn.LazyLinear(3)
    model.complex = nn.Parameter(torch.tensor([complex(math.nan, 1.0)]))
    model.empty = nn.Parameter(torch.empty(0))
    model.strided = nn.Parameter(torch.randn(4, 4).t())
    watch, _ = make_watch(model)

    watch.scan(-1)
    scan = watch.scan(0)

    assert scan.nonfinite_parameters == {"complex": 1}
    assert scan.num_changed == 0


def test_after_a_reset_nothing_is_compared() -> None:
    model = make_model()
    watch, _ = make_watch(model)
    watch.scan(-1)
    watch.note_step(reading_of(0, unit_norms(model)))

    watch.forget()

    assert watch.scan(0).unchanged == ()


# --- leading indicators -------------------------------------------------------------------------------------------

ADAMS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
}


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    loss_of(model)(batch).backward()
    optimizer.step()


@every_device
@pytest.mark.parametrize("make", ADAMS.values(), ids=ADAMS.keys())
def test_the_rms_equals_its_formula(make: Any, device: str) -> None:
    model = make_model(device)
    optimizer = make(model.parameters())
    beta, eps = optimizer.param_groups[0]["betas"][1], optimizer.param_groups[0]["eps"]

    for step, batch in enumerate(make_batches(4, device), start=1):
        step_once(model, optimizer, batch)
        pending = measure_adam_rms([optimizer], list(model.named_parameters()))
        assert pending is not None
        found = pending.read()

        assert set(found) == {name for name, _ in model.named_parameters()}
        for name, p in model.named_parameters():
            v = optimizer.state[p]["exp_avg_sq"].double() / (1 - beta**step)
            expected = (p.grad.double() ** 2 / v.clamp_min(eps**2)).mean().sqrt().item()
            assert found[name] == pytest.approx(expected, rel=1e-4)  # the bias correction is float32


def test_the_first_step_of_adam_has_rms_one_and_a_jump_is_visible() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    batches = make_batches(30)

    for batch in batches:
        step_once(model, optimizer, batch)
    quiet = measure_adam_rms([optimizer], list(model.named_parameters()))
    for p in model.parameters():
        p.grad *= 100
    optimizer.step()
    jump = measure_adam_rms([optimizer], list(model.named_parameters()))

    assert quiet is not None
    assert jump is not None
    assert max(quiet.read().values()) < 2.0
    assert min(jump.read().values()) > 4.0


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.Adamax])
def test_other_optimizers_have_no_rms(make: Any) -> None:
    model = make_model()
    optimizer = make(model.parameters(), lr=0.01)
    step_once(model, optimizer, make_batches(1)[0])

    assert measure_adam_rms([optimizer], list(model.named_parameters())) is None


def test_an_unknown_state_gives_no_rms() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    step_once(model, optimizer, make_batches(1)[0])
    optimizer.state[model[0].weight]["step"] = "seven"

    assert measure_adam_rms([optimizer], list(model.named_parameters())) is None


@every_device
def test_the_rms_changes_nothing(device: str) -> None:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    step_once(model, optimizer, make_batches(1, device)[0])
    before, grads = snapshot(model, optimizer), [p.grad.clone() for p in model.parameters()]

    measure_adam_rms([optimizer], list(model.named_parameters()))

    assert_same(before, snapshot(model, optimizer))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))


@every_device
def test_the_update_norm_is_the_norm_of_the_whole_update(device: str) -> None:
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = UpdateMeter(list(model.named_parameters()))
    before = nn.utils.parameters_to_vector(model.parameters()).detach().double()

    meter.before()
    step_once(model, optimizer, make_batches(1, device)[0])
    numbers = meter.after().tolist()

    after = nn.utils.parameters_to_vector(model.parameters()).detach().double()
    # The meter subtracts in float32, the dtype of the weights.
    assert meter.read_norm(numbers) == pytest.approx((after - before).norm().item(), rel=1e-6)
    assert len(meter.read(numbers)) == 2


# --- missing gradients --------------------------------------------------------------------------------------------


@every_device
def test_a_reading_names_trainable_parameters_without_a_gradient(device: str) -> None:
    model = make_model(device)
    meter = Meter(list(model.named_parameters()))
    model[0].bias.requires_grad_(False)
    model[0](torch.ones(2, 6, device=device)).sum().backward()

    m = meter.measure()
    assert m is not None
    reading = m.read(m.packed.tolist(), StepContext(step=0, learning_rates=(0.1,)), skipped=False)

    assert reading.missing == ("2.weight", "2.bias")
    assert reading.missing_share == pytest.approx(51 / (51 + 96))


def test_no_gradient_is_missing_if_every_parameter_has_one_or_is_frozen() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    meter = Meter(list(model.named_parameters()))
    loss_of(model)(make_batches(1)[0]).backward()

    m = meter.measure()

    assert m is not None
    assert m.plan.find_missing() == ((), 0.0)


# --- edits by the program ------------------------------------------------------------------------------------------


def test_our_own_writes_are_not_reported_as_edits_even_if_interrupted() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    watch = EditWatch([("p", parameter)])
    watch.after_optimizer(0)

    def write_and_fail() -> None:
        with watch.aside(), torch.no_grad():
            parameter.add_(1.0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert not watch.before_optimizer(1)
    with torch.no_grad():
        parameter.add_(1.0)
    assert watch.before_optimizer(2)


def take_steps(optimizer: torch.optim.Optimizer, watch: EditWatch, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        watch.before_optimizer(step)
        optimizer.step()
        watch.after_optimizer(step)


def test_weights_reset_by_an_optimizer_hook_are_an_edit() -> None:
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    watch = EditWatch(list(layer.named_parameters()))
    take_steps(optimizer, watch, range(120))
    assert watch.last is None

    handle = optimizer.register_step_post_hook(lambda *_: layer.reset_parameters())
    take_steps(optimizer, watch, range(120, 121))
    handle.remove()
    take_steps(optimizer, watch, range(121, 240))
    assert watch.last == 121  # the weights before step 121 are already the new ones


def test_periodic_averaging_is_part_of_the_optimizer() -> None:
    layer = nn.Linear(3, 3)
    optimizer, calls = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), itertools.count(1)

    @torch.no_grad()
    def pull_back(*_: Any) -> None:
        if next(calls) % 6 == 0:
            layer.weight.mul_(0.9)

    optimizer.register_step_post_hook(pull_back)
    watch = EditWatch(list(layer.named_parameters()))
    take_steps(optimizer, watch, range(200))
    assert watch.last is None


# --- modes ----------------------------------------------------------------------------------------------------------


def test_a_dropout_added_inside_a_child_is_found() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    watch = ModeWatch(model)
    watch.note_training(0)
    watch.end_step()
    watch.take()

    model[0].append(nn.Dropout(0.5))
    model.eval()
    model[0][1].train()
    x = torch.zeros(2, 2)
    watch.note_evaluation(0, x)
    model(x)  # the announced forward whose end is awaited

    scan = watch.take()[0]
    assert scan.stray == ("0.1",)
    model.train()
    watch.note_training(1)
    watch.end_step()
    (scan,) = watch.take()
    assert scan.dropouts_on == 1
