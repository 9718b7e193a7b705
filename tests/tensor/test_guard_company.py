"""A Guard with others: another guard, an exception, unusual buffers and optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from steadygrad import Guard, GuardConfig, Severity
from steadygrad.config import CheckpointConfig

UNCLIPPED = GuardConfig(clip=None)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


# --- two guards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["function", "loss"])
def test_two_networks_with_coupled_losses_train_as_in_a_plain_loop(form: str) -> None:
    """The generator's loss fills the discriminator's gradients too; its own next step must not find them."""

    def train(*, guarded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (judge, maker)]
        guards = [Guard(net, o, config=UNCLIPPED) for net, o in zip((judge, maker), optimizers)] if guarded else []

        def step(which: int, loss: Callable[[], Tensor]) -> None:
            if guarded:
                guards[which].step(loss if form == "function" else loss())
            else:
                optimizers[which].zero_grad()
                loss().backward()
                optimizers[which].step()

        def judge_both(real: Tensor, seed: Tensor) -> Tensor:
            return F.softplus(-judge(real)).mean() + F.softplus(judge(maker(seed).detach())).mean()

        def judge_made(seed: Tensor) -> Tensor:
            return F.softplus(-judge(maker(seed))).mean()

        for _ in range(20):
            real, seed, other = torch.randn(8, 4) + 1, torch.randn(8, 2), torch.randn(8, 2)
            step(0, partial(judge_both, real, seed))
            step(1, partial(judge_made, other))
        assert not any(guard.findings for guard in guards)
        return [p.detach() for p in (*judge.parameters(), *maker.parameters())]

    for ours, plain in zip(train(guarded=True), train(guarded=False)):
        assert torch.equal(ours, plain)


# --- exceptions -----------------------------------------------------------------------------------------------------


class Break(torch.autograd.Function):
    """Raises in backward, when half of the gradients exist."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Break.now:
            raise torch.OutOfMemoryError("out of memory")
        return grad


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("form", ["function", "loss", "microbatches"])
def test_an_interrupted_backward_leaves_nothing_for_the_next_step(form: str, drops: bool) -> None:
    def train(*, guarded: bool) -> list[Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = GuardConfig(clip=None, drop_bad_microbatches=drops)
        guard = Guard(model, optimizer, config=config) if guarded else None

        def compute(x: Tensor) -> Tensor:
            return model[1](Break.apply(model[0](x))).square().mean()

        for i, x in enumerate(torch.randn(4, 8, 4)):
            Break.now = i == 1
            try:
                if guard is None:
                    optimizer.zero_grad()
                    compute(x).backward()
                    optimizer.step()
                elif form == "microbatches":
                    guard.backward(compute, x)
                    guard.step()
                else:
                    guard.step(*((compute, x) if form == "function" else (compute(x),)))
            except torch.OutOfMemoryError:
                assert guard is None or all(p.grad is None for p in model.parameters())
        if guard is not None:
            guard.flush()
            assert guard.last is not None
            assert guard.last.num_microbatches == 1
            assert guard.num_steps == 3
        return [p.detach() for p in model.parameters()]

    for ours, plain in zip(train(guarded=True), train(guarded=False)):
        assert torch.equal(ours, plain)


# --- buffers --------------------------------------------------------------------------------------------------------


class Prior(nn.Module):
    """log(share of each class so far): -inf for a class not seen yet."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("log_prior", torch.zeros(3))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.counts += F.one_hot(labels, 3).sum(0)
        self.log_prior.copy_((self.counts / self.counts.sum()).log())
        return F.cross_entropy(self.linear(x) + self.log_prior.clamp(min=-10), labels)


def test_a_buffer_that_may_be_infinite_causes_no_skip() -> None:
    model = Prior()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(10):
        guard.step(model, torch.randn(8, 4), torch.randint(0, 2, (8,)))
    guard.flush()
    assert model.log_prior[2] == -math.inf
    assert model.counts.sum() == 80
    assert guard.findings == []


def test_infinite_statistics_of_a_norm_still_skip_the_step() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def compute(x: Tensor) -> Tensor:
        return torch.nan_to_num(model(x)).square().mean() * 0 + model[1].weight.sum()

    guard.step(compute, torch.randn(8, 4))
    bad = torch.randn(8, 4)
    bad[0, 0] = math.inf
    guard.step(compute, bad)
    guard.flush()
    assert model[0].running_mean.isfinite().all()
    assert guard.findings


def test_a_lazy_norm_is_accepted() -> None:
    model = make_model()
    trained = [*model.parameters()]
    model.lazy = nn.LazyBatchNorm1d()  # never called, so that it has no shape
    guard = Guard(model, torch.optim.SGD(trained, lr=0.1))
    guard.step(lambda x: model[1](model[0](x)).square().mean(), torch.randn(8, 4))
    guard.flush()
    assert guard.num_steps == 1


# --- parameters and optimizers --------------------------------------------------------------------------------------


def test_a_parameter_replaced_within_its_group_is_watched() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
    fresh = nn.Parameter(torch.randn(4, 4))
    model[1].weight = fresh
    optimizer.param_groups[0]["params"][2] = fresh
    fresh.register_hook(lambda grad: torch.full_like(grad, math.nan))
    guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
    guard.flush()
    assert fresh.isfinite().all()
    assert [finding.kind for finding in guard.findings] == ["nonfinite_gradient"]


class OwnRate(torch.optim.Optimizer):
    """Computes its own rate, like Adafactor."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize("defaults", [{"lr": None}, {}])
def test_an_optimizer_without_a_rate_can_be_guarded(defaults: dict[str, Any]) -> None:
    model = make_model()
    guard = Guard(model, OwnRate(model.parameters(), **defaults))
    for value in (1.0, math.nan, 1.0):
        guard.step(lambda x: model(x).square().mean(), torch.full((8, 4), value))
    guard.flush()
    assert all(p.isfinite().all() for p in model.parameters())
    assert [finding.kind for finding in guard.findings][:1] == ["nonfinite_loss"]
    assert guard.summary()


def test_if_the_program_unscaled_one_of_two_optimizers_both_are_unscaled() -> None:
    def train(*, guarded: bool) -> list[Tensor]:
        model = make_model()
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        guard = Guard(model, [first, second], scaler=scaler, config=UNCLIPPED) if guarded else None
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        scaler.unscale_(first)
        nn.utils.clip_grad_norm_(model[0].parameters(), 0.5)
        if guard is None:
            scaler.step(first)
            scaler.step(second)
            scaler.update()
        else:
            guard.step()
        return [p.detach() for p in model.parameters()]

    for ours, plain in zip(train(guarded=True), train(guarded=False)):
        torch.testing.assert_close(ours, plain)


# --- saving and data ------------------------------------------------------------------------------------------------


def test_a_loop_that_clears_gradients_after_the_step_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The save happens inside the step, before the loop clears: used gradients are not state."""
    data = torch.randn(12, 8, 4)

    def train(steps: range, *, resume: bool, run_dir: Path) -> list[Tensor]:
        model = make_model()
        config = GuardConfig(checkpoint=CheckpointConfig(every=6))
        with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, run_dir=run_dir) as guard:
            assert not resume or guard.resume() == 6
            for i in steps:
                model(data[i]).square().mean().backward()
                guard.step()
                model.zero_grad()
        return [p.detach() for p in model.parameters()]

    whole = train(range(12), resume=False, run_dir=tmp_path / "whole")
    train(range(6), resume=False, run_dir=tmp_path / "parts")
    for resumed, expected in zip(train(range(6, 12), resume=True, run_dir=tmp_path / "parts"), whole):
        assert torch.equal(resumed, expected)


def test_weights_with_another_name_in_the_state_dict_are_restored(tmp_path: Path) -> None:
    """torch's wrapper for activation checkpointing removes its own name from the state_dict, and only there."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def make(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return nn.Sequential(checkpoint_wrapper(inner), nn.Linear(4, 1))

    def train(model: nn.Module, *, resume: bool) -> int | None:
        with Guard(model, torch.optim.AdamW(model.parameters()), run_dir=tmp_path / "run") as guard:
            if resume:
                return guard.resume()
            for x in torch.randn(3, 8, 4):
                guard.step(lambda x: model(x).square().mean(), x)
            guard.save()
            return None

    trained, fresh = make(0), make(1)
    train(trained, resume=False)
    assert train(fresh, resume=True) == 3
    for a, b in zip(fresh.state_dict().values(), trained.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_an_unsaveable_extra_is_reported_and_does_not_stop_the_training(tmp_path: Path) -> None:
    class Locked:
        def state_dict(self) -> dict[str, Any]:
            return {"lines": (line for line in "abc")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    model = make_model()
    guard = Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        run_dir=tmp_path / "run",
        config=GuardConfig(checkpoint=CheckpointConfig(every=2)),
        extras={"locked": Locked()},
    )
    for x in torch.randn(5, 8, 4):
        guard.step(lambda x: model(x).square().mean(), x)
    guard.close()
    assert guard.num_steps == 5
    assert any("generator" in finding.message for finding in guard.findings)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(6, 4))


def test_data_without_a_length_can_be_iterated() -> None:
    model = make_model()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in guard.batches(DataLoader(Stream(), 2)):
        guard.step(lambda x: model(x).square().mean(), batch)
    guard.flush()
    assert guard.num_steps == 3


def test_a_parameter_group_may_contain_a_tensor_of_several_numbers() -> None:
    model = make_model()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "table": torch.ones(3)}], lr=0.1)
    guard = Guard(model, optimizer)
    guard.step(lambda x: model(x).square().mean(), torch.randn(8, 4))
    guard.flush()
    assert guard.num_steps == 1


def test_a_changed_rate_also_changes_the_peak_of_the_schedule(tmp_path: Path) -> None:
    def train(lr: float, peak: float, steps: int, run_dir: Path, *, resume: bool) -> list[float]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, lr, peak, step_size_up=4)
        rates = []
        with Guard(model, optimizer, scheduler=schedule, run_dir=run_dir) as guard:
            assert not resume or guard.resume() == 3
            for x in torch.randn(steps, 8, 4):
                rates.append(optimizer.param_groups[0]["lr"])
                guard.step(lambda x: model(x).square().mean(), x)
            guard.save()
        return rates

    train(0.01, 0.1, 3, tmp_path / "run", resume=False)
    whole = train(0.01, 0.1, 12, tmp_path / "whole", resume=False)
    lower = train(0.0025, 0.1, 9, tmp_path / "run", resume=True)
    assert [rate / 0.25 for rate in lower] == pytest.approx(whole[3:])


def test_numpy_numbers_as_keys_are_saved_so_that_they_can_be_loaded(tmp_path: Path) -> None:
    class Counted:
        def __init__(self) -> None:
            self.state: dict[Any, int] = {np.float64(0.5): 1, np.str_("a"): 2, (np.int64(1), 2): 3}

        def state_dict(self) -> dict[Any, int]:
            return self.state

        def load_state_dict(self, state: dict[Any, int]) -> None:
            self.state = dict(state)

    model, counted = make_model(), Counted()
    for resume in (False, True):
        with Guard(model, sgd(model), run_dir=tmp_path / "run", extras={"counted": counted}) as guard:
            if resume:
                counted.state = {}
                assert guard.resume() == 0
            else:
                guard.save()
    assert counted.state == {0.5: 1, "a": 2, (1, 2): 3}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- one scaler for several guards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["function", "loss", "backward", "microbatches"])
@pytest.mark.parametrize("order", ["together", "one after the other"])
def test_guards_that_share_a_scaler_each_divide_by_their_own_scale(form: str, order: str) -> None:
    def train(*, guarded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        nets = [nn.Linear(4, 1), nn.Linear(4, 1)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
        # Powers of two: dividing by any of them is exact, so the weights must be equal to the bit.
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        guards = [Guard(n, o, scaler=scaler, config=UNCLIPPED) for n, o in zip(nets, optimizers)] if guarded else []

        def go_back(which: int, x: Tensor) -> None:
            def fn(x: Tensor) -> Tensor:
                return nets[which](x).square().mean()

            if not guarded:
                fn(x).backward()
            elif form == "backward":
                scaler.scale(fn(x)).backward()
            else:
                guards[which].backward(fn(x)) if form == "loss" else guards[which].backward(fn, x)

        def step(which: int) -> None:
            guards[which].step() if guarded else optimizers[which].step()
            optimizers[which].zero_grad()

        for _ in range(6):
            x = torch.randn(3, 8, 4)
            rounds = [[0, 1]] if order == "together" else [[0], [1]]
            for chosen in rounds:
                for k in range(2 if form == "microbatches" else 1):
                    for which in chosen:
                        go_back(which, x[k])
                for which in chosen:
                    step(which)
        return [p.detach() for net in nets for p in net.parameters()]

    for ours, plain in zip(train(guarded=True), train(guarded=False)):
        assert torch.equal(ours, plain)


# --- gradients of another loss --------------------------------------------------------------------------------------


def test_a_backward_of_another_loss_by_the_program_is_part_of_the_step() -> None:
    def train(*, guarded: bool) -> tuple[Tensor, list[str]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, config=UNCLIPPED) if guarded else None
        for _ in range(10):
            x = torch.randn(8, 4)
            (model(x)[:, 1] - 1).square().mean().backward()
            loss = (model(x)[:, 0] - 1).square().mean()
            if guard is not None:
                guard.step(loss)
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach(), [] if guard is None else [f.kind for f in guard.findings]

    (ours, kinds), (plain, _) = train(guarded=True), train(guarded=False)
    assert torch.equal(ours, plain)
    assert kinds == ["added_gradients"]


def test_dropping_the_gradients_of_another_loss_is_reported_once() -> None:
    model = nn.Linear(4, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config=UNCLIPPED)
    for _ in range(5):
        x = torch.randn(8, 4)
        model(x)[:, 1].square().mean().backward()
        guard.step(lambda x: model(x)[:, 0].square().mean(), x)
    assert [(f.kind, f.severity) for f in guard.findings] == [("dropped_gradients", Severity.WARNING)]


@pytest.mark.parametrize("form", ["function", "loss"])
def test_an_unguarded_generator_leaves_nothing_in_its_discriminators_guard(form: str) -> None:
    def train(*, guarded: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        maker, judge = nn.Linear(2, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (judge, maker)]
        guard = Guard(judge, optimizers[0], config=UNCLIPPED) if guarded else None
        for _ in range(10):
            x, seed = torch.randn(8, 4) + 1, torch.randn(8, 2)
            optimizers[1].zero_grad()
            F.softplus(-judge(maker(seed))).mean().backward()
            optimizers[1].step()

            def loss(x: Tensor, seed: Tensor) -> Tensor:
                return F.softplus(-judge(x)).mean() + F.softplus(judge(maker(seed).detach())).mean()

            if guard is not None:
                guard.step(loss, x, seed) if form == "function" else guard.step(loss(x, seed))
            else:
                optimizers[0].zero_grad()
                loss(x, seed).backward()
                optimizers[0].step()
        found = 0 if guard is None else len(guard.findings)
        return [p.detach() for p in (*judge.parameters(), *maker.parameters())], found

    (ours, found), (plain, _) = train(guarded=True), train(guarded=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain))
    assert found == 0


def test_a_call_from_another_guards_step_is_not_part_of_the_replay() -> None:
    """A generator's step runs its discriminator: the discriminator's guard sees a call of its model between steps."""
    generator, judge = nn.Linear(4, 2), nn.Linear(2, 1)
    making = Guard(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    judging = Guard(judge, torch.optim.SGD(judge.parameters(), lr=0.1))

    def name_apart(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return judge(generator(noise).detach()).mean() - judge(real).mean()

    for step in range(3):
        real = torch.full((8, 2), torch.nan) if step == 2 else torch.randn(8, 2)
        judging.step(name_apart, real, torch.randn(8, 4))
        making.step(lambda noise: -judge(generator(noise)).mean(), torch.randn(8, 4))

    (incident,) = judging.incidents
    assert incident.cause is not None
    assert incident.cause.phase == "input"
    assert "microbatch" not in (incident.cause.note or "")


@pytest.mark.parametrize("form", ["function", "loss"])
def test_gradients_from_the_step_of_another_guard_are_not_part_of_a_step(form: str) -> None:
    def train(*, guarded: bool) -> tuple[Tensor, list[str]]:
        torch.manual_seed(0)
        layers, mixture = nn.Linear(4, 3), nn.Linear(3, 1)  # searched in turn, on one graph of data
        nets = (mixture, layers)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        guards = [Guard(net, opt, config=UNCLIPPED) for net, opt in zip(nets, optimizers)] if guarded else []

        def loss(x: Tensor) -> Tensor:
            return (layers(x) @ mixture.weight.T - x.sum(1, keepdim=True)).square().mean()

        for _ in range(10):
            for number, optimizer in enumerate(optimizers):
                x = torch.randn(8, 4)
                if guarded and form == "function":
                    guards[number].step(loss, x)
                elif guarded:
                    guards[number].step(loss(x))
                else:
                    optimizer.zero_grad()
                    loss(x).backward()
                    optimizer.step()
        weights = torch.cat([p.detach().flatten() for net in nets for p in net.parameters()])
        return weights, [finding.kind for guard in guards for finding in guard.findings]

    (ours, kinds), (plain, _) = train(guarded=True), train(guarded=False)
    assert torch.equal(ours, plain)
    assert not {"added_gradients", "dropped_gradients"} & set(kinds)
