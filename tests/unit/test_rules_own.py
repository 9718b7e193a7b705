"""Custom rules, and rules that are switched off."""

from __future__ import annotations

import pytest
from rule_traces import reading

from steadygrad.config import DetectConfig, GuardConfig
from steadygrad.detect import Detector, Rule, rule, standard_rules
from steadygrad.errors import ConfigError
from steadygrad.facts import Finding, Reading, Severity, Validation


@rule("loss_is_a_multiple_of_seven", severity=Severity.INFO, advice="Do not worry.")
def loss_is_a_multiple_of_seven(reading: Reading) -> str | None:
    if reading.loss is not None and reading.loss % 7 == 0:
        return f"the loss {reading.loss:g} is a multiple of seven"
    return None


def test_a_custom_rule_takes_five_lines_and_runs_with_the_others() -> None:
    detector = Detector(standard_rules(DetectConfig(rules=(loss_is_a_multiple_of_seven,))))

    said = [f for step in range(10) for f in detector.observe(reading(step, float(step + 1)))]

    assert [(f.kind, f.step, f.severity, f.message, f.advice) for f in said] == [
        ("loss_is_a_multiple_of_seven", 6, Severity.INFO, "the loss 7 is a multiple of seven", "Do not worry.")
    ]


def test_a_custom_rule_may_return_a_complete_finding() -> None:
    made = Finding(kind="mine", severity=Severity.ERROR, step=2, message="look")

    @rule("mine")
    def mine(reading: Reading) -> Finding | None:
        return made if reading.step == 3 else None

    assert [f for step in range(5) for f in mine.observe(reading(step))] == [made]


def test_a_rule_made_from_a_function_sees_only_readings_and_stays_callable() -> None:
    assert list(loss_is_a_multiple_of_seven.observe(Validation(step=1, epoch=0, loss=7.0))) == []
    assert loss_is_a_multiple_of_seven(reading(0, 14.0)) == "the loss 14 is a multiple of seven"


def test_a_rule_can_be_switched_off_by_its_name() -> None:
    names = [r.name for r in standard_rules(DetectConfig(off=("loss_spike", "loss_plateau")))]

    assert "loss_spike" not in names
    assert "loss_explosion" in names


def test_switching_off_an_unknown_rule_raises_an_error_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"names no rule: los_spike\. There are .*loss_spike"):
        standard_rules(DetectConfig(off=("los_spike",)))


def make_rule(name: str) -> Rule:
    return rule(name)(lambda reading: None)


@pytest.mark.parametrize("rules", [(make_rule("loss_spike"),), (make_rule("mine"), make_rule("mine"))])
def test_a_duplicate_rule_name_is_refused_because_a_history_would_be_lost(rules: tuple[Rule, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"DetectConfig\.rules has .*'{rules[0].name}'.* another name, or"):
        standard_rules(DetectConfig(rules=rules))


def test_a_rule_may_use_the_name_of_a_disabled_one() -> None:
    mine = make_rule("loss_spike")

    rules = standard_rules(DetectConfig(rules=(mine,), off=("loss_spike",)))

    assert [one for one in rules if one.name == "loss_spike"] == [mine]


def test_an_object_that_is_not_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"DetectConfig\.rules must hold rules"):
        DetectConfig(rules=(len,))


def test_a_configuration_is_written_without_its_custom_rules() -> None:
    config = GuardConfig(detect=DetectConfig(rules=(loss_is_a_multiple_of_seven,), off=("loss_plateau",)))

    again = GuardConfig.from_dict(config.to_dict())

    assert again.detect.rules == ()
    assert again.detect.off == ("loss_plateau",)


def test_a_class_with_the_four_methods_is_a_rule() -> None:
    class EveryTenth:
        name = "every_tenth"

        def observe(self, fact: object) -> list[Finding]:
            due = isinstance(fact, Reading) and fact.step % 10 == 9
            return [Finding(kind=self.name, severity=Severity.INFO, step=9, message="ten more")] if due else []

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: object) -> None:
            pass

    own: Rule = EveryTenth()
    detector = Detector([own])

    assert len([f for step in range(20) for f in detector.observe(reading(step))]) == 2
