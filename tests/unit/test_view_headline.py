"""The verdict in a sentence, and the numbers next to it, tested at the exact step at which they change."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
from view_page import read_pairs, read_report, read_text
from view_runs import CAUSE, make_incident, make_step, open_directory

from steadygrad.facts import Action, Cause, Incident, Severity

NAN = math.nan
SPIKE = make_incident(1, kind="loss_spike", severity=Severity.WARNING, action=Action.NONE)


def judge(page: Element) -> tuple[str, str]:
    """Return the tone and the sentence at the top of a run's page."""
    line, _ = page.findall(".//div[@data-part='headline']/p")
    return (line.get("class") or "").removeprefix("headline "), read_text(line)


def report(path: Path, losses: Sequence[float | None], *incidents: Incident, num_skipped: int = 0) -> Element:
    """Write the report of a run with these losses, the first steps of which were skipped."""
    directory = open_directory(path)
    for step, loss in enumerate(losses):
        directory.write_step(make_step(step, loss=loss, grad_norm=0.5, skipped=step < num_skipped))
    for incident in incidents:
        directory.write_incident(incident)
    directory.close()
    return read_report(path)


# --- the word -------------------------------------------------------------------------------------------------------


def test_a_run_without_steps_is_empty(tmp_path: Path) -> None:
    assert judge(report(tmp_path, [])) == ("empty", "Empty. No step has been written yet.")


def test_an_info_leaves_a_run_healthy(tmp_path: Path) -> None:
    noted = dataclasses.replace(SPIKE, finding=dataclasses.replace(SPIKE.finding, severity=Severity.INFO))
    assert judge(report(tmp_path, [1.0], noted)) == ("good", "Healthy. 1 step, none skipped, no warnings.")


def test_a_run_with_one_warning_has_survived(tmp_path: Path) -> None:
    assert judge(report(tmp_path, [2.0, 1.0], SPIKE)) == (
        "warning",
        "Survived. No step of 2 skipped, 1 incident. The loss fell from 2 to 1.",
    )


def test_incidents_without_a_step_are_counted(tmp_path: Path) -> None:
    assert judge(report(tmp_path, [], SPIKE)) == ("warning", "Survived. No step was written, 1 incident.")


def test_unskipped_nonfinite_losses_are_unwell(tmp_path: Path) -> None:
    assert judge(report(tmp_path, [2.0, NAN, 1.0])) == (
        "warning",
        "Unwell. 1 step of 3 not finite, none skipped. The loss fell from 2 to 1.",
    )


@pytest.mark.parametrize(("num_skipped", "word"), [(5, "Survived."), (6, "Unwell.")])
def test_a_run_with_more_than_a_twentieth_skipped_is_unwell(tmp_path: Path, num_skipped: int, word: str) -> None:
    tone, text = judge(report(tmp_path, [2.0] * 100, num_skipped=num_skipped))
    assert text.split()[0] == word
    assert tone == {"Survived.": "warning", "Unwell.": "bad"}[word]
    assert f"{num_skipped} steps of 100 skipped, no incident. The loss stayed at 2." in text


@pytest.mark.parametrize(
    ("first", "last", "num", "word"),
    [
        (2.0, 2.19, 20, "Survived."),
        (2.0, 2.21, 20, "Unwell."),
        (2.0, 2.21, 19, "Survived."),
        (-2.0, -1.81, 20, "Survived."),
        (-2.0, -1.79, 20, "Unwell."),
    ],
)
def test_a_loss_that_rose_by_a_tenth_over_twenty_steps_is_unwell(
    tmp_path: Path, first: float, last: float, num: int, word: str
) -> None:
    _, text = judge(report(tmp_path, [first] * (num // 2) + [last] * (num - num // 2), SPIKE))
    assert text.split()[0] == word
    assert f"The loss rose from {first:g} to {last:g}." in text


@pytest.mark.parametrize(("num_bad", "word"), [(9, "Unwell."), (10, "Lost.")])
def test_a_run_with_ten_nonfinite_losses_in_a_row_is_lost(tmp_path: Path, num_bad: int, word: str) -> None:
    _, text = judge(report(tmp_path, [1.0] * 30 + [NAN] * num_bad))
    assert text.split()[0] == word
    assert ("since step 30: it began at 1, and was 1 at step 29" in text) is (word == "Lost.")


def test_a_run_without_any_finite_loss_says_so(tmp_path: Path) -> None:
    assert judge(report(tmp_path, [NAN] * 10)) == ("bad", "Lost. The loss has not been finite at any step.")


def test_a_halted_run_says_where_and_why(tmp_path: Path) -> None:
    halt = make_incident(9, action=Action.HALT, message="three rollbacks", cause=CAUSE)
    assert judge(report(tmp_path, [1.0], halt)) == (
        "bad",
        "Halted. Ended by the policy at step 9: three rollbacks. "
        "First cause, step 9: NaN gradient, born in the backward of aten.sqrt at model.py:41.",
    )


def test_a_halt_without_a_message_is_attributed_to_the_policy(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    (tmp_path / "incidents.jsonl").write_text(json.dumps({"step": 4, "outcome": {"action": "halt"}}) + "\n")
    assert judge(read_report(tmp_path)) == ("bad", "Halted. Ended by the policy at step 4: no reason was recorded.")


@pytest.mark.parametrize(("num", "expected"), [(1, ", 1 rollback, 1 incident."), (2, ", 2 rollbacks, 2 incidents.")])
def test_rollbacks_are_counted(tmp_path: Path, num: int, expected: str) -> None:
    backs = [make_incident(step, action=Action.ROLLBACK) for step in range(num)]
    assert f"No step of 1 skipped{expected}" in judge(report(tmp_path, [1.0], *backs))[1]


# --- its cause ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ({"kind": "nan", "symptom": "NaN loss"}, "NaN loss."),
        ({"kind": "inf"}, "inf."),
        ({"kind": "inf", "op": "aten.exp"}, "inf, born in aten.exp."),
        ({"kind": "inf", "file": "C:\\me\\model.py", "line": 7}, "inf at model.py:7."),
    ],
)
def test_the_first_cause_is_described_as_far_as_known(tmp_path: Path, cause: dict[str, Any], expected: str) -> None:
    found = make_incident(6, cause=Cause(phase="forward", **cause))
    later = make_incident(7, cause=CAUSE)
    _, text = judge(report(tmp_path, [1.0], SPIKE, found, later))
    assert text.endswith(f"3 incidents. First cause, step 6: {expected}")


def test_a_nonfinite_input_is_not_attributed_to_an_operation(tmp_path: Path) -> None:
    cause = Cause(kind="nan", phase="input", op="input", name="features", symptom="NaN loss", file="train.py", line=9)
    _, text = judge(report(tmp_path, [1.0], make_incident(6, cause=cause)))
    assert text.endswith("First cause, step 6: NaN loss, already in the input features at train.py:9.")


# --- first and last loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0], ""),
        ([3.0, 1.0], "The loss fell from 3 to 1."),
        ([9.0, 1.0, 2.0, *[0.0] * 24, 5.0, 7.0, 6.0], "The loss fell from 9 to 6."),
        ([8.0] + [1.0] * 1900 + [4.0], "The loss fell from 8 to 4."),
        ([None, 8.0, 1.0, None], "The loss fell from 8 to 1."),
    ],
    ids=["one step", "two steps", "thirty", "many", "some without a loss"],
)
def test_first_and_last_loss_are_the_recorded_ones(tmp_path: Path, losses: list[float | None], expected: str) -> None:
    assert judge(report(tmp_path, losses))[1].partition("no warnings.")[2].strip() == expected


# --- the tiles ------------------------------------------------------------------------------------------------------


def test_the_tiles_have_the_numbers_of_the_run_to_three_digits(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(2000):
        loss = 0.25432 if step == 1500 else 4.1234 if step < 1000 else 1.2345
        norm = 8.7654 if step == 1200 else 2.0 if step < 499 else 0.5
        directory.write_step(make_step(step, loss=loss, grad_norm=norm, skipped=step >= 1996))
    for step, loss in ((499, 0.9), (1499, 0.34321), (1999, 0.54321)):
        directory.write_validation(step, 0, loss)
    directory.write_incident(SPIKE)
    directory.close()
    assert read_pairs(read_report(tmp_path), ".//div[@data-part='tiles']/dl") == [
        ("steps", "2,000"),
        ("loss", "4.12 → 1.23"),
        ("best loss", "0.254 at 1,500"),
        ("validation loss", "0.543"),
        ("best validation", "0.343 at 1,499"),
        ("largest norm", "8.77 at 1,200"),
        ("skipped", "4 (0.2 %)"),
        ("clipped", "25.1 %"),  # 500 of the 1,996 applied steps
        ("incidents", "1"),
        ("time", "8 min, 4/s"),
    ]


def test_a_run_without_steps_has_few_tiles(tmp_path: Path) -> None:
    assert read_pairs(report(tmp_path, []), ".//div[@data-part='tiles']/dl") == [
        ("steps", "0"),
        ("skipped", "0 (0 %)"),
        ("clipped", "0 %"),
        ("incidents", "0"),
    ]
