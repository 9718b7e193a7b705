"""What every rule must do: find its fault, stay quiet on healthy runs, survive NaN and a restart."""

from __future__ import annotations

import math

import pytest
from rule_traces import HEALTHY, TROUBLE, findings_of, findings_with_a_restart, poisoned, reading, rule_named

from steadygrad.config import DetectConfig
from steadygrad.detect import Detector, standard_rules
from steadygrad.detect.medians import Blocks
from steadygrad.detect.memory import Remembering
from steadygrad.detect.rank_rules import split_facts, split_rules
from steadygrad.facts import Fact, Reading, Severity

ABOUT_POISON = {"nonfinite_loss", "nonfinite_gradient", "nonfinite_input", "many_skips"}
"""Rules whose event is the poisoned step itself."""


def test_every_standard_rule_has_a_faulty_case() -> None:
    assert {rule.name for rule in standard_rules(DetectConfig())} == set(TROUBLE)


def test_rule_names_are_unique_because_they_key_the_state() -> None:
    names = [rule.name for rule in standard_rules(DetectConfig())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", TROUBLE)
def test_a_rule_finds_its_fault_where_it_happened(name: str) -> None:
    trouble = TROUBLE[name]

    said = [f for f in findings_of(rule_named(name), trouble.facts()) if f.severity is trouble.severity]

    assert said, "no finding has this severity"
    assert said[0].step == trouble.step
    assert said[0].kind == (trouble.kind or name)
    assert said[0].message
    assert said[0].advice


@pytest.mark.parametrize("run", HEALTHY)
def test_a_healthy_run_has_no_finding_above_info(run: str) -> None:
    detector = Detector(standard_rules(DetectConfig(), clip_threshold=1.0))

    said = [finding for fact in HEALTHY[run]() for finding in detector.observe(fact)]

    assert [f for f in said if f.severity is not Severity.INFO] == []


@pytest.mark.parametrize("run", HEALTHY)
def test_a_healthy_run_has_few_infos(run: str) -> None:
    detector = Detector(standard_rules(DetectConfig(), clip_threshold=1.0))

    said = [finding for fact in HEALTHY[run]() for finding in detector.observe(fact)]

    assert len(said) <= 20  # over 500 steps


@pytest.mark.parametrize("share", [0.1, 0.6])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in TROUBLE if name not in ABOUT_POISON])
def test_a_nonfinite_step_changes_no_later_finding(name: str, poison: float, share: float) -> None:
    facts = TROUBLE[name].facts()
    hole = next((i for i, f in enumerate(facts) if i >= share * len(facts) and isinstance(f, Reading)), -1)
    without: list[Fact] = [f for i, f in enumerate(facts) if i != hole]
    with_poison: list[Fact] = [poisoned(f.step, poison) if i == hole else f for i, f in enumerate(facts)]

    # Equal findings have equal evidence, so all scores are unchanged too.
    assert findings_of(rule_named(name), with_poison) == findings_of(rule_named(name), without)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", TROUBLE)
def test_a_restored_rule_reports_the_same(name: str, share: float) -> None:
    facts = TROUBLE[name].facts()
    whole = findings_of(rule_named(name), facts)

    assert findings_with_a_restart(lambda: rule_named(name), facts, int(share * len(facts))) == whole


@pytest.mark.parametrize("run", ["heavy tails", "learning-rate restarts"])
def test_a_restored_detector_ends_in_the_same_state(run: str) -> None:
    facts = HEALTHY[run]()
    whole, first, second = (Detector(standard_rules(DetectConfig())) for _ in range(3))
    for fact in facts:
        whole.observe(fact)

    for fact in facts[:333]:
        first.observe(fact)
    second.load_state_dict(first.state_dict())
    for fact in facts[333:]:
        second.observe(fact)

    assert second.state_dict() == whole.state_dict()


def test_a_saved_state_does_not_change_when_the_rule_continues() -> None:
    detector = Detector(standard_rules(DetectConfig()))
    for step in range(40):
        detector.observe(reading(step, 1.0 + 0.01 * (step % 3)))
    state = detector.state_dict()
    before = repr(state)

    restored = Detector(standard_rules(DetectConfig()))
    restored.load_state_dict(state)
    for step in range(40, 80):
        detector.observe(reading(step, 2.0))
        restored.observe(reading(step, 2.0))

    assert repr(state) == before


def test_an_ongoing_condition_is_reported_once_and_again_after_repeat_after() -> None:
    rule = rule_named("exploding_gradient", DetectConfig(repeat_after=200))

    said = findings_of(rule, [reading(step, 1.0, 150.0) for step in range(500)])

    assert [f.step for f in said] == [0, 200, 400]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_block_of_values_keeps_its_first_step_across_a_restart(cut: int) -> None:
    whole, first, second = Blocks(4), Blocks(4), Blocks(4)
    for step in range(12):
        whole.add(step, float(step))
    for step in range(cut):
        first.add(step, float(step))

    second.load_state_dict(first.state_dict())
    for step in range(cut, 12):
        second.add(step, float(step))

    assert second.start == whole.start == 8
    assert second.state_dict() == whole.state_dict()


def test_two_attributes_with_the_same_state_key_are_refused() -> None:
    with pytest.raises(TypeError, match="_start and start"):
        type("Clashing", (Remembering,), {"memory": ("_start", "start")})


def test_with_several_ranks_each_rule_gets_the_facts_it_names() -> None:
    common, own = split_rules(standard_rules(DetectConfig()))

    assert {"dead_units", "zero_gradient", "flushed_gradient"} <= {rule.name for rule in own}
    assert [
        (rule.name, heard.__name__)
        for rule in common
        for heard in getattr(rule, "hears", ())
        if split_facts([object.__new__(heard)])[1]
    ] == []
