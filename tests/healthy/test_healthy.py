"""First, do no harm: a healthy training ends on a Guard as it ends without one, to the bit.

STEADYGRAD_TEST_SEEDS=3 in the environment runs each scenario with three seeds. Clipping is off where a test does not
say otherwise, so that it does not blur the comparison.
"""

from __future__ import annotations

import functools
import os

import pytest

from healthy.catalogue import FAMILIES, SCENARIOS
from healthy.scenario import Ending
from steadygrad import GuardConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*runs without fused=True")

SEEDS = range(int(os.environ.get("STEADYGRAD_TEST_SEEDS", "1")))
RUNS = [(name, seed) for name in SCENARIOS for seed in SEEDS]
QUICK = {name for family in FAMILIES for name in [s.name for s in SCENARIOS.values() if s.family == family][-1:]}
"""One of each family; the others are slow tests."""
MOST_WARNED = 0.05
"""Share of healthy runs that may have a finding of severity warning or worse. This corpus is made to provoke them, and
seven of its runs have one: a step that cannot be run again, where an exploding loss is reported without proof, or a
step that did hurt the weights for a while, as it was meant to."""
EXPLAINED = (
    *("flow_on_a_thin_line", "likelihood_crosses_zero", "pruned_by_hand", "pruned_in_one_go", "wgan_gp_of_two_guards"),
)
"""Scenarios that look like harm to a rule that sees less: an outlying batch, a batch that is fine again after one step,
units that the program cut off, a loss of both signs that began near 0."""


ANY_SIZE = ("actor_critic_program", "tiny_units", "huge_units")
"""Scenarios with norms far from 1, which a clip at a fixed norm would change."""
LEAPS = ("loss_times_a_thousand", "longer_sequences", "closure_returns_only_a_part")
"""Scenarios whose gradients grow a thousandfold from one step to the next. They are clipped, and reach their goal."""


@functools.cache
def train_plain(name: str, seed: int) -> Ending:
    return SCENARIOS[name].train(seed=seed)


@functools.cache
def train_guarded(name: str, seed: int) -> Ending:
    return SCENARIOS[name].train(seed=seed, config=GuardConfig(clip=None))


@pytest.mark.parametrize(
    ("name", "seed"), [pytest.param(*run, marks=() if run[0] in QUICK else pytest.mark.slow) for run in RUNS]
)
def test_a_healthy_training_is_left_alone(name: str, seed: int) -> None:
    plain, guarded = train_plain(name, seed), train_guarded(name, seed)

    assert plain.shortfalls == [], "the scenario itself is not healthy"
    assert guarded.halted is None
    assert guarded.actions == []
    assert guarded.compare(plain) == []


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_the_run_itself_explains_is_no_warning(name: str) -> None:
    assert train_guarded(name, 0).warnings == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # alone, without the runs of the tests above, it takes as long as all of them
def test_few_healthy_trainings_get_a_warning() -> None:
    warned = {f"{name}, seed {seed}": train_guarded(name, seed).warnings for name, seed in RUNS}
    warned = {run: kinds for run, kinds in warned.items() if kinds}

    assert len(warned) <= MOST_WARNED * len(RUNS), warned


def test_the_corpus_is_large_and_every_scenario_says_why_it_is_healthy() -> None:
    assert len(SCENARIOS) >= 159
    assert all(len(scenario.about) > 30 for scenario in SCENARIOS.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ANY_SIZE else pytest.mark.slow) for name in SCENARIOS]
)
def test_the_default_clip_leaves_a_healthy_training_alone(name: str) -> None:
    plain, guarded = train_plain(name, 0), SCENARIOS[name].train(seed=0, config=GuardConfig())

    assert guarded.halted is None
    assert guarded.actions == []
    assert guarded.shortfalls == []
    assert (guarded.compare(plain) == []) is (name not in LEAPS)
