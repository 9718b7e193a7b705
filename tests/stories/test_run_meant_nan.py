"""`steadygrad run` leaves NaN and Inf that a script has taken care of to that script, and to no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import run_guarded, run_plainly
from scripts.cleaned import BATCH_OF_NAN, NUM_STEPS

BAD_STEPS = list(range(BATCH_OF_NAN, NUM_STEPS, 20))


def list_skipped(folder: Path) -> list[int]:
    lines = (folder / "run" / "steps.jsonl").read_text().splitlines()
    return [step["step"] for step in map(json.loads, lines) if step.get("skipped")]


@pytest.mark.parametrize("way", ["in place", "anew", "microbatches", "after a clip"])
def test_a_script_that_cleans_its_gradients_takes_the_step(way: str, tmp_path: Path) -> None:
    plain = run_plainly(tmp_path / "plain", "cleaned.py", way)
    guarded = run_guarded(tmp_path / "guarded", "cleaned.py", way)

    assert (plain.code, guarded.code) == (0, 0), guarded.err
    assert guarded.out == plain.out
    assert list_skipped(tmp_path / "guarded") == []
    assert "no incident" in guarded.err


@pytest.mark.parametrize("way", ["finite gradients", "finite gradients, divided", "finite gradients, clipped", "left"])
def test_a_bad_loss_whose_gradients_nobody_cleaned_is_skipped(way: str, tmp_path: Path) -> None:
    guarded = run_guarded(tmp_path, "cleaned.py", way)

    assert guarded.code == 0, guarded.err
    assert list_skipped(tmp_path) == BAD_STEPS


def test_a_weight_that_the_script_made_infinite_is_not_reported(tmp_path: Path) -> None:
    plain = run_plainly(tmp_path / "plain", "pruned_choice.py")
    guarded = run_guarded(tmp_path / "guarded", "pruned_choice.py")

    assert (plain.code, guarded.code) == (0, 0), guarded.err
    assert guarded.out == plain.out
    assert "no incident" in guarded.err
