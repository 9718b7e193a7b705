"""Errors that never crash are named, and programs that only look like them are left alone."""

from __future__ import annotations

import gc

import argument_cases  # noqa: F401  (registers its cases)
import axis_cases  # noqa: F401
import cut_cases  # noqa: F401
import group_cases  # noqa: F401
import load_cases  # noqa: F401
import loss_cases  # noqa: F401
import mode_cases  # noqa: F401
import pixel_cases  # noqa: F401
import pytest
import sample_cases  # noqa: F401
import seed_cases  # noqa: F401
import split_cases  # noqa: F401
import stream_cases  # noqa: F401
import target_cases  # noqa: F401
import text_cases  # noqa: F401
import traincheck_cases  # noqa: F401
import unit_cases  # noqa: F401
from program_case import CASES, run

FAULTY = [name for name, one in CASES.items() if one.kind is not None]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", FAULTY)
def test_an_error_is_named_with_its_remedy(name: str) -> None:
    found = run(CASES[name], bug=True)

    named, *more = [finding for finding in found if finding.kind == CASES[name].kind]
    assert not more
    assert named.advice
    assert named.evidence


@pytest.fixture(autouse=True)
def _no_loader_of_another_test() -> None:
    """Loaders that other tests of this process have left are not the training's: frozen objects are not found."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("name", list(CASES))
def test_its_healthy_twin_is_left_alone(name: str) -> None:
    assert run(CASES[name], bug=False) == []
