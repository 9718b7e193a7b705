"""ZClip, AutoClip and AdaGC compared with their formulas in plain Python, on traces of norms with spikes and NaNs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from steadygrad.clip import build_clipper
from steadygrad.config import AdaGC, AutoClip, ZClip
from steadygrad.errors import UsageError
from steadygrad.measure import Measurement, Meter

NUM_STEPS = 300
# float64 on both sides; the recurrences are contractions, so rounding errors do not accumulate.
EXACT = {"rel": 1e-12, "abs": 0.0}


@dataclass(frozen=True)
class Step:
    """Norms by parameter name, and what is wrong with the step, if anything."""

    norms: dict[str, float]
    poison: float | None = None
    bad_loss: bool = False

    @property
    def is_bad(self) -> bool:
        return self.poison is not None or self.bad_loss

    @property
    def norm(self) -> float:
        return math.hypot(*self.norms.values())


def make_trace(seed: int, names: tuple[str, ...] = ("w",), *, scale: float = 1.0) -> list[Step]:
    """Log-normal norms, one in 15 a spike, one in 12 bad, one in 25 zero; with several parameters, they come and go."""
    rng = random.Random(seed)
    steps = []
    for i in range(NUM_STEPS):
        present = [n for n in names if n == names[0] or (rng.random() < 0.9 and not (n == names[-1] and i < 60))]
        norms = {}
        for name in present:
            spike = rng.choice([3.0, 30.0, 1e4]) if rng.random() < 1 / 15 else 1.0
            norms[name] = 0.0 if rng.random() < 1 / 25 else scale * rng.lognormvariate(0, 0.3) * spike
        poison = rng.choice([math.nan, math.inf, -math.inf]) if rng.random() < 1 / 20 else None
        steps.append(Step(norms, poison, bad_loss=rng.random() < 1 / 30))
    assert sum(s.is_bad for s in steps) > 10
    return steps


class Player:
    """Plays a trace: float64 gradients with exactly the given norms."""

    def __init__(self, *names: str) -> None:
        self.parameters = {name: torch.zeros(3, dtype=torch.float64, requires_grad=True) for name in names}
        self.meter = Meter(list(self.parameters.items()))

    def play(self, step: Step) -> Measurement:
        for name, parameter in self.parameters.items():
            norm = step.norms.get(name)
            parameter.grad = None if norm is None else torch.tensor([0.6 * norm, 0.0, -0.8 * norm], dtype=torch.float64)
        if step.poison is not None:
            next(p.grad for p in self.parameters.values() if p.grad is not None)[1] = step.poison
        m = self.meter.measure(torch.tensor(math.nan if step.bad_loss else 1.0))
        assert m is not None
        return m


def bound(norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


# --- ZClip ---------------------------------------------------------------------------------------------------------


class PlainZClip:
    """The paper's procedure with a list for the warm-up; it never sees bad steps or steps without a gradient."""

    def __init__(self, s: ZClip) -> None:
        self.s, self.collected, self.mean, self.variance, self.num_spikes = s, list[float](), 0.0, 0.0, 0

    def clip(self, norm: float) -> float:
        target = self.target(norm)
        return min(target / norm, bound(norm, self.s.max_norm))

    def target(self, norm: float) -> float:
        if len(self.collected) < self.s.warmup:
            return norm
        score = (norm - self.mean) / (math.sqrt(self.variance) + self.s.eps)
        if score <= self.s.z:
            return norm
        self.num_spikes += 1
        return self.mean + self.s.z * math.sqrt(self.variance) / (score / self.s.z)

    def admit(self, value: float) -> None:
        if len(self.collected) < self.s.warmup:
            self.collected.append(value)
            self.mean, self.variance = float(np.mean(self.collected)), float(np.var(self.collected))
        else:
            self.mean = self.s.alpha * self.mean + (1 - self.s.alpha) * value
            self.variance = self.s.alpha * self.variance + (1 - self.s.alpha) * (value - self.mean) ** 2


@pytest.mark.parametrize(
    "settings", [ZClip(), ZClip(max_norm=None), ZClip(alpha=0.9, z=1.5, warmup=2, max_norm=5.0, eps=1e-3)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_zclip_follows_the_formula_over_a_trace(settings: ZClip, seed: int) -> None:
    clipper, plain, player = build_clipper(settings), PlainZClip(settings), Player("w")
    for step in make_trace(seed):
        coefficient = clipper.clip(player.play(step)).item()
        if step.norm > 0:
            assert coefficient == pytest.approx(plain.clip(step.norm), **EXACT)
        if step.norm > 0 and not step.is_bad:
            plain.admit(plain.target(step.norm))
        state = clipper.state_dict()
        assert state["mean"].item() == pytest.approx(plain.mean, **EXACT)
        # The variance of the first norms is a difference of nearly equal numbers.
        assert state["variance"].item() == pytest.approx(plain.variance, rel=1e-9, abs=1e-15)
    assert plain.num_spikes > 2


def test_zclip_clips_the_larger_spike_closer_to_the_mean() -> None:
    applied = []
    for spike in (10.0, 100.0, 1e6):
        clipper, player = build_clipper(ZClip(max_norm=None)), Player("w")
        for i in range(40):
            clipper.clip(player.play(Step({"w": 1.0 + 0.1 * (i % 2)})))
        applied.append(clipper.clip(player.play(Step({"w": spike}))).item() * spike)
    assert 1.1 > applied[0] > applied[1] > applied[2] > 1.0


def test_zclip_warms_up_by_healthy_steps_only() -> None:
    clipper, player = build_clipper(ZClip(warmup=4, max_norm=None)), Player("w")
    for _ in range(3):
        clipper.clip(player.play(Step({"w": 1.0})))
        clipper.clip(player.play(Step({"w": 1.0}, poison=math.nan)))
        clipper.clip(player.play(Step({"w": 0.0})))
    assert clipper.state_dict()["count"].item() == 3
    assert clipper.clip(player.play(Step({"w": 50.0}))).item() == 1.0  # the fourth one is still warm-up
    assert clipper.clip(player.play(Step({"w": 1e4}))).item() < 1.0


# --- AutoClip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        AutoClip(),
        AutoClip(percentile=0.0, window=50),
        AutoClip(percentile=37.5, window=16),
        AutoClip(percentile=100.0, window=2),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_autoclip_clips_at_the_percentile_of_numpy_over_a_trace(settings: AutoClip, seed: int) -> None:
    clipper, player, history = build_clipper(settings), Player("w"), list[float]()
    num_clipped = 0
    for step in make_trace(seed):
        coefficient = clipper.clip(player.play(step)).item()
        if step.norm > 0 and not step.is_bad:
            history.append(step.norm)
        threshold = np.percentile(history[-settings.window :], settings.percentile) if history else math.inf
        assert coefficient == pytest.approx(min(1.0, threshold / step.norm) if step.norm else 1.0, **EXACT)
        num_clipped += coefficient < 1
    assert num_clipped > 5


def test_autoclip_forgets_norms_outside_the_window() -> None:
    clipper, player = build_clipper(AutoClip(percentile=0.0, window=4)), Player("w")
    clipper.clip(player.play(Step({"w": 0.5})))
    seen = [clipper.clip(player.play(Step({"w": 1.0}))).item() for _ in range(5)]
    assert seen == pytest.approx([0.5, 0.5, 0.5, 1.0, 1.0])


def test_autoclip_refuses_a_state_of_another_window() -> None:
    saved, player = build_clipper(AutoClip(window=4)), Player("w")
    saved.clip(player.play(Step({"w": 1.0})))
    with pytest.raises(UsageError, match=r"AutoClip has 'norms' of shape \(4,\), expected \(8,\)"):
        build_clipper(AutoClip(window=8)).load_state_dict(saved.state_dict())


# --- AdaGC ---------------------------------------------------------------------------------------------------------


class PlainAdaGC:
    """The paper's procedure, with one dictionary entry per tensor."""

    def __init__(self, s: AdaGC) -> None:
        self.s, self.gamma, self.count = s, dict[str, float](), dict[str, int]()

    def factor(self, name: str, step: Step) -> float:
        if self.count.get(name, 0) < self.s.warmup:
            return bound(step.norm, self.s.max_norm)
        norm = step.norms[name]
        return min(1.0, self.s.relative * self.gamma[name] / norm) if norm else 1.0

    def admit(self, name: str, clipped: float) -> None:
        old = self.gamma.get(name, math.inf)
        if self.count.get(name, 0) < self.s.warmup:
            self.gamma[name] = min(old, clipped)
        else:
            self.gamma[name] = self.s.beta * old + (1 - self.s.beta) * clipped
        self.count[name] = self.count.get(name, 0) + 1


NAMES = ("always", "often", "late")


@pytest.mark.parametrize("settings", [AdaGC(), AdaGC(relative=2.0, beta=0.5, warmup=1, max_norm=3.0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_adagc_follows_the_formula_while_parameters_come_and_go(settings: AdaGC, seed: int) -> None:
    clipper, plain, player = build_clipper(settings), PlainAdaGC(settings), Player(*NAMES)
    for step in make_trace(seed, NAMES, scale=0.2):
        m = player.play(step)
        before = {n: g.clone() for n, g in zip(m.names, m.gradients)}
        factors = {name: plain.factor(name, step) for name in step.norms}

        coefficient = clipper.clip(m).item()

        for name, gradient in zip(m.names, m.gradients):
            torch.testing.assert_close(gradient, before[name] * factors[name], rtol=1e-12, atol=0, equal_nan=True)
        after = math.hypot(*(norm * factors[name] for name, norm in step.norms.items()))
        assert coefficient == pytest.approx(after / step.norm if step.norm else 1.0, **EXACT)
        for name, norm in step.norms.items():
            if norm > 0 and not step.is_bad:
                plain.admit(name, norm * factors[name])
    state = clipper.state_dict()
    assert dict(zip(state["names"], state["count"].tolist())) == plain.count
    assert dict(zip(state["names"], state["gamma"].tolist())) == pytest.approx(plain.gamma, rel=1e-12)
    assert min(plain.count.values()) > 100


def test_adagc_gives_a_late_parameter_its_own_warm_up() -> None:
    clipper, player = build_clipper(AdaGC(warmup=3, max_norm=1.0)), Player("old", "new")
    for _ in range(10):
        clipper.clip(player.play(Step({"old": 0.5})))

    m = player.play(Step({"old": 0.5, "new": 1e4}))
    clipper.clip(m)

    norms = dict(zip(m.names, (g.norm().item() for g in m.gradients)))
    assert norms == pytest.approx({"old": 0.5, "new": 1.0})


def test_adagc_matches_its_state_by_parameter_name_in_another_order() -> None:
    clipper, player = build_clipper(AdaGC(warmup=2)), Player("a", "b")
    for _ in range(5):
        clipper.clip(player.play(Step({"a": 0.1, "b": 0.4})))
    resumed, turned = build_clipper(AdaGC(warmup=2)), Player("c", "b", "a")
    resumed.load_state_dict(clipper.state_dict())

    m = turned.play(Step({"c": 0.1, "b": 50.0, "a": 50.0}))
    resumed.clip(m)

    norms = dict(zip(m.names, (g.norm().item() for g in m.gradients)))
    assert norms["a"] == pytest.approx(1.05 * 0.1)
    assert norms["b"] == pytest.approx(1.05 * 0.4)


def test_adagc_refuses_names_and_tensors_that_do_not_match() -> None:
    clipper, player = build_clipper(AdaGC()), Player("a", "b")
    clipper.clip(player.play(Step({"a": 0.1, "b": 0.4})))
    state = clipper.state_dict()
    with pytest.raises(UsageError, match=r"1 names but tensors of shape \[\(2,\)\]"):
        clipper.load_state_dict({**state, "names": ["a"]})
    with pytest.raises(UsageError, match="2 names but"):
        clipper.load_state_dict({"names": state["names"]})


# --- exact resume in the middle of a trace --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [ZClip(), AutoClip(percentile=50.0, window=64), AdaGC(warmup=40)], ids=lambda s: s.kind
)
@pytest.mark.parametrize("at", [0, 17, 150])
def test_saving_and_restoring_within_a_trace_changes_no_bit(settings: ZClip | AutoClip | AdaGC, at: int) -> None:
    trace = make_trace(3, NAMES)
    whole, player = build_clipper(settings), Player(*NAMES)
    expected = [whole.clip(player.play(step)) for step in trace]

    first, second = build_clipper(settings), build_clipper(settings)
    found = [first.clip(player.play(step)) for step in trace[:at]]
    second.load_state_dict(first.state_dict())
    found += [second.clip(player.play(step)) for step in trace[at:]]

    assert torch.equal(torch.stack(found), torch.stack(expected))
    ours, theirs = second.state_dict(), whole.state_dict()
    assert ours.pop("names", None) == theirs.pop("names", None)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
