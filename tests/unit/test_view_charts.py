"""The charts of the report: what is drawn where, and the description for readers who cannot see it."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest
from view_page import read_drawn, read_report
from view_runs import make_incident, make_step, open_directory

from steadygrad.facts import Action, GradientTable, Severity

HELP = " Arrow keys move, plus and minus zoom, 0 shows all."
NAN = math.nan


def make_table(norms: dict[str, float]) -> GradientTable:
    cells = [cell for norm in norms.values() for cell in (norm, norm, 0 if math.isfinite(norm) else 1, 0, 0)]
    return GradientTable(tuple(norms), (10,) * len(norms), cells)


def describe_chart(page: Element, chart: str) -> str:
    """Return the description of a chart for readers who cannot see it, without the help on keys."""
    (figure,) = page.findall(f".//figure[@data-chart='{chart}']")
    (plot,) = figure.findall("div[@class='plot']")
    label = plot.get("aria-label", "")
    assert label.endswith(HELP)
    return label.removesuffix(HELP)


def write_run(path: Path) -> Path:
    """Write forty steps with data for every chart; the largest norm is at step 7."""
    directory = open_directory(path)
    for step in range(40):
        record = make_step(
            step,
            loss=4.0 if step < 20 else 2.0,
            grad_norm={7: 60.0, 8: 55.0}.get(step, 0.5),
            skipped=step in (11, 12, 13),
            loss_scale=1024.0,
            extra={"kl": 0.25 * step, "val_kl": 3.0},
        )
        directory.write_step(record)
        if step % 10 == 0:
            ratios = {"a": 1e-3, "b": 1e-3} if step else None  # which are measured only at some steps
            directory.write_layers(step, make_table({"a": 0.1, "b": 0.2}), ratios)
    directory.write_validation(19, 0, 0.9)
    directory.write_validation(39, 1, 0.4)
    directory.close()
    return path


# --- in words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chart", "words"),
    [
        ("loss", "Loss from 4 to 2."),
        ("validation", "At the end: val_loss 0.4."),
        ("metrics", "At the end: val_kl 3."),
        ("extra", "At the end: kl 9.75."),
        ("norm", "Gradient norm, at most 60 at step 7."),
        ("rate", "Learning rate over 40 steps."),
        ("share", "2 steps clipped and 3 skipped of 40."),
        ("scale", "Loss scale over 40 steps."),
        ("layers", "Gradient norms by parameter: 2 parameters at 4 times."),
        ("ratios", "Update-to-weight ratios by parameter: 2 parameters at 3 times."),
    ],
)
def test_a_chart_has_a_description_for_readers_who_cannot_see_it(tmp_path: Path, chart: str, words: str) -> None:
    assert describe_chart(read_report(write_run(tmp_path)), chart) == words


def test_the_description_of_a_run_without_norms_names_none(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"loss": 1.0}\n{"loss": 0.5}\n')
    assert describe_chart(read_report(tmp_path), "norm") == "Gradient norm over 2 steps."


# --- the marks under the loss ---------------------------------------------------------------------------------------


def test_marks_are_in_step_order_including_an_unknown_action(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(8):
        bad = step == 6
        directory.write_step(make_step(step, loss=NAN if bad else 1.0, skipped=bad))
    for step, action in enumerate((Action.HALT, Action.ROLLBACK, Action.SCALE_LR, Action.SANITIZE)):
        directory.write_incident(make_incident(step, action=action))
    directory.close()
    log = tmp_path / "incidents.jsonl"
    log.write_text('{"step": 0, "outcome": {"action": "pray"}}\n' + log.read_text())

    marks = read_drawn(read_report(tmp_path))["marks"]

    assert [(mark["name"], mark["x"], mark["counts"]) for mark in marks] == [
        ("halted", [0], [1]),
        ("pray", [0], [1]),
        ("rolled back", [1], [1]),
        ("learning rate changed", [2], [1]),
        ("sanitised", [3], [1]),
        ("not finite", [6], [1]),
        ("skipped", [6], [1]),
    ]


def test_a_jump_of_the_loss_and_a_changed_rate_are_marked_where_they_happened(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(60):
        rate = 1e-3 * min(1.0, (step + 1) / 10) * (30 if 20 <= step < 25 else 1)
        directory.write_step(make_step(step, learning_rates=(rate,)))
    directory.write_incident(make_incident(21, kind="loss_spike", severity=Severity.WARNING, action=Action.NONE))
    directory.close()
    marks = read_drawn(read_report(tmp_path))["marks"]
    assert [(mark["name"], mark["x"]) for mark in marks] == [("learning rate changed", [20, 25]), ("jumped", [21])]


def test_a_streak_of_skips_has_one_mark_and_a_clip_none(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(4):
        directory.write_step(make_step(step, skipped=step == 2))
    directory.write_incident(make_incident(2, action=Action.SKIP))
    directory.write_incident(make_incident(3, action=Action.CLIP))
    directory.close()
    marks = read_drawn(read_report(tmp_path))["marks"]
    assert [(mark["kind"], mark["x"]) for mark in marks] == [("skip", [2])]


# --- the maps of parameters -----------------------------------------------------------------------------------------


def test_a_nonfinite_cell_is_marked_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    directory.write_step(make_step(0))
    directory.write_layers(0, make_table({"first": 1.0, "second": 0.01}))
    directory.write_layers(10, make_table({"first": NAN, "second": 0.1, "late": 12.3456}))
    directory.close()
    norms = read_drawn(read_report(tmp_path))["norms"]
    assert norms == {
        "x": [0, 10],
        "names": ["first", "second", "late"],
        "z": [[0, None], [-20, -10], [None, 11]],  # tenths
        "width": 1,
        "bad": [[1], [], []],
    }


def test_a_run_without_parameters_has_no_map(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    directory.write_step(make_step(0))
    directory.close()
    drawn = read_drawn(read_report(tmp_path))
    assert (drawn["norms"], drawn["ratios"]) == (None, None)


# --- the curves -----------------------------------------------------------------------------------------------------


def test_curves_have_five_digits_of_each_number_at_its_step(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step, loss in ((3, 1 / 3), (4, 123456.789), (5, NAN), (6, 1e-9)):
        directory.write_step(make_step(step, loss=loss))
    directory.close()
    drawn = read_drawn(read_report(tmp_path))
    assert drawn["curves"]["loss"] == {"x": [3, 4, 6], "y": [0.33333, 123460, 1e-9]}
    assert drawn["last_step"] == 6
    assert "loss_scale" not in drawn["curves"]


def test_the_share_of_clipped_and_skipped_steps_is_computed_for_each_stretch(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    for step in range(16):
        directory.write_step(make_step(step, grad_norm=2.0 if step < 2 else 0.5, skipped=step >= 12))
    directory.close()
    shares = read_drawn(read_report(tmp_path))["shares"]
    assert shares == {"clipped": {"x": [4, 12], "y": [0.25, 0]}, "skipped": {"x": [4, 12], "y": [0, 0.5]}}
