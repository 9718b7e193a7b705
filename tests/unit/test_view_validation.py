"""Evaluations: read from the files of trainer and guard, drawn by report and plot, shown in the tiles."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from view_runs import HOSTILE, make_step, open_directory

from steadygrad.errors import UsageError
from steadygrad.view.headline import list_numbers
from steadygrad.view.plot import plot_run
from steadygrad.view.read import validation_log
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.charts import CHARTS, describe_charts, summarise_chart
from steadygrad.view.render.report import render_report


def write_steps(path: Path, *, given: dict[int, float] | None = None, extra: dict[str, float] | None = None) -> Path:
    """Write a run of 40 steps whose guard got a validation loss at some of them."""
    directory = open_directory(path)
    for step in range(40):
        directory.write_step(dataclasses.replace(make_step(step), extra=extra or {}))
        if given and step in given:
            directory.write_validation(step, 0, given[step])
    directory.close()
    return path


def write_metrics(path: Path, *lines: dict[str, Any]) -> Path:
    with (path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def draw(path: Path) -> dict[str, Any]:
    return describe_charts(RunReader(path).read_all())


def test_the_losses_and_the_other_numbers_of_an_evaluation_have_separate_charts(tmp_path: Path) -> None:
    lines = ({"step": s, "epoch": 0, "stage": "a", "val_loss": 8.0 / s, "val_r2": s / 40} for s in (10, 20, 40))
    charts = draw(write_metrics(write_steps(tmp_path), *lines))
    assert charts["validation"] == {"val_loss": {"x": [10, 20, 40], "y": [0.8, 0.4, 0.2]}}
    assert charts["metrics"] == {"val_r2": {"x": [10, 20, 40], "y": [0.25, 0.5, 1.0]}}


def test_the_guards_validation_losses_are_drawn_if_the_trainer_wrote_none(tmp_path: Path) -> None:
    given = {9: 0.9, 19: 0.4, 29: 0.5}
    assert draw(write_steps(tmp_path / "guard", given=given))["validation"] == {
        "val_loss": {"x": [9, 19, 29], "y": [0.9, 0.4, 0.5]}
    }
    both = write_metrics(write_steps(tmp_path / "both", given=given), {"step": 10, "val_loss": 0.9})
    assert draw(both)["validation"] == {"val_loss": {"x": [10], "y": [0.9]}}


def test_the_report_has_the_curve_and_its_last_value(tmp_path: Path) -> None:
    run = RunReader(write_steps(tmp_path, given={9: 0.9, 19: 0.4, 29: 0.5})).read_all()
    page = render_report([run])
    assert 'data-chart="validation"' in page
    assert '"validation":{"val_loss":{"x":[9,19,29],"y":[0.9,0.4,0.5]}}' in page
    assert summarise_chart(run, "validation") == "At the end: val_loss 0.5."
    numbers = list_numbers(run)
    assert (numbers["validation loss"], numbers["best validation"]) == ("0.5", "0.4 at 19")


def test_values_logged_as_validation_are_drawn_as_such(tmp_path: Path) -> None:
    charts = draw(write_steps(tmp_path, extra={"val_loss": 0.5, "val_accuracy": 0.75, "kl": 0.1}))
    assert list(charts["validation"]) == ["val_loss"]
    assert list(charts["metrics"]) == ["val_accuracy"]
    assert list(charts["extra"]) == ["kl"]


def test_the_later_of_two_lines_for_one_step_counts(tmp_path: Path) -> None:
    lines = ({"step": 10, "val_loss": 3.0}, {"step": 20, "val_loss": 9.0}, {"step": 20, "val_loss": 2.0})
    assert draw(write_metrics(write_steps(tmp_path), *lines))["validation"]["val_loss"]["y"] == [3.0, 2.0]


def test_a_run_without_evaluations_has_empty_charts_and_no_note(tmp_path: Path) -> None:
    run = RunReader(write_steps(tmp_path)).read_all()
    charts = describe_charts(run)
    assert charts["validation"] == charts["metrics"] == {}
    assert not [note for note in run.notes if "metrics" in note or "validations" in note]
    assert "validation loss" not in list_numbers(run)
    with pytest.raises(UsageError, match="holds no validation loss"):
        plot_run(tmp_path, ["validation"], tmp_path / "x.svg")


def test_corrupt_lines_odd_values_and_html_do_no_harm(tmp_path: Path) -> None:
    write_metrics(
        write_steps(tmp_path),
        {"step": -1, "val_loss": 1.0},
        {"step": "x", "val_loss": 1.0},
        {"step": 5, "val_loss": math.nan, "word": "x", "list": [1]},
        {"step": 6, HOSTILE: 1.0},
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "val_lo')
    run = RunReader(tmp_path).read_all()
    assert describe_charts(run)["validation"] == {}
    assert list(describe_charts(run)["metrics"]) == [HOSTILE]
    assert "<img" not in render_report([run])
    assert "1 line of metrics.jsonl truncated or corrupt, left out" in run.notes


def test_of_many_evaluations_few_points_are_kept_including_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation_log, "MAX_POINTS", 10)
    monkeypatch.setattr(validation_log, "MAX_METRICS", 1)
    lines = ({"step": step, "val_loss": float(step), "val_more": 1.0} for step in range(101))
    run = RunReader(write_metrics(write_steps(tmp_path), *lines)).read_all()
    steps, values = run.validation.losses["val_loss"]
    assert len(steps) <= 10
    assert (steps[0], steps[-1], values[-1]) == (0, 100, 100.0)
    assert any("not drawn" in note for note in run.notes)


def test_new_evaluations_of_a_growing_run_are_read(tmp_path: Path) -> None:
    run = RunReader(write_steps(tmp_path, given={9: 0.9}))
    run.update()
    assert run.validation.losses["val_loss"] == ([9], [0.9])
    directory = open_directory(tmp_path)
    directory.write_validation(39, 1, 0.3)
    directory.close()
    assert run.update()
    assert run.validation.losses["val_loss"] == ([9, 39], [0.9, 0.3])


def test_every_chart_has_a_description(tmp_path: Path) -> None:
    run = RunReader(write_metrics(write_steps(tmp_path), {"step": 3, "val_loss": 1.0, "val_f1": 0.5})).read_all()
    assert all(summarise_chart(run, chart).endswith(".") for chart in CHARTS)
    assert "<!-- val_f1 -->" in plot_run(tmp_path, ["validation", "metrics"], tmp_path / "x.svg").read_text()
