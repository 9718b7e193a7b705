"""Every optimizer of `pytorch-optimizer` is guarded, skipped, resumed and rolled back bit for bit.

They keep state in groups, in `state` under any key, in deques, in wrapped optimizers and behind a custom `state_dict`.
`LEFT_OUT` and `NOT_RESUMED` give the reason for each exception.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from steadygrad import Guard, GuardConfig, Policy
from steadygrad.config import DiagnoseConfig, SnapshotConfig
from steadygrad.facts import Action, Verdict

library = pytest.importorskip("pytorch_optimizer")
Make = Callable[[nn.Module], torch.optim.Optimizer]
pytestmark = pytest.mark.filterwarnings("ignore")

LEFT_OUT = {
    "lbfgs": "calls its closure several times a step; Guard refuses it",
    "alig": "needs a closure that returns the loss",
    "bsam": "needs a closure for its second forward",
    "adahessian": "needs backward(create_graph=True), which the function form does not run",
    "sophiah": "needs backward(create_graph=True), which the function form does not run",
    "lomo": "steps inside backward, before anybody could measure a gradient",
    "adalomo": "steps inside backward, before anybody could measure a gradient",
    "demo": "needs einops, and several ranks to make sense",
    "distributedmuon": "needs several ranks",
    "spectralsphere": "takes matrices only",
}
NOT_RESUMED = {
    "conda": "keeps a GaLoreProjector in its state, which has no plain form",
    "scalableshampoo": "keeps a PreConditioner in its state, which has no plain form",
}
QUIET = GuardConfig(
    clip=None,
    policy=Policy.observe(),
    snapshots=SnapshotConfig(enabled=False),
    diagnose=DiagnoseConfig(enabled=False),
)
RING = GuardConfig(
    clip=None,
    policy=Policy.observe(),
    snapshots=SnapshotConfig(every=4, good_after=1),
    diagnose=DiagnoseConfig(enabled=False),
)
CUT, NUM_STEPS = 4, 10
GENERATOR = torch.Generator().manual_seed(1)
BATCHES = torch.randn(NUM_STEPS, 8, 4, generator=GENERATOR)


def by_name(name: str) -> Make:
    return lambda model: library.load_optimizer(name)(model.parameters(), lr=1e-2)


def make_muon(name: str) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        optimizer: torch.optim.Optimizer = library.load_optimizer(name)(groups, lr=1e-2)
        return optimizer

    return make


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


SPECIAL: dict[str, Make] = {
    **{name: make_muon(name) for name in ("muon", "adamuon", "adago", "muonclip", "normuon")},
    "adammini": lambda model: library.AdamMini(model, lr=1e-2),
    "ranger21": lambda model: library.Ranger21(model.parameters(), num_iterations=100, lr=1e-2),
    "lookahead": lambda model: library.Lookahead(adam(model), k=3),
    "lookahead of sgd": lambda model: library.Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), k=3),
    "trac": lambda model: library.TRAC(adam(model)),
    "orthograd": lambda model: library.OrthoGrad(adam(model)),
    "schedulefree wrapper": lambda model: library.ScheduleFreeWrapper(adam(model)),
    "madgrad with momentum 0": lambda model: library.MADGRAD(model.parameters(), lr=1e-2, momentum=0.0),
}
OPTIMIZERS: dict[str, Make] = {
    name: SPECIAL.get(name, by_name(name)) for name in library.get_supported_optimizers() if name not in LEFT_OUT
} | SPECIAL
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def seed() -> None:
    """Some draw random numbers in their step, from torch, numpy or Python."""
    torch.manual_seed(7)
    numpy.random.seed(7)
    random.seed(7)


class Training:
    """A small model under one optimizer."""

    def __init__(self, name: str, config: GuardConfig | None = None, run_dir: Path | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.optimizer = OPTIMIZERS[name](self.model)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()  # schedule-free ones need a call
        self.guard = None if config is None else Guard(self.model, self.optimizer, config=config, run_dir=run_dir)
        seed()

    def loss(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return factor * (self.model(x) - x[:, :2]).square().mean()

    def train(self, batches: Iterable[Tensor], *, bad: Iterable[int] = ()) -> None:
        bad = set(bad)
        for number, x in enumerate(batches):
            if self.guard is None:
                self.loss(x).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                continue
            if number in bad:
                self.guard.step(self.loss, x, float("nan"))
            self.guard.step(self.loss, x)

    def look(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@functools.cache
def train_plainly(name: str) -> Tensor:
    plain = Training(name)
    plain.train(BATCHES[:CUT])
    seed()
    plain.train(BATCHES[CUT:])
    return plain.look()


@every_optimizer
def test_healthy_and_skipped_steps_equal_those_of_the_plain_loop(name: str) -> None:
    wanted = train_plainly(name)
    for bad in ((), (0, 2)):
        guarded = Training(name, QUIET)
        guarded.train(BATCHES[:CUT], bad=bad)
        seed()
        guarded.train(BATCHES[CUT:], bad=bad)
        assert torch.equal(guarded.look(), wanted)


@every_optimizer
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    first = Training(name, QUIET, tmp_path)
    first.train(BATCHES[:CUT])
    assert first.guard is not None
    saved = first.guard.save()
    assert saved is not None, [finding.message for finding in first.guard.findings]
    saved.wait()
    first.guard.close()

    second = Training(name, QUIET, tmp_path)
    assert second.guard is not None
    assert second.guard.resume() == CUT
    seed()
    second.train(BATCHES[CUT:])

    (resumed,) = [finding.message for finding in second.guard.findings if finding.kind == "resumed"]
    if name in NOT_RESUMED:
        assert "cannot be saved and starts over" in resumed
    else:
        assert "starts over" not in resumed
        assert torch.equal(second.look(), train_plainly(name))


@every_optimizer
def test_a_rollback_restores_all_state_of_the_optimizer(name: str) -> None:
    rolled = Training(name, RING)
    assert rolled.guard is not None
    rolled.train(BATCHES[:CUT])
    rolled.guard._rollback.snapshots.take(CUT)
    rolled.train(BATCHES[[7, 2, 9]])  # the steps to undo
    rolled.guard.flush()
    rates = [group.get("lr") for group in rolled.optimizer.param_groups]

    actor = rolled.guard._requests.actor
    outcome = actor.carry_out(Verdict(action=Action.ROLLBACK, reason="for the test"), None, step=CUT + 2)
    assert (outcome.action, outcome.after["step"]) == (Action.ROLLBACK, CUT)
    assert "left as it is" not in outcome.message
    rolled.guard._rollback.follow()
    rolled.guard._rollback.window.num_left = 0
    seed()
    rolled.train(BATCHES[CUT:])

    assert torch.equal(rolled.look(), train_plainly(name))
    if name != "asgd":  # it sets its own rate
        assert [group.get("lr") for group in rolled.optimizer.param_groups] == rates
