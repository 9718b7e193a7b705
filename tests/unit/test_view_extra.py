"""Numbers that a program logs besides its loss: read from steps.jsonl, shown by report, plot and watch."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path

import pytest
from rich.console import Console
from view_runs import make_step, open_directory

from steadygrad.errors import UsageError
from steadygrad.view.plot import plot_run
from steadygrad.view.read import step_log
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.charts import describe_charts, summarise_chart
from steadygrad.view.render.parts import render_parts, render_run
from steadygrad.view.watch import draw_screen


def write_run(path: Path, *extras: dict[str, float]) -> RunReader:
    directory = open_directory(path)
    for step, extra in enumerate(extras):
        directory.write_step(dataclasses.replace(make_step(step), extra=extra))
    directory.close()
    return RunReader(path).read_all()


def test_each_number_has_a_curve_at_the_steps_that_logged_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"mse": 2.0, "kl": 0.5}, {}, {"mse": 1.0}, {"mse": math.nan})
    charts = describe_charts(run)
    assert charts["extra"] == {"mse": {"x": [0, 2], "y": [2.0, 1.0]}, "kl": {"x": [0], "y": [0.5]}}
    assert math.isnan(run.steps.last_extra["mse"])
    assert summarise_chart(run, "extra") == "At the end: mse NaN, kl 0.5."


def test_a_run_without_such_numbers_has_an_empty_hidden_chart(tmp_path: Path) -> None:
    run = write_run(tmp_path, {}, {})
    assert describe_charts(run)["extra"] == {}
    assert render_run(run, "run0").count('data-chart="extra"') == 1
    with pytest.raises(UsageError, match="holds no number that the program logged"):
        plot_run(tmp_path, ["extra"], tmp_path / "x.svg")


def test_a_plot_and_the_terminal_show_them(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"mse": 2.0, "$kl$": 1e-4}, {"mse": 1.25, "$kl$": 1e-5})
    assert "<!-- mse -->" in plot_run(tmp_path, ["loss", "extra"], tmp_path / "x.svg").read_text(encoding="utf-8")
    console = Console(file=io.StringIO(), width=160)
    console.print(draw_screen(run, 160, 40))
    assert "mse 1.25" in console.file.getvalue()  # type: ignore[attr-defined]


def test_too_many_names_are_counted_and_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MAX_EXTRA", 3)
    run = write_run(tmp_path, *({f"term{i}": float(i)} for i in range(8)))
    assert list(run.steps.extra) == ["term0", "term1", "term2"]
    assert "5 more numbers of the program are in steps.jsonl, not drawn" in run.notes


def test_values_that_are_not_numbers_and_names_with_html_do_no_harm(tmp_path: Path) -> None:
    write_run(tmp_path, {"<b>x</b>": 1.0})
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 1, "loss": 1.0, "extra": [1, 2]}\n{"step": 2, "loss": 1.0, "extra": {"word": "x"}}\n')
    run = RunReader(tmp_path).read_all()
    assert list(run.steps.extra) == ["<b>x</b>"]
    assert run.steps.num_steps == 3
    assert "<b>x</b>" not in render_run(run, "run0")
    assert render_parts(run)["notes"] is not None
