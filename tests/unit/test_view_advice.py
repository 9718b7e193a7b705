"""Advice from a run whose learning rate jumped: changes that a rollback undid are ignored."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from view_runs import make_incident, make_step, open_directory

from steadygrad.facts import Action, Incident, Outcome
from steadygrad.record.tally import Tally
from steadygrad.view.advice import see_run, see_tally
from steadygrad.view.read.run import open_run


def act(step: int, action: Action, before: dict[str, float], after: dict[str, float]) -> Incident:
    outcome = Outcome(action=action, message="", before=before, after=after)
    return dataclasses.replace(make_incident(step, kind=action.value, action=action), outcome=outcome)


BACK = act(144, Action.ROLLBACK, {"step": 145}, {"step": 96})


@pytest.mark.parametrize(("step", "lowered"), [(121, None), (96, None), (90, 0.09), (150, 0.09)])
def test_a_lowered_rate_that_a_rollback_undid_is_not_advised(tmp_path: Path, step: int, lowered: float | None) -> None:
    incidents = [act(step, Action.SCALE_LR, {"lr": 0.9}, {"lr": 0.09}), BACK]
    directory = open_directory(tmp_path)
    for number in range(200):
        directory.write_step(make_step(number, learning_rates=(0.9 if number == 120 else 3e-3,)))
    for incident in incidents:
        directory.write_incident(incident)
    directory.close()

    expected = None if lowered is None else pytest.approx(lowered)
    assert see_run(open_run(tmp_path).read_all()).lowered == expected
    assert see_tally(Tally(), incidents, max_norm=1.0).lowered == expected
