"""Every case of the zoo in `diagnose`: kind, phase, op, module and line are correct, and controls raise no alarm."""

from __future__ import annotations

import pytest
import torch
import zoo_backward  # noqa: F401  (registers its cases)
import zoo_finite  # noqa: F401
import zoo_forward  # noqa: F401
import zoo_own  # noqa: F401
from zoo_case import CASES, Case

from steadygrad.diagnose import diagnose

BROKEN = [case for case in CASES.values() if case.kinds]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch itself warns about some of these
CONTROLS = [case for case in CASES.values() if case.is_healthy]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_the_cause_is_named(case: Case) -> None:
    training = case.build()
    for batch in training.batches[: case.step]:
        training.step(batch)

    cause = diagnose(training.loss, training.model, training.batches[case.step], model=training.model)

    assert cause is not None
    assert cause.kind in case.kinds
    assert cause.phase == case.phase
    assert cause.op in case.ops or not case.ops
    assert cause.module == case.module
    assert cause.line in case.lines or not case.lines
    assert cause.explanation


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.name)
def test_a_control_raises_no_alarm(case: Case) -> None:
    training = case.build()
    for batch in training.batches[:4]:
        assert diagnose(training.loss, training.model, batch, model=training.model) is None
        assert torch.isfinite(training.step(batch))
