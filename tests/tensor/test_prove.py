"""The paired test: what it answers, that it leaves no trace, and when it declines to answer."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad import Action, Guard, GuardConfig, Policy, ProveConfig, Severity, SnapshotConfig
from steadygrad.facts import Answer, Finding
from steadygrad.prove.comparison import Comparison
from steadygrad.prove.outside import OutsideWeights

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")
HARM, STEPS = 150, 230


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 1))


def make_mortal() -> nn.Module:
    """Once its first bias is far below zero, no unit is ever active again: a small loss, but permanent."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


class Loop:
    """A regression that learns, with a hook for damage."""

    def __init__(
        self,
        *,
        config: GuardConfig | None = None,
        model: nn.Module | None = None,
        rate: float = 1e-2,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = make_model() if model is None else model
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)
        self.guard = Guard(self.model, self.optimizer, config=config or GuardConfig(clip=None), **options)

    def make_batch(self, step: int, *, targets_moved: bool = False) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        y = x.sum(1, keepdim=True)
        return x, 20 * y.roll(1, 0) if targets_moved else y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)

    def harm(self) -> None:
        """Damages like bad memory: no version counter changes. At this rate recovery would take hundreds of steps."""
        self.model[-1].weight.data *= 100  # type: ignore[union-attr, operator, index]

    def kill_units(self) -> None:
        """Worse than before, yet not as bad as the old weights on new data; and nothing more is learnt."""
        self.model[0].bias.data -= 1000  # type: ignore[union-attr, operator, index]

    def find(self, kind: str) -> list[Finding]:
        return [finding for finding in self.guard.findings if finding.kind == kind]


def train(
    loop: Loop,
    step: Callable[[Loop, int], Any] | None = None,
    *,
    harm: bool = True,
    targets_move_at: int = STEPS,
    turn_at: int = STEPS,
    num_steps: int = STEPS,
) -> Loop:
    for number in range(num_steps):
        if harm and number == HARM:
            loop.harm()
        if step is not None:
            step(loop, number)
        else:
            x, y = loop.make_batch(number, targets_moved=number >= targets_move_at)
            loop.guard.step(loop.loss, x, -y if number >= turn_at else y)
    loop.guard.flush()
    return loop


def test_proven_damage_is_rolled_back_and_the_numbers_are_reported() -> None:
    loop = train(Loop())

    (incident,) = [i for i in loop.guard.incidents if i.outcome.action is Action.ROLLBACK]
    finding = incident.finding
    assert (finding.kind, finding.severity, finding.step) == ("loss_explosion", Severity.ERROR, HARM)
    assert finding.noticed_at is not None
    assert finding.acted_at is not None
    assert HARM < finding.noticed_at < finding.acted_at
    assert finding.evidence["proof"] == Answer.DAMAGED
    assert finding.evidence["loss_now"] > 2 * finding.evidence["loss_then"]  # type: ignore[operator]
    assert len(finding.evidence["losses_now"]) == 8  # type: ignore[arg-type]
    assert "on the last 8 batches the weights of step" in finding.message
    assert incident.outcome.after["step"] <= HARM
    assert loop.guard.last is not None
    assert loop.guard.last.loss is not None
    assert loop.guard.last.loss < 2.0


def test_a_change_of_the_data_is_reported_and_nothing_is_changed() -> None:
    plain = Loop(enabled=False)
    for number in range(STEPS):
        plain.guard.step(plain.loss, *plain.make_batch(number, targets_moved=number >= HARM))

    loop = train(Loop(), harm=False, targets_move_at=HARM)

    (finding,) = loop.find("loss_explosion")
    assert (finding.severity, finding.evidence["proof"]) == (Severity.INFO, Answer.UNHARMED)
    assert "the weights were not harmed" in finding.message
    assert [i for i in loop.guard.incidents if i.outcome.action is not Action.NONE] == []
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, loop.model.state_dict()[name]), name


def test_damage_is_found_even_if_the_data_changed_at_the_same_step() -> None:
    """Earlier weights lose as much on the new data; trained on it like the run, they are soon far ahead."""
    loop = Loop(model=make_mortal(), rate=5e-2)
    loop.harm = loop.kill_units  # type: ignore[method-assign]
    train(loop, turn_at=HARM)

    (incident,) = [i for i in loop.guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert incident.finding.evidence["rate_factor"] == 1
    assert "repeated from the weights of step" in incident.finding.message
    assert incident.outcome.after["step"] <= HARM
    assert incident.outcome.after["num_steps_made_again"] == 40  # and those are not lost


def test_new_data_to_learn_is_not_damage_and_the_second_attempt_leaves_no_trace() -> None:
    plain = Loop(enabled=False)
    for number in range(STEPS):
        x, y = plain.make_batch(number)
        plain.guard.step(plain.loss, x, -y if number >= HARM else y)

    loop = train(Loop(), harm=False, turn_at=HARM)

    (finding,) = loop.find("loss_explosion")
    assert (finding.severity, finding.evidence["proof"]) == (Severity.INFO, Answer.UNHARMED)
    assert finding.evidence["rate_factor"] == 1
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, loop.model.state_dict()[name]), name


def test_after_a_second_attempt_earlier_weights_are_still_a_reference() -> None:
    """The attempt trains in place and restores, which changes every version counter: the program did not do that."""

    def step(loop: Loop, number: int) -> None:
        if number == 2 * HARM:
            loop.harm()
        x, y = loop.make_batch(number)
        loop.guard.step(loop.loss, x, -y if number >= HARM else y)

    loop = train(Loop(), step, harm=False, num_steps=2 * HARM + 60)
    assert [f.evidence["proof"] for f in loop.find("loss_explosion")] == [Answer.UNHARMED, Answer.DAMAGED]


def test_damage_by_a_raised_rate_is_found_once_the_rate_is_back() -> None:
    """While it is raised, the schedule counts as intended, and only weights worse than the initial ones would count."""

    def step(loop: Loop, number: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 1e-1 if HARM <= number < HARM + 30 else 5e-2
        if number == HARM:
            loop.kill_units()
        loop.guard.step(loop.loss, *loop.make_batch(number))

    loop = train(Loop(model=make_mortal(), rate=5e-2), step, harm=False, num_steps=HARM + 100)

    (incident,) = [i for i in loop.guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert incident.finding.acted_at is not None
    assert incident.finding.acted_at > HARM + 30
    assert incident.finding.evidence["reference_step"] > 0


def test_a_steady_run_never_pays_for_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_comparisons(monkeypatch)
    train(Loop(), harm=False)
    assert made == []


def test_another_rollback_ends_the_suspicion_of_the_replaced_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = count_comparisons(monkeypatch)

    def step(loop: Loop, number: int) -> None:
        if number == HARM + 4:  # four of the eight batches for the test are held by now
            loop.model[0].weight.data[0, 0] = torch.nan  # type: ignore[union-attr, operator, index]
        loop.guard.step(loop.loss, *loop.make_batch(number))

    loop = train(Loop(), step)

    (incident,) = [i for i in loop.guard.incidents if i.outcome.action is Action.ROLLBACK]
    assert incident.finding.kind == "nonfinite_parameter"
    assert made == ["compare_batch"], "the restored weights were tested, for what others did"
    assert loop.guard._rollback.snapshots.is_held is False


def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the comparisons made from now on."""
    made: list[str] = []
    for name in ("compare", "compare_batch", "compare_rate", "compare_fresh"):
        method = getattr(Comparison, name)

        def counted(self: Comparison, *args: Any, name: str = name, method: Any = method, **kwargs: Any) -> Any:
            made.append(name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(Comparison, name, counted)
    return made


def take_everything(loop: Loop) -> dict[str, Any]:
    """Return everything that a test must not change."""
    return {
        "model": copy.deepcopy(loop.model.state_dict()),
        "optimizer": copy.deepcopy(loop.optimizer.state_dict()),
        "gradients": [None if p.grad is None else p.grad.clone() for p in loop.model.parameters()],
        "versions": [p._version for p in loop.model.parameters()],
        "modes": [module.training for module in loop.model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),  # type: ignore[index]
    }


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b):
            assert_same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("name", ["compare", "compare_batch", "compare_fresh"])
def test_a_test_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, tests, method = Loop(), [], getattr(Comparison, name)
    if name == "compare_fresh":
        loop = Loop(model=make_mortal(), rate=5e-2)
        loop.harm = loop.kill_units  # type: ignore[method-assign]

    def watched(self: Comparison, *args: Any, **kwargs: Any) -> Any:
        before = take_everything(loop)
        proof = method(self, *args, **kwargs)
        after = take_everything(loop)
        if name == "compare_fresh":  # it trains, which torch's counters always show
            before.pop("versions"), after.pop("versions")
        assert_same(before, after)
        tests.append(proof)
        return proof

    def step(loop: Loop, number: int) -> None:
        def fn(x: Tensor, y: Tensor) -> Tensor:
            noise = random.random() + numpy.random.random() + float(torch.rand(()))
            return F.mse_loss(loop.model(x + 1e-3 * noise), y)

        x, y = loop.make_batch(number)
        loop.guard.step(fn, x, -y if number >= HARM and name == "compare_fresh" else y)

    monkeypatch.setattr(Comparison, name, watched)
    train(loop, step)
    assert any(proof.answer is Answer.DAMAGED for proof in tests)


def test_accumulation_and_autocast_are_tested_too() -> None:
    def step(loop: Loop, number: int) -> None:
        for half in range(2):
            loop.guard.backward(lambda x, y: loop.loss(x, y) / 2, *loop.make_batch(2 * number + half))
        loop.guard.step()

    loop = train(Loop(config=GuardConfig(clip=None, autocast="bf16")), step)  # type: ignore[arg-type]
    assert [f.evidence["proof"] for f in loop.find("loss_explosion")] == [Answer.DAMAGED]


def test_a_compiled_model_is_tested_without_compiling_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    loop = Loop(model=torch.compile(make_model(), backend="eager"))  # type: ignore[arg-type]
    loop.harm = lambda: loop.model._orig_mod[-1].weight.data.mul_(100)  # type: ignore[method-assign, union-attr, index, operator]
    graphs, compare = torch._dynamo.utils.counters["stats"], Comparison.compare

    def watched(self: Comparison, *args: Any, **kwargs: Any) -> Any:
        before = graphs["unique_graphs"]
        proof = compare(self, *args, **kwargs)
        assert graphs["unique_graphs"] == before
        return proof

    monkeypatch.setattr(Comparison, "compare", watched)
    train(loop)
    assert [f.evidence["proof"] for f in loop.find("loss_explosion")] == [Answer.DAMAGED]


# --- without a proof -------------------------------------------------------------------------------------------------


def step_by_loss(loop: Loop, number: int) -> None:
    loop.guard.step(loop.loss(*loop.make_batch(number)))


def step_by_own_backward(loop: Loop, number: int) -> None:
    loop.loss(*loop.make_batch(number)).backward()
    loop.guard.step()
    loop.optimizer.zero_grad()


def test_without_a_loss_there_is_no_action_on_finite_numbers() -> None:
    assert {i.outcome.action for i in train(Loop(), step_by_own_backward).guard.incidents} <= {Action.NONE}


def test_without_the_function_damage_is_reported_with_advice_and_nothing_is_done() -> None:
    loop = train(Loop(), step_by_loss)

    (finding,) = loop.find("loss_explosion")
    assert (finding.severity, finding.evidence["proof"]) == (Severity.WARNING, Answer.UNKNOWN)
    assert "pass the step as a function" in finding.advice
    assert {i.outcome.action for i in loop.guard.incidents} <= {Action.NONE}


def test_a_function_that_draws_its_batches_is_not_run_again_and_loses_none() -> None:
    drawn = iter(range(10 * STEPS))
    loop = train(Loop(), lambda loop, number: loop.guard.step(lambda: loop.loss(*loop.make_batch(next(drawn)))))

    assert next(drawn) == STEPS
    (finding,) = loop.find("loss_explosion")
    assert finding.evidence["proof"] == Answer.UNKNOWN
    assert "as an argument" in finding.advice


def test_a_function_that_keeps_state_is_not_run_again() -> None:
    queue: list[Tensor] = []

    def step(loop: Loop, number: int) -> None:
        def fn(x: Tensor, y: Tensor) -> Tensor:
            queue.append(x.mean())
            return loop.loss(x, y)

        loop.guard.step(fn, *loop.make_batch(number))

    loop = train(Loop(), step)
    assert len(queue) == STEPS
    (finding,) = loop.find("loss_explosion")
    assert (finding.severity, finding.evidence["proof"]) == (Severity.INFO, Answer.UNKNOWN)
    assert "keeps its own state" in finding.message


def test_a_policy_that_draws_its_own_data_proves_nothing() -> None:
    def step(loop: Loop, number: int) -> None:
        def fn(x: Tensor, y: Tensor) -> Tensor:
            scores = loop.model(x)
            action = torch.distributions.Normal(scores, 1.0).sample()
            return F.mse_loss(scores, y) + 0.0 * action.mean()

        loop.guard.step(fn, *loop.make_batch(number))

    loop = train(Loop(), step)
    (finding,) = loop.find("loss_explosion")
    assert finding.evidence["proof"] == Answer.UNKNOWN
    assert "draws its own data" in finding.message


def train_by_group_rewards(*, enabled: bool) -> tuple[Guard, nn.Module]:
    """GRPO: the ratio to its own detached value is 1, so the loss only shows the penalty for having learnt.

    A constant replaces other terms: a loss that starts at 0 would not even be suspected.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    initial = copy.deepcopy(model).requires_grad_(False)
    guard = Guard(model, torch.optim.Adam(model.parameters(), lr=2e-2), config=GuardConfig(clip=None), enabled=enabled)

    def loss(x: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        now, then = (net(x).log_softmax(-1).gather(1, actions) for net in (model, initial))
        penalty = (then - now).exp() - (then - now) - 1
        return 1e-3 + (0.1 * penalty - (now - now.detach()).exp() * advantages).mean()

    for _ in range(120):
        x = torch.randn(8, 4).repeat_interleave(8, 0)
        with torch.no_grad():
            actions = torch.multinomial(model(x).softmax(-1), 1)
        rewards = (actions[:, 0] == x.argmax(1)).float().view(8, 8)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        guard.step(loss, x, actions, advantages.view(-1, 1))
    guard.flush()
    return guard, model


def test_a_loss_whose_gradient_is_not_its_slope_proves_nothing() -> None:
    guard, model = train_by_group_rewards(enabled=True)

    suspected = [finding for finding in guard.findings if finding.kind == "loss_explosion"]
    assert suspected
    assert {finding.severity for finding in suspected} == {Severity.INFO}
    assert "the gradient is not the slope of the loss" in suspected[0].message
    assert guard.stats()["num_rollbacks"] == 0
    plain = train_by_group_rewards(enabled=False)[1].state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[name]), name


class Judged(Loop):
    """The loss has a term from another network, which may be trained elsewhere."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.critic, self._is_trained = nn.Linear(1, 1).requires_grad_(False), is_trained

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        prediction = self.model(x)
        return F.mse_loss(prediction, y) + 0.1 * self.critic(prediction).square().mean()

    def step(self, number: int) -> None:
        self.guard.step(self.loss, *self.make_batch(number))
        if self._is_trained:
            self.critic.weight.data += 1e-4


def test_a_loss_that_depends_on_weights_trained_elsewhere_proves_nothing() -> None:
    (finding,) = train(Judged(is_trained=True), Judged.step).find("loss_explosion")  # type: ignore[arg-type]
    assert finding.evidence["proof"] == Answer.UNKNOWN
    assert "trained elsewhere" in finding.message


def test_a_loss_that_depends_on_a_frozen_network_proves_damage() -> None:
    (finding,) = train(Judged(is_trained=False), Judged.step).find("loss_explosion")  # type: ignore[arg-type]
    assert finding.evidence["proof"] == Answer.DAMAGED


def test_an_overwritten_batch_proves_nothing() -> None:
    x, y = torch.empty(32, 8), torch.empty(32, 1)

    def step(loop: Loop, number: int) -> None:
        new_x, new_y = loop.make_batch(number)
        x.copy_(new_x), y.copy_(new_y)  # a loader that reuses its buffers
        loop.guard.step(loop.loss, x, y)

    (finding,) = train(Loop(), step).find("loss_explosion")
    assert finding.evidence["proof"] == Answer.UNKNOWN
    assert "changed in place" in finding.message


def test_changes_of_the_weights_by_the_program_are_intended() -> None:
    loop = Loop()

    @torch.no_grad()
    def edit() -> None:
        loop.model[-1].weight.mul_(100)  # type: ignore[index, union-attr, operator]

    loop.harm = edit  # type: ignore[method-assign]
    train(loop)
    assert {i.outcome.action for i in loop.guard.incidents} <= {Action.NONE}
    (finding,) = loop.find("loss_explosion")
    assert f"the program changed the weights itself before step {HARM}" in finding.message


def test_a_raised_weight_decay_is_intended() -> None:
    loop = Loop()
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.guard = Guard(loop.model, loop.optimizer, config=GuardConfig(clip=None))

    def step(loop: Loop, number: int) -> None:
        if number == HARM:
            loop.optimizer.param_groups[0]["weight_decay"] = 60.0
        loop.guard.step(loop.loss, *loop.make_batch(number))

    train(loop, step, harm=False)
    assert {i.outcome.action for i in loop.guard.incidents} <= {Action.NONE}


@pytest.mark.parametrize("give_loss", [False, True], ids=["function", "loss"])
def test_a_rate_that_is_negative_from_the_start_is_an_ascent(give_loss: bool) -> None:
    loop = Loop()
    loop.optimizer.param_groups[0]["lr"] = -3e-3
    train(loop, step_by_loss if give_loss else None, harm=False)

    assert [f.severity for f in loop.guard.findings if f.severity is not Severity.INFO] == []
    assert any("the optimizer maximises" in f.message for f in loop.guard.findings)


def test_a_schedule_that_runs_on_below_zero_does_damage() -> None:
    loop = Loop()

    def step(loop: Loop, number: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 1e-2 * (1 - number / 100)
        loop.guard.step(loop.loss, *loop.make_batch(number))

    train(loop, step, harm=False)
    finding = loop.find("loss_explosion")[0]
    assert (finding.severity, finding.evidence["proof"]) == (Severity.ERROR, Answer.DAMAGED)


def test_the_budget_limits_the_tests() -> None:
    config = GuardConfig(clip=None, prove=ProveConfig(first_budget=1, budget_share=1e-6))
    (finding,) = train(Loop(config=config)).find("loss_explosion")
    assert "the budget" in finding.message
    assert finding.evidence["proof"] == Answer.UNKNOWN


def test_without_snapshots_there_is_nothing_to_compare_with() -> None:
    config = GuardConfig(clip=None, snapshots=SnapshotConfig(enabled=False))
    (finding,) = train(Loop(config=config)).find("loss_explosion")
    assert "there are no earlier weights to compare with" in finding.message


def test_with_tests_disabled_nothing_is_acted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_comparisons(monkeypatch)
    loop = train(Loop(config=GuardConfig(clip=None, prove=ProveConfig(enabled=False))))
    assert made == []
    assert loop.find("loss_explosion")
    assert {i.outcome.action for i in loop.guard.incidents} <= {Action.NONE}


def test_an_eager_policy_acts_at_once_without_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_comparisons(monkeypatch)
    loop = train(Loop(config=GuardConfig(clip=None, policy=Policy.eager())))
    assert made == []
    first = next(i for i in loop.guard.incidents if i.outcome.action is not Action.NONE)
    assert (first.finding.kind, first.outcome.action) == ("loss_explosion", Action.SCALE_LR)


def test_a_nondeterministic_op_proves_nothing() -> None:
    import os

    def step(loop: Loop, number: int) -> None:
        def fn(x: Tensor, y: Tensor) -> Tensor:
            return loop.loss(x, y) * (1.0 + os.urandom(1)[0] / 128)

        loop.guard.step(fn, *loop.make_batch(number))

    for finding in train(Loop(), step).find("loss_explosion"):
        assert finding.evidence["proof"] != Answer.DAMAGED or "a different loss each time" in finding.message


def test_a_replay_prints_and_logs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def step(loop: Loop, number: int) -> None:
        def fn(x: Tensor, y: Tensor) -> Tensor:
            print("step")
            return loop.loss(x, y)

        loop.guard.step(fn, *loop.make_batch(number))

    train(Loop(), step)
    assert capsys.readouterr().out.count("step\n") == STEPS


def test_sharded_weights_without_memory_are_not_read() -> None:
    """FSDP frees the memory of such a parameter: reading it would crash the process."""
    gathered = nn.Parameter(torch.ones(1 << 20))
    gathered.untyped_storage().resize_(0)
    assert not OutsideWeights().have_moved([gathered], own=[])
