"""The files of ranks in every view: an incident of one rank is shown with its number, a common incident only once."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from view_runs import make_incident, make_step, open_directory

from steadygrad.facts import Incident
from steadygrad.record.encode import to_json
from steadygrad.record.rank_file import RankFile
from steadygrad.view.read import rank_log
from steadygrad.view.read.incident_log import find_step
from steadygrad.view.read.rank_log import find_rank
from steadygrad.view.read.run import RunReader
from steadygrad.view.render.parts import render_parts
from steadygrad.view.watch import draw_screen

COMMON = make_incident(5, kind="nonfinite_loss", message="the loss is NaN; it began on rank 1")


def own(step: int, message: str = "the batch holds NaN or Inf in 0") -> Incident:
    return make_incident(step, kind="nonfinite_input", message=message)


def write_job(path: Path, *, num_steps: int = 10, late_rank: bool = False) -> Path:
    """Three ranks: all report the common incident, rank 1 alone a bad batch, ranks 0 and 2 another one at one step."""
    run = open_directory(path)
    files = [RankFile(path, rank, 3) for rank in range(3)]
    for step in range(num_steps):
        run.write_step(make_step(step))
        for rank, file in enumerate(files):
            if not (late_rank and rank == 2 and step > 3):
                file.write_own(step, 1.0 + rank)
    for sink in (run, files[1], files[2]):  # rank 0 writes its incidents into the run directory
        sink.write_incident(COMMON)
    files[1].write_incident(own(5))
    run.write_incident(own(7))
    files[2].write_incident(own(7))
    for sink in (run, *files):
        sink.close()
    return path


def list_incidents(run: RunReader) -> list[tuple[int, str, int | None]]:
    shown = [(find_step(one), one["finding"]["kind"], find_rank(one)) for one in run.incidents.shown()]
    return sorted(shown, key=str)


def test_common_incidents_are_shown_once_and_those_of_one_rank_with_its_number(tmp_path: Path) -> None:
    run = RunReader(write_job(tmp_path)).read_all()
    assert list_incidents(run) == [
        (5, "nonfinite_input", 1),
        (5, "nonfinite_loss", None),
        (7, "nonfinite_input", 0),
        (7, "nonfinite_input", 2),
    ]
    assert [(log.rank, log.last_step, log.last_loss, log.num_starts, log.num_own) for log in run.ranks] == [
        (0, 9, 1.0, 1, 0),
        (1, 9, 2.0, 1, 1),
        (2, 9, 3.0, 1, 1),
    ]


def test_a_single_process_run_has_no_ranks_and_no_rank_numbers(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    directory.write_incident(own(3))
    directory.close()
    run = RunReader(tmp_path).read_all()
    assert len(run.ranks) == 0
    assert list_incidents(run) == [(3, "nonfinite_input", None)]
    assert render_parts(run)["ranks"] == ""


def test_an_incident_that_a_rank_writes_before_rank_0_is_not_repeated(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    first, second = RankFile(tmp_path, 0, 2), RankFile(tmp_path, 1, 2)
    second.write_incident(COMMON)
    run = RunReader(tmp_path)
    run.update()
    assert run.incidents.count == 0, "rank 0 may still report it"
    directory.write_incident(COMMON)
    run.update()
    run.update()
    assert list_incidents(run) == [(5, "nonfinite_loss", None)]
    for sink in (directory, first, second):
        sink.close()


def test_a_rank_is_shown_even_if_rank_0_has_gone_silent(tmp_path: Path) -> None:
    directory, file = open_directory(tmp_path), RankFile(tmp_path, 1, 2)
    file.write_incident(COMMON)
    run = RunReader(tmp_path)
    run.update()
    run.update()
    assert list_incidents(run) == [(5, "nonfinite_loss", 1)]
    directory.close()
    file.close()


def test_report_and_terminal_name_the_rank(tmp_path: Path) -> None:
    run = RunReader(write_job(tmp_path, num_steps=300, late_rank=True)).read_all()
    parts = render_parts(run)
    assert '<span class="badge rank">rank 1</span>' in parts["incidents"]
    assert parts["incidents"].count("it began on rank 1") == 1
    assert "3, behind" in parts["ranks"]
    assert "299, behind" not in parts["ranks"]
    console = Console(file=io.StringIO(), width=160)
    console.print(draw_screen(run, 160, 50))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rank 1 nonfinite_input" in text
    assert "rank 2 nonfinite_input" in text


def test_names_of_machines_cannot_inject_html(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    line = {"rank": 1, "num_ranks": 2, "node": "<script>alert(1)</script>", "process": 7, "time": "<b>"}
    (tmp_path / "rank_1.jsonl").write_text(to_json(line) + "\n")
    page = render_parts(RunReader(tmp_path).read_all())["ranks"]
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_truncated_and_foreign_files_do_no_harm(tmp_path: Path) -> None:
    write_job(tmp_path)
    with (tmp_path / "rank_1.jsonl").open("a") as file:
        file.write('[1, 2]\nnonsense\n{"step": 10, "lo')
    (tmp_path / "rank_x.jsonl").write_text(json.dumps({"step": 1}))
    (tmp_path / "rank_9.jsonl").mkdir()
    run = RunReader(tmp_path).read_all()
    assert [(log.rank, log.last_step) for log in run.ranks] == [(0, 9), (1, 9), (2, 9), (9, None)]


def test_of_very_many_ranks_the_first_are_read_and_the_rest_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_log, "MAX_RANKS", 2)
    run = RunReader(write_job(tmp_path)).read_all()
    assert [log.rank for log in run.ranks] == [0, 1]
    assert any("1 files of ranks beyond the first 2 are not read" in note for note in run.notes)


def test_a_rank_file_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    write_job(outside)
    open_directory(inside).close()
    (inside / "rank_1.jsonl").symlink_to(outside / "rank_1.jsonl")
    run = RunReader(inside, within=inside.resolve()).read_all()
    assert [(log.rank, log.last_step) for log in run.ranks] == [(1, None)]
    assert run.incidents.count == 0
