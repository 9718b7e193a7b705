"""The exceptions keep message and attributes when sent between processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadygrad import errors
from steadygrad.facts import Action, Finding, Incident, Outcome, Severity, Verdict

INCIDENT = Incident(
    step=7,
    finding=Finding(kind="nonfinite_loss", severity=Severity.ERROR, step=7, message="the loss is nan"),
    verdict=Verdict(action=Action.HALT, reason="asked for"),
    outcome=Outcome(action=Action.HALT, message="halted"),
)
MADE: dict[str, errors.SteadygradError] = {
    type(error).__name__: error
    for error in (
        errors.SteadygradError("root"),
        errors.ConfigError.about("Policy", "cooldown", " must be above 0, got -1. Use 10.", rule="be above 0"),
        errors.UsageError("the guard is closed"),
        errors.UnsupportedError("complex parameters"),
        errors.TrainingHalted("halted", (INCIDENT,)),
        errors.NonFiniteError("the loss is nan", (INCIDENT,)),
        errors.CheckpointError("cannot be written"),
        errors.DamagedCheckpoint(Path("run/step_7"), "a file is missing"),
        errors.NoCheckpoint(Path("run"), "it is empty"),
        errors.NonFiniteStateError("the state before step 7", {"layer.weight": 3}),
        errors.UnsafePickleError(Path("model.pt"), ["os.system"]),
        errors.MismatchError("of another model"),
    )
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {n}": lambda error, n=n: pickle.loads(pickle.dumps(error, n)) for n in range(6)},
}


def find_classes(root: type) -> list[type]:
    return [root, *(found for one in root.__subclasses__() for found in find_classes(one))]


def test_every_exception_class_is_tested_here() -> None:
    public = [one for one in find_classes(errors.SteadygradError) if one.__module__.startswith("steadygrad.")]
    assert {one.__name__ for one in public} == set(MADE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_an_exception_survives_pickle_and_copy_with_its_message_and_attributes(name: str, way: str) -> None:
    error = MADE[name]

    again = WAYS[way](error)

    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
