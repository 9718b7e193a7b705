"""The report's facts about a run: its settings, machine, ranks and starts; and how several runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import pytest
from view_page import list_texts, read_pairs, read_report, read_table, read_text
from view_runs import make_incident, make_step, open_directory

from steadygrad.record.rank_file import RankFile


def find_about(page: Element) -> Element:
    (part,) = page.findall(".//div[@data-part='about']")
    return part


def read_about(path: Path, about: dict[str, Any]) -> Element:
    """Return what the report shows of a run.json."""
    (path / "run.json").write_text(json.dumps(about))
    return find_about(read_report(path))


def write_run(path: Path, config: dict[str, Any], *, num_skipped: int = 0) -> Path:
    directory = open_directory(path, config=config)
    for step in range(10):
        directory.write_step(make_step(step, skipped=step < num_skipped, loss=2.0))
    directory.close()
    return path


# --- one run --------------------------------------------------------------------------------------------------------


def test_settings_machine_versions_and_parameters_are_present_and_folded(tmp_path: Path) -> None:
    directory = open_directory(tmp_path, names=["a.weight", "a.bias"], config={"clip": {"max_norm": 0.5}, "ema": None})
    directory.close()
    folds = find_about(read_report(tmp_path)).findall("details")
    assert [read_text(one.find("summary")) for one in folds] == [
        "Configuration",
        "Machine",
        "Versions",
        "2 parameters",
    ]
    assert read_pairs(folds[0], "div/dl") == [("clip.max_norm", "0.5"), ("ema", "-")]
    assert ("torch", "2.13.0") in read_pairs(folds[2], "div/dl")
    assert list_texts(folds[3], "div/p/code") == ["a.weight", "a.bias"]
    assert all(one.get("open") is None for one in folds)


@pytest.mark.parametrize(("num", "more"), [(400, []), (401, ["and 1 more"]), (1600, ["and 1200 more"])])
def test_of_very_many_parameters_the_first_are_listed_and_the_rest_counted(
    tmp_path: Path, num: int, more: list[str]
) -> None:
    (fold,) = read_about(tmp_path, {"parameters": [f"w{i}" for i in range(num)]}).findall("details")
    names = read_text(fold.find("div/p")).split(" and ")
    assert read_text(fold.find("summary")) == f"{num} parameters"
    assert names[0].split() == [f"w{i}" for i in range(400)]
    assert [f"and {rest}" for rest in names[1:]] == more


@pytest.mark.parametrize(
    ("about", "shown"),
    [
        ({"config": {"seed": 1}}, "Configuration seed 1"),
        ({"started": "2025-01-01"}, "Started 2025-01-01"),
        ({"config": {}, "parameters": [], "machine": None, "more": 1}, "run.json does not describe the run."),
        ({"config": "odd", "parameters": "odd"}, "run.json does not describe the run."),
    ],
)
def test_facts_missing_in_run_json_have_no_place(tmp_path: Path, about: dict[str, Any], shown: str) -> None:
    assert read_text(read_about(tmp_path, about)) == shown


@pytest.mark.parametrize(
    ("processes", "counted"),
    [
        ([1], ""),
        ([1, 2], ", resumed once"),
        ([1, 2, 2, 3], ", resumed 2 times"),
        ([1, 1, 1], ""),
        ([None, None], ", resumed once"),
    ],
    ids=["once started", "resumed", "resumed twice, in stages", "in stages", "by an older version"],
)
def test_the_starts_of_a_run_are_counted_but_not_stages_of_one_process(
    tmp_path: Path, processes: list[int | None], counted: str
) -> None:
    first, *later = ({} if process is None else {"process": process} for process in processes)
    about = read_about(tmp_path, {"started": "noon", **first, "resumed": later})
    assert read_text(about.find("p")) == f"Started noon{counted}"


# --- its ranks ------------------------------------------------------------------------------------------------------


def test_the_table_of_ranks_shows_where_each_runs_and_what_it_has_seen(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    for rank, loss in ((0, 1.5), (1, None)):
        lines: list[dict[str, Any]] = [{"node": f"node{rank}", "process": 40 + rank, "time": "noon"}] * (1 + rank)
        lines += [{"step": 1200, "loss": loss, "time": f"noon + {rank}"}]
        (tmp_path / f"rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rank_2.jsonl").write_text("")
    assert read_table(read_report(tmp_path), "rank") == [
        ["rank 0", "node0", "40", "1", "1,200", "1.5", "noon + 0", "0"],
        ["rank 1", "node1", "41", "2", "1,200", "-", "noon + 1", "0"],
        ["rank 2", "-", "-", "0", "-, behind", "-", "-", "0"],
    ]


@pytest.mark.parametrize(("last", "shown"), [(299, "299"), (200, "200"), (199, "199, behind"), (0, "0, behind")])
def test_a_rank_without_progress_for_a_hundred_steps_is_marked(tmp_path: Path, last: int, shown: str) -> None:
    open_directory(tmp_path).close()
    for rank, step in ((0, 299), (1, last)):
        file = RankFile(tmp_path, rank, 2)
        file.write_own(step, 1.0)
        file.close()
    page = read_report(tmp_path)
    assert [row[4] for row in read_table(page, "rank")] == ["299", shown]
    assert list_texts(page, ".//span[@class='badge warning']") == ([shown] if "behind" in shown else [])


@pytest.mark.parametrize(("newest", "shown"), [(99, "-"), (100, "-, behind")])
def test_a_rank_without_any_step_is_behind_once_the_others_have_advanced(
    tmp_path: Path, newest: int, shown: str
) -> None:
    open_directory(tmp_path).close()
    files = [RankFile(tmp_path, rank, 2) for rank in range(2)]
    files[0].write_own(newest, 1.0)
    for file in files:
        file.close()
    assert [row[4] for row in read_table(read_report(tmp_path), "rank")] == [str(newest), shown]


def test_ranks_that_have_just_started_are_not_behind(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    for rank in range(2):
        RankFile(tmp_path, rank, 2).close()
    assert [row[4] for row in read_table(read_report(tmp_path), "rank")] == ["-", "-"]


# --- several runs ---------------------------------------------------------------------------------------------------


def test_runs_are_compared_by_their_verdicts_and_numbers(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", {"seed": 1})
    bad = write_run(tmp_path / "bad", {"seed": 1}, num_skipped=4)
    empty = open_directory(tmp_path / "empty", config={"seed": 1})
    empty.write_incident(make_incident(3))
    empty.close()

    page = read_report(good, bad, tmp_path / "empty")

    rows = read_table(page, "run")
    assert [row[:5] for row in rows] == [
        ["good", "Healthy", "finished", "10", "2 → 2"],
        ["bad", "Unwell", "finished", "10", "2 → 2"],
        ["empty", "Survived", "finished", "0", "-"],
    ]
    (header,) = (one for one in page.iter("thead") if read_text(one).startswith("run verdict"))
    assert len(header.findall("tr/th")) == len(rows[0]) == len(rows[2])
    assert [(one.get("class"), one.text) for one in page.findall(".//tbody/tr/td[1]/span")][:3] == [
        ("badge good", "Healthy"),
        ("badge bad", "Unwell"),
        ("badge warning", "Survived"),
    ]


def test_runs_with_the_same_settings_are_reported_as_such(tmp_path: Path) -> None:
    page = read_report(*(write_run(tmp_path / name, {"clip": {"max_norm": 1.0}}) for name in "ab"))
    assert "The settings of their guards are the same." in list_texts(page, ".//p[@class='note']")


def test_a_run_without_settings_differs_in_none(tmp_path: Path) -> None:
    page = read_report(write_run(tmp_path / "a", {"seed": 1}), write_run(tmp_path / "b", {}))
    assert "setting" not in read_text(page.find(".//section"))


@pytest.mark.parametrize("num", [2, 12, 13])
def test_differing_settings_are_visible_unless_there_are_many(tmp_path: Path, num: int) -> None:
    runs = [write_run(tmp_path / f"run{i}", {"same": 0, **{f"s{n}": i for n in range(num)}}) for i in range(3)]
    page = read_report(*runs)
    assert read_table(page, "setting that differs") == [[f"s{n}", "0", "1", "2"] for n in range(num)]
    closed = [read_text(one.find("summary")) for one in page.findall(".//main/section//details")]
    assert closed == ([] if num <= 12 else [f"{num} settings that differ"])
