"""Quick passes of rules: a rule learns from them what `observe` would have taught it, and misses nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from rule_traces import HEALTHY, NAMES, NUMELS, TROUBLE, poisoned, reading

from steadygrad.config import DetectConfig, HabitThresholds, LossThresholds
from steadygrad.detect import Detector, Rule, standard_rules
from steadygrad.detect.forecast import TAIL_BLOCK
from steadygrad.detect.gradient_norm import HighGradientNorm
from steadygrad.detect.loss import LossSpike, Restarts
from steadygrad.facts import Fact, Finding, Flush, GradientTable, InputScan, InputStats, Reading, Validation
from steadygrad.stats import find_least_deviation, median, median_deviation

CONFIGS = {
    "defaults": DetectConfig(),
    "short": DetectConfig(
        window=8,
        min_values=2,
        repeat_after=3,
        exploding_score=1.0,
        loss=LossThresholds(level_window=3, spread_window=16, block=4, restart_ratio=0.5, explosion_ratio=1.5),
        habits=HabitThresholds(window=8, clipped_share=0.4),
    ),
}


def make_wild_run(seed: int, *, num_rows: int = len(NAMES)) -> Iterator[Fact]:
    """Noise whose level, spread and rate jump, with zeros, clips, skips, stale and missing gradients in between."""
    r = random.Random(seed)
    level, spread, norm, rate = 2.0, 0.1, 0.5, 1e-3
    for step in range(r.choice([120, 400])):
        if r.random() < 0.02:
            level, spread = r.choice([-1.0, 0.01, 1.0, 1.0, 30.0]) * r.random(), r.choice([0.0, 0.01, 0.1, 1.0])
            norm, rate = 10 ** r.uniform(-8, 3), r.choice([1e-3, 1e-3, 2e-3, 1e-10, 0.0])
        loss = r.choice([0.0, 1e3 * level]) if r.random() < 0.02 else r.gauss(level, spread)
        size = 0.0 if r.random() < 0.01 else norm * math.exp(r.gauss(0, 0.3 * spread)) * r.choice([1] * 50 + [1e4])
        norms = [size * r.random() for _ in range(num_rows)]
        zeros = [float(r.choice([0, numel])) if r.random() < 0.01 else 0.0 for numel in NUMELS[:num_rows]]
        cells = [cell for n, z in zip(norms, zeros) for cell in (n, n, 0.0, 0.0, z)]
        changes = {
            "clip_coefficient": r.choice([1.0, 1.0, 0.5]),
            "learning_rates": (rate,),
            "missing": ("a",) if r.random() < 0.02 else (),
            "stale": ("a",) if r.random() < 0.02 else (),
            "gradients": GradientTable(NAMES[:num_rows], NUMELS[:num_rows], cells),
        }
        if r.random() < 0.03:
            bad = InputStats(numel=4, max_abs=1.0, num_nonfinite=r.choice([0, 1]), num_zeros=4, is_floating=True)
            yield InputScan(step=step - r.choice([0, 0, 1]), tensors={r.choice("xy"): bad})
        yield reading(step, None if r.random() < 0.01 else loss, math.hypot(*norms), **changes)
        if r.random() < 0.02:
            yield poisoned(step + 1, r.choice([math.nan, math.inf]))
        if r.random() < 0.02:
            yield Validation(step=step, epoch=0, loss=r.random())
    yield Flush(step=1000)


def listen_in_full(rules: Sequence[Rule], fact: Fact) -> list[Finding]:
    return [finding for rule in rules for finding in rule.observe(fact)]


def check_equal(facts: Sequence[Fact], config: DetectConfig) -> None:
    """Run both ways, with a restart in the middle of the quick one."""
    quick = Detector(standard_rules(config, clip_threshold=1.0))
    full = standard_rules(config, clip_threshold=1.0)
    for i, fact in enumerate(facts):
        assert quick.observe(fact) == listen_in_full(full, fact), fact
        if i % 40 == 0 or i == len(facts) - 1:
            state = {rule.name: rule.state_dict() for rule in full}
            assert repr(quick.state_dict()) == repr(state)  # NaN is not equal to itself
        if i == len(facts) // 2:
            saved = quick.state_dict()
            quick = Detector(standard_rules(config, clip_threshold=1.0))
            quick.load_state_dict(saved)
            for rule in full:  # derived values restart there too
                rule.load_state_dict(saved[rule.name])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("run", HEALTHY)
def test_a_healthy_run_is_judged_and_remembered_the_same(run: str, config: str) -> None:
    check_equal(HEALTHY[run](), CONFIGS[config])


@pytest.mark.parametrize("name", TROUBLE)
def test_a_fault_is_judged_and_remembered_the_same(name: str) -> None:
    check_equal(list(TROUBLE[name].facts()), CONFIGS["defaults"])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(12))
def test_a_wild_run_is_judged_and_remembered_the_same(seed: int, config: str) -> None:
    check_equal(list(make_wild_run(seed, num_rows=4 if seed % 2 else len(NAMES))), CONFIGS[config])


def test_a_long_run_with_a_forgotten_start_is_remembered_the_same() -> None:
    quick, full = LossSpike(DetectConfig()), LossSpike(DetectConfig())
    r = random.Random(0)
    for step in range(2 * TAIL_BLOCK + 500):
        fact = reading(step, r.gauss(1.0, 0.1))
        if not quick.passes(fact):
            list(quick.observe(fact))
        list(full.observe(fact))
        if step % TAIL_BLOCK > TAIL_BLOCK - 8 or step % TAIL_BLOCK < 80:
            assert repr(quick.state_dict()) == repr(full.state_dict())


@pytest.mark.parametrize(("ratio", "in_grace"), [(2.0, False), (1.0, True), (0.5, True)])
def test_a_constant_rate_is_a_restart_only_by_its_ratio(ratio: float, in_grace: bool) -> None:
    restarts = Restarts(LossThresholds(restart_ratio=ratio, restart_grace=4))
    assert [restarts.feed(reading(step)) for step in range(40)][1:] == [in_grace] * 39


def test_nearly_every_reading_of_a_steady_run_takes_the_quick_pass() -> None:
    rules = standard_rules(DetectConfig(), clip_threshold=1.0)
    listening = [rule for rule in rules if Reading in (getattr(rule, "hears", ()) or (Reading,))]
    refused: dict[str, int] = {}
    r = random.Random(0)
    for step in range(1200):
        cells = [0.2, 0.1, 0.0, 0.0, 0.0] * 6
        changes = {"gradients": GradientTable(NAMES[:6], NUMELS[:6], cells)}
        fact = reading(step, r.gauss(1.0, 0.1), 0.5 * math.exp(r.gauss(0, 0.2)), **changes)
        assert fact.is_plain
        for rule in listening:
            if getattr(rule, "hears_plain", True) and not rule.passes(fact):  # type: ignore[attr-defined]
                list(rule.observe(fact))
                refused[rule.name] = refused.get(rule.name, 0) + (step >= 200)
    assert {name: num for name, num in refused.items() if num > 100} == {}  # blocks of 16 refuse one in 16


@dataclasses.dataclass
class Plain:
    """A custom rule with only the four methods of Rule."""

    name: str = "mine"
    heard: int = 0

    def observe(self, fact: Fact) -> list[Finding]:
        self.heard += isinstance(fact, Reading)
        return []

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, _state: object) -> None:
        pass


def test_a_rule_without_a_quick_pass_gets_every_reading() -> None:
    mine = Plain()
    detector = Detector([mine])
    for step in range(10):
        detector.observe(reading(step))
    assert mine.heard == 10


def test_a_rule_with_its_own_observe_does_not_inherit_the_quick_pass() -> None:
    heard = []

    class Mine(HighGradientNorm):
        def observe(self, fact: Fact) -> list[Finding]:
            heard.append(fact.step)
            return []

    detector = Detector([Mine(DetectConfig(), 1.0)])
    for step in range(3):
        detector.observe(reading(step))
    assert heard == [0, 1, 2]


@pytest.mark.parametrize("draw", [random.Random.random, lambda r: float(r.randint(0, 3)), lambda r: r.gauss(0, 1) ** 5])
def test_the_lower_bound_is_at_most_the_median_deviation(draw: Callable[[random.Random], float]) -> None:
    r = random.Random(0)
    for num in [*range(1, 40), 127, 128, 129, 130] * 10:
        values = sorted(draw(r) for _ in range(num))
        centre = median(values)
        assert 0.0 <= find_least_deviation(values, centre) <= median_deviation(values, centre)[0]
