"""Plots: each panel is drawn in each format, from a run or a bare log, and errors say what to write instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from view_runs import add_update_ratios, make_step, open_directory, write_run

from steadygrad import UsageError
from steadygrad.cli import main
from steadygrad.view.plot import PANELS, choose_panels, plot_run

pytest.importorskip("matplotlib", reason="plots need matplotlib: pip install 'steadygrad[view]'")
BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.mark.parametrize("kind", BEGINNINGS)
def test_the_file_extension_decides_the_format(tmp_path: Path, kind: str) -> None:
    write_run(tmp_path / "run", 60)
    target = plot_run(tmp_path / "run", ["loss"], tmp_path / f"x.{kind}")
    assert target.read_bytes().startswith(BEGINNINGS[kind])


def test_every_panel_is_drawn(tmp_path: Path) -> None:
    add_update_ratios(write_run(tmp_path / "run", 450))
    with (tmp_path / "run" / "steps.jsonl").open("a") as steps:
        steps.write(json.dumps({"step": 450, "loss": 1.0, "grad_norm": 1.0, "extra": {"a term": 0.5}}) + "\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 100, "val_loss": 3.0, "val_accuracy": 0.5}\n')
    target = plot_run(tmp_path / "run", list(PANELS), tmp_path / "all.svg")
    text = target.read_text()
    for label in (
        "<!-- loss -->",
        "<!-- gradient norm -->",
        "<!-- learning rate -->",
        "<!-- blocks.0.mlp.weight -->",
        "<!-- a term -->",
        "<!-- validation loss -->",
        "<!-- val_accuracy -->",
    ):
        assert label in text
    assert "<!-- rolled back -->" in text


def test_a_bare_log_is_plotted_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "training_log.jsonl"
    log.write_text("".join(json.dumps({"epoch": i, "loss": 1 / (i + 1)}) + "\n" for i in range(20)))
    assert main(["plot", str(log), "-o", str(tmp_path / "x.png")]) == 0
    assert "Written" in capsys.readouterr().out
    assert (tmp_path / "x.png").read_bytes().startswith(BEGINNINGS["png"])


def test_the_default_panels_are_those_with_data(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20)
    log = tmp_path / "log.jsonl"
    log.write_text('{"loss": 1.0}\n')
    assert choose_panels([tmp_path / "run"]) == ["loss", "norm"]
    assert choose_panels([log]) == ["loss"]
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 10, "val_loss": 3.0}\n')
    assert choose_panels([tmp_path / "run"]) == ["loss", "validation", "norm"]


def test_a_rate_jump_does_not_flatten_the_rest(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "run")
    for step in range(30):
        directory.write_step(make_step(step, learning_rates=(0.9 if step == 20 else 3e-3,)))
    directory.close()
    picture = plot_run(tmp_path / "run", ["rate"], tmp_path / "x.svg").read_text()
    assert "10^{-2}" in picture  # a tick of a logarithmic axis


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 20)
    with pytest.raises(UsageError, match=r"cannot write .*nowhere.*No such file or directory"):
        plot_run(tmp_path / "run", ["loss"], tmp_path / "nowhere" / "x.png")


def test_a_name_with_dollar_signs_is_not_parsed_as_math(tmp_path: Path) -> None:
    write_run(tmp_path / "a$\\frac$b", 20, names=["$x_{$", "w"])
    plot_run(tmp_path / "a$\\frac$b", ["loss", "layers"], tmp_path / "x.png")


@pytest.mark.parametrize(
    ("what", "target", "message"),
    [
        (["loss", "moon"], "x.png", "no plot called moon"),
        (["loss"], "x.bmp", r"\.png, \.svg, \.pdf"),
        (["ratios"], "x.png", "holds no update ratios"),
        ([], "x.png", "Use: loss,validation,metrics,norm"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_reported(tmp_path: Path, what: list[str], target: str, message: str) -> None:
    write_run(tmp_path / "run", 20)
    with pytest.raises(UsageError, match=message):
        plot_run(tmp_path / "run", what, tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_several_runs_are_drawn_into_the_same_panels(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_run(tmp_path / "runs" / name, 60)
    target = tmp_path / "compared.svg"
    assert main(["plot", str(tmp_path / "runs" / "a"), str(tmp_path / "runs" / "b"), "-o", str(target)]) == 0
    assert main(["plot", str(tmp_path / "runs"), "--what", "loss,rate", "-o", str(tmp_path / "all.png")]) == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(tmp_path / "runs"), "--what", "layers", "-o", str(tmp_path / "no.png")]) == 2
