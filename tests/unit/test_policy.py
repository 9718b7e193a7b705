"""The policy: how it answers a finding, how it escalates, and when it stops."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from rule_traces import poisoned, reading

from steadygrad.config import GuardConfig, Policy
from steadygrad.decide import Judge, build_table
from steadygrad.errors import ConfigError
from steadygrad.facts import Action, Answer, Finding, Reading, Severity, Verdict


def finding(kind: str, step: int, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(kind=kind, severity=severity, step=step, message="made up")


def proven(kind: str, step: int, **evidence: float | str) -> Finding:
    """Return a finding on finite numbers, confirmed by the paired test."""
    evidence = {"proof": Answer.DAMAGED.value, **evidence}
    return Finding(kind=kind, severity=Severity.ERROR, step=step, message="made up", evidence=evidence)


def bad_steps(judge: Judge, steps: range | list[int]) -> list[Verdict]:
    """Judge a NaN loss with NaN gradients at each of the steps; return the verdict on the first finding of each."""
    verdicts = []
    for step in steps:
        bad = poisoned(step, math.nan)
        verdicts.append(judge.decide(finding("nonfinite_loss", step), reading=bad))
        second = judge.decide(finding("nonfinite_gradient", step), reading=bad)
        assert second.action is Action.SKIP, "loss and gradient of one step are one event"
    return verdicts


def actions(verdicts: list[Verdict]) -> list[Action]:
    return [verdict.action for verdict in verdicts]


# --- escalation ------------------------------------------------------------------------------------------------------


def test_single_nonfinite_steps_only_skip() -> None:
    assert set(actions(bad_steps(Judge(), [3, 10, 12, 30, 55]))) == {Action.SKIP}


def test_three_nonfinite_steps_halve_the_rate_and_ten_roll_back() -> None:
    verdicts = bad_steps(Judge(), range(20, 30))

    assert actions(verdicts) == [
        *[Action.SKIP] * 2,
        Action.SCALE_LR,
        *[Action.SKIP] * 6,
        Action.ROLLBACK,
    ]
    assert verdicts[2].factor == 0.5
    assert verdicts[2].reason == "3 non-finite steps in a row"


def test_the_third_rollback_halts() -> None:
    verdicts = bad_steps(Judge(), range(40))

    taken = [(step, v.action) for step, v in enumerate(verdicts) if v.action is not Action.SKIP]

    assert taken[:5] == [
        (2, Action.SCALE_LR),
        (9, Action.ROLLBACK),
        (12, Action.SCALE_LR),  # the rollback undid the first one together with the weights
        (19, Action.ROLLBACK),
        (29, Action.HALT),
    ]
    assert "rollback" in verdicts[29].reason


def test_rollbacks_far_apart_do_not_halt() -> None:
    judge = Judge()

    for start in range(0, 10_000, 1000):
        assert actions(bad_steps(judge, range(start, start + 10)))[-1] is Action.ROLLBACK


def test_successful_rollbacks_do_not_halt() -> None:
    judge = Judge()

    for start in range(0, 2000, 120):
        assert actions(bad_steps(judge, range(start, start + 10)))[-1] is Action.ROLLBACK


def test_a_good_step_ends_the_streak() -> None:
    verdicts = bad_steps(Judge(), [1, 2, 4, 5, 7, 8])

    assert set(actions(verdicts)) == {Action.SKIP}


def test_a_nonfinite_epoch_halves_the_learning_rate() -> None:
    verdict = Judge().decide(finding("nonfinite_epoch", 99))

    assert (verdict.action, verdict.factor) == (Action.SCALE_LR, 0.5)


def test_a_nonfinite_validation_alone_changes_nothing_unless_eager() -> None:
    found = finding("nonfinite_validation", 99)

    assert Judge().decide(found).action is Action.NONE  # its data may be at fault, and the weights be fine
    assert Judge(Policy.eager()).decide(found).action is Action.SCALE_LR


def test_a_loss_explosion_lowers_the_learning_rate_tenfold() -> None:
    verdict = Judge(Policy.eager()).decide(finding("loss_explosion", 99), reading=reading(107))

    assert (verdict.action, verdict.factor) == (Action.SCALE_LR, 0.1)


def test_overfitting_raises_the_weight_decay() -> None:
    verdict = Judge(Policy.eager()).decide(finding("overfitting", 99, Severity.WARNING))

    assert (verdict.action, verdict.factor) == (Action.SCALE_WEIGHT_DECAY, 1.5)


def test_nonfinite_weights_are_rolled_back() -> None:
    assert Judge().decide(finding("nonfinite_parameter", 5, Severity.CRITICAL)).action is Action.ROLLBACK


@pytest.mark.parametrize("kind", ["loss_spike", "dead_units", "rising_norm", "somebody_elses"])
def test_findings_outside_the_table_are_only_reported(kind: str) -> None:
    assert Judge().decide(finding(kind, 5, Severity.WARNING), reading=reading(5)).action is Action.NONE


def test_an_info_is_never_acted_on() -> None:
    judge = Judge()

    for step in range(20):
        verdict = judge.decide(finding("nonfinite_gradient", step, Severity.INFO), reading=poisoned(step, math.inf))
        assert verdict.action is Action.SKIP
    assert judge.decide(finding("loss_explosion", 30, Severity.INFO)).action is Action.NONE


@pytest.mark.parametrize(
    ("kind", "action"),
    [("exploding_gradient", Action.CLIP), ("high_gradient_norm", Action.CLIP), ("wrong_split", Action.NONE)],
)
def test_a_finding_about_the_size_of_a_clipped_gradient_reports_the_clip(kind: str, action: Action) -> None:
    clipped = reading(5, 1.0, 50.0, clip_coefficient=0.02)

    assert Judge().decide(finding(kind, 5, Severity.INFO), reading=clipped).action is action


# --- budgets and cool-downs ------------------------------------------------------------------------------------------


def test_the_learning_rate_is_not_lowered_twice_within_the_cool_down() -> None:
    judge = Judge(Policy(require_proof=False, cooldown_steps=100))

    first = judge.decide(finding("loss_explosion", 100))
    second = judge.decide(finding("loss_explosion", 199))
    third = judge.decide(finding("loss_explosion", 200))

    assert actions([first, second, third]) == [Action.SCALE_LR, Action.NONE, Action.SCALE_LR]
    assert "less than 100 steps ago" in second.reason


def test_explosions_beyond_the_budget_roll_back_and_then_halt() -> None:
    judge = Judge(Policy(require_proof=False, max_lr_changes=2, cooldown_steps=10, budget_steps=1000))

    verdicts = [judge.decide(finding("loss_explosion", 50 * i)) for i in range(5)]

    assert actions(verdicts) == [
        Action.SCALE_LR,
        Action.SCALE_LR,
        Action.ROLLBACK,
        Action.ROLLBACK,
        Action.HALT,
    ]


def test_weight_decay_beyond_the_budget_stays_and_this_is_reported() -> None:
    judge = Judge(Policy(require_proof=False, max_weight_decay_changes=1, cooldown_steps=10))
    judge.decide(finding("overfitting", 0))

    verdict = judge.decide(finding("overfitting", 500))

    assert verdict.action is Action.NONE
    assert "the budget of 1 x scale_weight_decay in 1000 steps is spent" in verdict.reason


def test_a_budget_is_restored_after_its_window() -> None:
    judge = Judge(Policy(require_proof=False, max_weight_decay_changes=1, budget_steps=1000))
    judge.decide(finding("overfitting", 0))

    assert judge.decide(finding("overfitting", 1000)).action is Action.SCALE_WEIGHT_DECAY


def test_skips_beyond_the_budget_halt() -> None:
    judge = Judge(Policy(max_skips=5))

    verdicts = bad_steps_until_halt(judge, range(0, 40, 4))

    assert actions(verdicts) == [*[Action.SKIP] * 5, Action.HALT]
    assert "5 steps were skipped within 1000" in verdicts[-1].reason


def bad_steps_until_halt(judge: Judge, steps: range) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for step in steps:
        verdicts.append(judge.decide(finding("nonfinite_loss", step), reading=poisoned(step, math.nan)))
        if verdicts[-1].action is Action.HALT:
            break
    return verdicts


# --- the ready-made policies -----------------------------------------------------------------------------------------


def test_observe_only_reports_what_the_reflex_did() -> None:
    judge = Judge(Policy.observe())

    assert set(actions(bad_steps(judge, range(40)))) == {Action.SKIP}
    for kind in ("loss_explosion", "nonfinite_parameter", "overfitting"):
        assert judge.decide(finding(kind, 50)).action is Action.NONE


def test_strict_halts_at_the_first_finding_above_info() -> None:
    judge = Judge(Policy.strict())

    assert judge.decide(finding("loss_spike", 1, Severity.INFO)).action is Action.NONE
    assert judge.decide(finding("loss_spike", 2, Severity.WARNING)).action is Action.HALT


def test_patient_never_changes_a_hyperparameter() -> None:
    judge = Judge(Policy.patient())

    exploded = proven("loss_explosion", 2000)
    verdicts = bad_steps(judge, range(30)) + [
        judge.decide(one) for one in (exploded, finding("nonfinite_validation", 2000), finding("overfitting", 2000))
    ]

    assert set(actions(verdicts)) == {Action.SKIP, Action.ROLLBACK, Action.HALT, Action.NONE}
    assert actions(verdicts)[-3:] == [Action.ROLLBACK, Action.NONE, Action.NONE]


# --- on_nonfinite ----------------------------------------------------------------------------------------------------


def test_raise_halts_at_a_nonfinite_step_whatever_the_policy() -> None:
    for policy in (Policy(), Policy.observe(), Policy.patient()):
        judge = Judge(policy, on_nonfinite=Action.RAISE)
        assert judge.decide(finding("nonfinite_loss", 3), reading=poisoned(3, math.nan)).action is Action.HALT


def test_raise_does_not_halt_during_the_loss_scale_search() -> None:
    judge = Judge(on_nonfinite=Action.HALT)

    verdict = judge.decide(finding("nonfinite_gradient", 3, Severity.INFO), reading=poisoned(3, math.inf))

    assert verdict.action is Action.SKIP


def test_sanitized_steps_escalate_and_use_no_skip_budget() -> None:
    judge = Judge(Policy(max_skips=1), on_nonfinite=Action.SANITIZE)

    verdicts = [
        judge.decide(finding("nonfinite_gradient", step), reading=reading(step, num_nonfinite=3)) for step in range(4)
    ]

    assert actions(verdicts) == [Action.SANITIZE, Action.SANITIZE, Action.SCALE_LR, Action.SANITIZE]


# --- custom actions --------------------------------------------------------------------------------------------------


def test_custom_actions_replace_the_table() -> None:
    judge = Judge(Policy(actions={"loss_spike": Action.ROLLBACK, "overfitting": "none", "divergence": "halt"}))  # type: ignore[dict-item]

    assert judge.decide(finding("loss_spike", 1)).action is Action.ROLLBACK
    assert judge.decide(finding("overfitting", 1)).action is Action.NONE
    assert judge.decide(finding("divergence", 1)).action is Action.HALT


def test_a_custom_none_for_bad_steps_keeps_the_skip() -> None:
    judge = Judge(Policy(actions={"nonfinite_loss": Action.NONE, "nonfinite_gradient": Action.NONE}))

    assert set(actions(bad_steps(judge, range(20)))) == {Action.SKIP}


def test_the_table_has_the_numbers_of_the_policy() -> None:
    table = build_table(Policy(lr_factor=0.25, nonfinite_steps_to_rollback=7))

    assert [(r.action, r.factor, r.after) for r in table["nonfinite_loss"]] == [
        (Action.SKIP, None, 1),
        (Action.SCALE_LR, 0.25, 3),
        (Action.ROLLBACK, 1.0, 7),
    ]


# --- state and settings ----------------------------------------------------------------------------------------------


def test_a_restored_judge_decides_the_same() -> None:
    whole, first = Judge(), Judge()
    expected = bad_steps(whole, range(28))

    said = bad_steps(first, range(15))
    second = Judge()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    said += bad_steps(second, range(15, 28))

    assert said == expected
    assert second.state_dict() == whole.state_dict()


def test_a_judge_works_without_a_reading() -> None:
    given: Reading | None = None

    assert Judge().decide(finding("nonfinite_epoch", 3), reading=given).action is Action.SCALE_LR


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"start_lr_factor": 2.0}, r"Policy\.start_lr_factor must be below 1, got 2\.0"),
        ({"lr_factor": 1.5}, r"Policy\.lr_factor must be below 1, got 1\.5"),
        ({"weight_decay_factor": 0.5}, r"Policy\.weight_decay_factor must be above 1"),
        ({"max_skips": 0}, r"Policy\.max_skips must be a whole number above 0, got 0"),
        ({"cooldown_steps": 1.5}, r"Policy\.cooldown_steps must be a whole number"),
        ({"ramp_back_steps": 0}, r"Policy\.ramp_back_steps must be a whole number above 0"),
        ({"halt_at": "loud"}, r"Policy\.halt_at: must be one of info, warning, error, critical"),
        ({"nonfinite_steps_to_scale_lr": 10}, r"must be below nonfinite_steps_to_rollback"),
        ({"actions": {"loss_spike": "skip"}}, r"Policy\.actions\['loss_spike'\] cannot be 'skip'"),
        ({"actions": {"loss_spike": "dance"}}, r"Policy\.actions\['loss_spike'\]: must be one of none"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy(**wrong)


def test_a_policy_survives_conversion_to_plain_values() -> None:
    values = {"policy": {"actions": {"loss_spike": "rollback"}, "halt_at": "critical", "ramp_back_steps": 200}}

    config = GuardConfig.from_dict(values)

    assert config.policy.actions == {"loss_spike": Action.ROLLBACK}
    assert config.policy.halt_at is Severity.CRITICAL
    assert GuardConfig.from_dict(config.to_dict()) == config


def test_the_ramp_back_is_off_by_default() -> None:
    assert Policy().ramp_back_steps is None


def test_an_unrecovered_loss_rolls_back_with_its_rates() -> None:
    verdict = Judge(Policy.eager()).decide(finding("unrecovered_loss", 120), reading=reading(120))
    assert (verdict.action, verdict.factor) == (Action.ROLLBACK, 1.0)


def test_a_second_unrecovered_loss_keeps_the_lowered_rate() -> None:
    judge = Judge(Policy.eager())
    kinds = ["loss_explosion", "unrecovered_loss", "loss_explosion", "unrecovered_loss"]
    verdicts = [judge.decide(finding(kind, 100 + 20 * i)) for i, kind in enumerate(kinds)]
    assert [v.action for v in verdicts] == [Action.SCALE_LR, Action.ROLLBACK, Action.SCALE_LR, Action.ROLLBACK]
    assert [v.factor for v in verdicts] == [0.1, 1.0, 0.1, None]


# --- a learning rate that is too high from the start -----------------------------------------------------------------


def test_a_rate_too_high_from_the_start_restarts_with_a_lower_one() -> None:
    verdict = Judge().decide(proven("rate_too_high", 9), reading=reading(9))
    assert (verdict.action, verdict.factor) == (Action.ROLLBACK, 0.05)


def test_the_growth_of_the_weights_decides_how_much_lower() -> None:
    verdict = Judge().decide(proven("rate_too_high", 7, lr_factor=0.03), reading=reading(7))
    assert (verdict.action, verdict.factor) == (Action.ROLLBACK, 0.03)


def test_a_rate_still_too_high_is_lowered_again_and_then_only_reported() -> None:
    judge = Judge()
    verdicts = [judge.decide(proven("rate_too_high", 10 * i), reading=reading(10 * i)) for i in range(3)]
    assert actions(verdicts) == [Action.ROLLBACK, Action.ROLLBACK, Action.NONE]
    assert [v.factor for v in verdicts[:2]] == [0.05, 0.05]
    assert "but there were 2 rollbacks in 1000 steps" in verdicts[2].reason


def test_a_run_ruined_at_the_start_restarts_within_the_rate_budget_and_then_halts() -> None:
    judge = Judge(Policy(max_lr_changes=3))
    ruined = [proven("rate_too_high", 10 * i, proof=Answer.NONFINITE.value) for i in range(4)]
    verdicts = [judge.decide(one, reading=poisoned(one.step, math.nan)) for one in ruined]
    assert actions(verdicts) == [Action.ROLLBACK] * 3 + [Action.HALT]
    assert [v.factor for v in verdicts[:3]] == [0.05] * 3


def test_restarts_with_a_lower_rate_do_not_count_as_failed_rollbacks() -> None:
    judge = Judge()
    for step in (0, 10, 20):
        judge.decide(proven("rate_too_high", step, proof=Answer.NONFINITE.value), reading=poisoned(step, math.nan))

    assert judge.decide(proven("rate_too_high", 40), reading=reading(40)).action is Action.ROLLBACK
    back = bad_steps(judge, range(50, 60))[-1]
    assert (back.action, back.factor) == (Action.ROLLBACK, None)  # with the lowered rate


def test_a_policy_without_hyperparameter_changes_does_not_restart() -> None:
    verdict = Judge(Policy.patient()).decide(proven("rate_too_high", 9), reading=reading(9))
    assert verdict.action is Action.NONE
    assert "the policy changes no hyperparameters" in verdict.reason


# --- finite numbers need proof ---------------------------------------------------------------------------------------

FINITE = ["loss_explosion", "unrecovered_loss", "divergence", "rate_too_high"]


@pytest.mark.parametrize("kind", FINITE)
@pytest.mark.parametrize("answer", [None, Answer.UNHARMED, Answer.UNKNOWN])
def test_finite_numbers_without_proof_are_only_reported(kind: str, answer: Answer | None) -> None:
    evidence = {} if answer is None else {"proof": answer.value}
    found = Finding(kind=kind, severity=Severity.ERROR, step=50, message="made up", evidence=evidence)
    assert Judge().decide(found, reading=reading(60)).action is Action.NONE


@pytest.mark.parametrize("kind", FINITE)
def test_proven_damage_on_finite_numbers_rolls_back(kind: str) -> None:
    assert Judge().decide(proven(kind, 50), reading=reading(60)).action is Action.ROLLBACK


def test_repeated_damage_also_lowers_the_rate() -> None:
    judge = Judge()
    verdicts = [judge.decide(proven("divergence", step), reading=reading(step)) for step in (100, 300, 500)]
    assert [(v.action, v.factor) for v in verdicts[:2]] == [(Action.ROLLBACK, None), (Action.ROLLBACK, 0.5)]
    assert verdicts[2].action is Action.NONE  # finite numbers never halt a run


def test_a_raised_rate_is_set_back_to_a_harmless_one() -> None:
    verdict = Judge().decide(proven("loss_explosion", 100, lr_factor=0.01), reading=reading(120))
    assert (verdict.action, verdict.factor) == (Action.ROLLBACK, 0.01)
    patient = Judge(Policy.patient()).decide(proven("loss_explosion", 100, lr_factor=0.01), reading=reading(120))
    assert (patient.action, patient.factor) == (Action.ROLLBACK, None)


def test_overfitting_is_reported_and_the_weight_decay_stays() -> None:
    assert Judge().decide(finding("overfitting", 99, Severity.WARNING)).action is Action.NONE


def test_a_custom_action_needs_no_proof() -> None:
    judge = Judge(Policy(actions={"loss_explosion": Action.SCALE_LR}))
    assert judge.decide(finding("loss_explosion", 9), reading=reading(12)).action is Action.SCALE_LR


def test_a_misspelt_kind_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"\['loss_spik'\] names no kind of finding. Did you mean 'loss_spike'"):
        Policy(actions={"loss_spik": Action.ROLLBACK})
