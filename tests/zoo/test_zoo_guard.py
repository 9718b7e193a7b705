"""Every case of the zoo on a Guard: a finding of a matching kind at the failing step, and none on controls."""

from __future__ import annotations

import contextlib
import functools

import pytest
import zoo_backward  # noqa: F401  (registers its cases)
import zoo_finite  # noqa: F401
import zoo_forward  # noqa: F401
import zoo_own  # noqa: F401
from zoo_case import CASES, Case

from steadygrad import FixedNorm, Guard, GuardConfig, Severity, TrainingHalted

GUARDED = [case for case in CASES.values() if case.guarded]
NAMED = [case for case in GUARDED if {"nan", "inf"} & set(case.kinds) and case.phase != "optimizer"]
"""A bad value made by the optimizer itself is noticed one step later, in the weights."""
CONTROLS = [case for case in CASES.values() if case.is_healthy]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch itself warns about some of these


@functools.cache
def train(name: str) -> Guard:
    training = CASES[name].build()
    clip = None if training.clip is None else FixedNorm(max_norm=training.clip)
    guard = Guard(
        training.model,
        training.optimizer,
        scaler=training.scaler,
        scheduler=training.scheduler,
        config=GuardConfig(clip=clip),
    )
    with contextlib.suppress(TrainingHalted):  # an unrecoverable weight ends the run
        for batch in training.batches:
            training.guarded_step(guard, batch)
        guard.close()  # an open suspicion is reported then
    return guard


@pytest.mark.parametrize("case", GUARDED, ids=lambda case: case.name)
def test_a_guard_finds_the_fault_at_its_step(case: Case) -> None:
    guard = train(case.name)

    fitting = [one.step for one in guard.findings if one.kind in case.guarded]
    assert any(abs(step - case.step) <= case.late for step in fitting)


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_the_incident_names_the_cause(case: Case) -> None:
    guard = train(case.name)

    causes = [one.cause for one in guard.incidents if one.step == case.step and one.cause is not None]
    assert causes
    cause = causes[0]
    assert cause.kind in case.kinds
    assert (cause.phase, cause.module) == (case.phase, case.module)
    assert cause.op in case.ops
    assert cause.line in case.lines or not case.lines


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.name)
def test_a_guard_is_quiet_on_a_control(case: Case) -> None:
    guard = train(case.name)

    assert [one for one in guard.findings if one.severity is not Severity.INFO] == []
