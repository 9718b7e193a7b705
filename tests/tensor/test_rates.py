"""A factor on the learning rate holds under every schedule, is invisible to it, and is undone bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from steadygrad.act.rates import Rates
from steadygrad.errors import UsageError
from steadygrad.facts import Action

NUM_STEPS, SCALED_AT, UNDONE_AT = 24, 7, 16
Make = Callable[[torch.optim.Optimizer], Any]


def make_sequential(o: torch.optim.Optimizer) -> Any:
    warmup, cosine = schedules.LinearLR(o, 0.1, total_iters=10), schedules.CosineAnnealingLR(o, T_max=9)
    return schedules.SequentialLR(o, [warmup, cosine], milestones=[10])


def make_chained(o: torch.optim.Optimizer) -> Any:
    return schedules.ChainedScheduler([schedules.ConstantLR(o, 0.3, total_iters=9), schedules.ExponentialLR(o, 0.9)])


SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: schedules.StepLR(o, step_size=4, gamma=0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [3, 9, 12], gamma=0.5),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=12),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, total_iters=30),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, T_max=9),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=5),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.5, total_steps=NUM_STEPS + 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, base_lr=0.01, max_lr=0.3, step_size_up=4),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "SequentialLR": make_sequential,
    "ChainedScheduler": make_chained,
}
every_schedule = pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())


def make_optimizer(*, tensor: bool = False) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))
    rates = [torch.tensor(0.1), torch.tensor(0.03)] if tensor else [0.1, 0.03]
    groups: list[dict[str, Any]] = [{"params": [first], "lr": rates[0]}, {"params": [second], "lr": rates[1]}]
    return torch.optim.AdamW(groups, weight_decay=0.02, capturable=False, foreach=False)


class Run:
    """An optimizer under a schedule that records the rates that its step sees."""

    def __init__(self, make: Make, *, tensor: bool = False) -> None:
        self.optimizer = make_optimizer(tensor=tensor)
        self.scheduler = make(self.optimizer)
        self.rates = Rates([self.optimizer])
        self.trace: list[list[float]] = []
        self.shown: list[list[float]] = []
        self.momenta: list[Any] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.trace.append(self.look()))

    def look(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        with self.rates.held():
            self.optimizer.step()
        self.shown.append(self.look())
        self.momenta.append([group["betas"] for group in self.optimizer.param_groups])
        if isinstance(self.scheduler, schedules.ReduceLROnPlateau):
            self.scheduler.step(1.0)
        else:
            self.scheduler.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def scaled(trace: list[list[float]], factor: float) -> list[list[float]]:
    return [[lr * factor for lr in row] for row in trace]


@every_schedule
def test_the_factor_applies_in_the_step_and_the_schedule_never_sees_it(make: Make) -> None:
    plain, run = Run(make), Run(make)
    plain.steps(NUM_STEPS)

    run.steps(SCALED_AT)
    run.rates.scale_lr(0.5)
    run.steps(4)
    run.rates.scale_lr(0.2)
    run.steps(UNDONE_AT - SCALED_AT - 4)
    run.rates.undo()
    run.steps(NUM_STEPS - UNDONE_AT)

    again = SCALED_AT + 4
    assert run.trace[:SCALED_AT] == plain.trace[:SCALED_AT]
    assert run.trace[SCALED_AT:again] == scaled(plain.trace[SCALED_AT:again], 0.5)
    assert run.trace[again:UNDONE_AT] == scaled(plain.trace[again:UNDONE_AT], 0.5 * 0.2)
    assert run.trace[UNDONE_AT:] == plain.trace[UNDONE_AT:]
    assert run.shown == plain.shown == plain.trace
    assert run.momenta == plain.momenta
    assert len({tuple(row) for row in plain.trace}) > 2, "the schedule must move for this to mean anything"


@every_schedule
def test_a_tensor_rate_stays_the_same_tensor(make: Make) -> None:
    plain, run = Run(make, tensor=True), Run(make, tensor=True)
    plain.steps(NUM_STEPS)
    tensors = [group["lr"] for group in run.optimizer.param_groups]

    run.steps(SCALED_AT)
    run.rates.scale_lr(0.5)  # a power of two: exact in float32 too
    run.steps(UNDONE_AT - SCALED_AT)
    run.rates.undo()
    run.steps(NUM_STEPS - UNDONE_AT)

    assert run.trace[SCALED_AT:UNDONE_AT] == scaled(plain.trace[SCALED_AT:UNDONE_AT], 0.5)
    assert run.shown == plain.shown
    assert all(group["lr"] is tensor for group, tensor in zip(run.optimizer.param_groups, tensors))


def test_a_tensor_shared_by_groups_is_scaled_once() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.25), foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    rates = Rates([optimizer])
    rates.scale_lr(0.5)

    with rates.held():
        inside = [float(group["lr"]) for group in optimizer.param_groups]

    assert inside == list(rates.learning_rates()) == [0.125, 0.125]
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.25]


@every_schedule
def test_a_resumed_run_has_the_same_rates(make: Make) -> None:
    run = Run(make)
    run.steps(SCALED_AT)
    run.rates.scale_lr(0.3)
    run.rates.ramp_back(9)
    run.steps(3)
    run.rates.healthy_step()
    saved = copy.deepcopy((run.optimizer.state_dict(), run.scheduler.state_dict(), run.rates.state_dict()))

    resumed = Run(make)
    resumed.optimizer.load_state_dict(saved[0])
    resumed.scheduler.load_state_dict(saved[1])
    resumed.rates.load_state_dict(saved[2])
    for one in (run, resumed):
        one.trace.clear()
        for _ in range(12):
            one.step()
            one.rates.healthy_step()

    assert resumed.trace == run.trace
    assert resumed.rates.factor == run.rates.factor == 1.0


def test_an_older_state_restores_the_users_numbers() -> None:
    """In older versions groups held the scaled rates, and the state the user's."""
    optimizer = make_optimizer()
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    old = {"lr": {"factor": 0.5, "raw": [0.1, 0.03]}, "weight_decay": {"factor": 1.0, "raw": []}, "climb": None}
    rates = Rates([optimizer])

    rates.load_state_dict(old)

    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.03]
    assert rates.learning_rates() == (0.1 * 0.5, 0.03 * 0.5)


def test_an_older_state_of_other_groups_is_refused() -> None:
    old = {"lr": {"factor": 0.5, "raw": [0.1, 0.03]}, "weight_decay": {"factor": 1.0, "raw": []}, "climb": None}
    with pytest.raises(UsageError, match="2 parameter groups"):
        Rates([torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)]).load_state_dict(old)


@pytest.mark.parametrize("decay", [0.999, 0.5])
def test_a_rate_multiplied_by_the_program_belongs_to_it(decay: float) -> None:
    optimizer = make_optimizer()
    rates = Rates([optimizer])
    rates.scale_lr(0.5)
    wanted = 0.1
    for _ in range(200):
        with rates.held():
            assert optimizer.param_groups[0]["lr"] == wanted * 0.5
        optimizer.param_groups[0]["lr"] *= decay
        wanted *= decay
    assert optimizer.param_groups[0]["lr"] == wanted


def test_a_failing_step_keeps_the_users_numbers() -> None:
    optimizer = make_optimizer(tensor=True)
    rates = Rates([optimizer])
    rates.scale_lr(0.1)
    rates.scale_weight_decay(3.0)
    with pytest.raises(RuntimeError, match="broken"), rates.held():
        raise RuntimeError("broken")
    assert [float(group["lr"]) for group in optimizer.param_groups] == [float(torch.tensor(x)) for x in (0.1, 0.03)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.02, 0.02]


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_an_optimizer_that_changes_its_rate_continues_from_the_unscaled_one(tensor: bool) -> None:
    optimizer = make_optimizer(tensor=tensor)
    rates = Rates([optimizer])
    rates.scale_lr(0.5)
    for _ in range(3):
        with rates.held():
            optimizer.param_groups[0]["lr"] *= 0.5
    # float32 for a tensor, and one division per step
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 * 0.5**3, rel=1e-6)


def test_the_ramp_is_linear_and_ends_exactly() -> None:
    plain, run = Run(SCHEDULES["CosineAnnealingLR"]), Run(SCHEDULES["CosineAnnealingLR"])
    plain.steps(12)
    run.rates.ramp_back(5)
    run.rates.scale_lr(0.1)
    factors = []
    for _ in range(12):
        run.step()
        factors.append(run.rates.factor)
        run.rates.healthy_step()
    wanted = [0.1 + 0.9 * (k / 5) for k in range(5)]
    assert factors == wanted + [1.0] * 7
    assert run.trace == [[lr * f for lr in row] for row, f in zip(plain.trace, factors)]
    assert run.trace[5:] == plain.trace[5:]


def test_a_new_factor_restarts_the_ramp() -> None:
    rates = Rates([make_optimizer()])
    rates.ramp_back(4)
    rates.scale_lr(0.5)
    rates.healthy_step()
    rates.healthy_step()
    assert rates.factor == 0.75
    rates.scale_lr(0.5)
    seen = [rates.factor]
    for _ in range(5):
        rates.healthy_step()
        seen.append(rates.factor)
    assert seen == [0.375, 0.53125, 0.6875, 0.84375, 1.0, 1.0]


def test_without_a_ramp_the_factor_stays() -> None:
    rates = Rates([make_optimizer()])
    rates.scale_lr(0.5)
    rates.healthy_step()
    assert rates.factor == 0.5


def test_the_outcome_lists_groups_that_differ() -> None:
    rates = Rates([make_optimizer()])
    outcome = rates.scale_lr(0.5)
    assert outcome.action is Action.SCALE_LR
    assert outcome.before == {"lr.0": 0.1, "lr.1": 0.03}
    assert outcome.after == {"lr.0": 0.1 * 0.5, "lr.1": 0.03 * 0.5}
    decay = rates.scale_weight_decay(1.5)
    assert decay.action is Action.SCALE_WEIGHT_DECAY
    assert (decay.before, decay.after) == ({"weight_decay": 0.02}, {"weight_decay": 0.02 * 1.5})


def test_zero_weight_decay_is_reported_as_unchanged() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    outcome = Rates([optimizer]).scale_weight_decay(1.5)
    assert "nothing was changed" in outcome.message
    assert outcome.before == outcome.after == {"weight_decay": 0}


def test_scaled_weight_decay_survives_assignments_and_is_undone() -> None:
    optimizer = make_optimizer()
    rates = Rates([optimizer])
    rates.scale_weight_decay(1.5)
    optimizer.param_groups[0]["weight_decay"] = 0.04
    with rates.held():
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.04 * 1.5, 0.02 * 1.5]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.04, 0.02]
    rates.undo()
    with rates.held():
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.04, 0.02]


def test_a_group_added_later_gets_the_factor() -> None:
    optimizer = make_optimizer()
    rates = Rates([optimizer])
    rates.scale_lr(0.5)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.7})
    with rates.held():
        assert optimizer.param_groups[2]["lr"] == 0.7 * 0.5
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.03, 0.7]


def test_a_group_without_a_rate_is_ignored() -> None:
    optimizer = make_optimizer()
    optimizer.param_groups[1]["lr"] = None
    del optimizer.param_groups[1]["weight_decay"]
    rates = Rates([optimizer])
    rates.scale_lr(0.5)
    rates.scale_weight_decay(2.0)
    with rates.held():
        assert [g["lr"] for g in optimizer.param_groups] == [0.05, None]
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, None]
    assert math.isnan(rates.learning_rates()[1])


def test_unscaled_rates_are_not_written() -> None:
    optimizer = make_optimizer()
    before = [group["lr"] for group in optimizer.param_groups]
    rates = Rates([optimizer])
    with rates.held():
        assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, before))
    rates.healthy_step()
    assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, before))


def test_several_optimizers_share_the_factor() -> None:
    first, second = make_optimizer(), make_optimizer()
    rates = Rates([first, second])
    rates.scale_lr(0.5)
    with rates.held():
        assert [o.param_groups[0]["lr"] for o in (first, second)] == [0.05, 0.05]


@pytest.mark.parametrize("factor", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_factor_is_refused(factor: float) -> None:
    with pytest.raises(UsageError, match="finite number above 0"):
        Rates([make_optimizer()]).scale_lr(factor)
