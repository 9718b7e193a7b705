"""`steadygrad bench`: what it finds, runs, keeps and refuses. The programs are small ones, written here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadygrad.cli import main

PROGRAM = '''"""{about}

More words.
"""
import json, os, pathlib, sys

quick = "--quick" in sys.argv
print("table of {name}", "small" if quick else "whole")
pathlib.Path(os.environ["OUT"], "{name}.json").write_text(json.dumps({{"results": {{"quick": quick}}}}))
sys.exit({code})
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make two programs that work, one in a subfolder, and one that fails after writing its results."""
    root = tmp_path / "benchmarks"
    (root / "results").mkdir(parents=True)
    (root / "peers").mkdir()
    (root / "machine.py").write_text('"""No program."""\n')
    write(root / "first.py", "first", "What is first?")
    write(root / "peers" / "compare.py", "peers", "What others do.")
    write(root / "broken.py", "broken", "What breaks?", code=3)
    return root


def write(path: Path, name: str, about: str, code: int = 0) -> None:
    path.write_text(PROGRAM.format(name=name, about=about, code=code))


def bench(folder: Path, *arguments: str) -> int:
    return main(["bench", "--folder", str(folder), *arguments])


def test_the_list_says_what_each_measures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [
        ["broken", "What breaks?"],
        ["first", "What is first?"],
        ["peers", "What others do."],
    ]


def test_a_full_run_adds_its_results_to_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "first") == 0
    kept = json.loads((folder / "results" / "first.json").read_text())
    assert kept["results"] == {"quick": False}
    out = capsys.readouterr().out
    assert "table of first whole" in out
    *_, row, _total, hint = out.splitlines()
    assert row.split()[0] == "first"
    assert "benchmarks/publish.py" in hint


def test_results_of_every_program_are_kept_in_an_empty_folder(folder: Path) -> None:
    (folder / "results").rmdir()
    assert bench(folder, "first", "peers") == 0
    assert sorted(path.name for path in (folder / "results").iterdir()) == ["first.json", "peers.json"]


def test_a_quick_run_leaves_measured_results_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "results" / "first.json").write_text("measured")
    assert bench(folder, "first", "peers", "--quick") == 0
    assert (folder / "results" / "first.json").read_text() == "measured"
    assert not (folder / "results" / "peers.json").exists()
    assert "table of peers small" in capsys.readouterr().out


def test_a_failing_program_is_reported_and_keeps_no_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "broken", "first") == 2
    assert not (folder / "results" / "broken.json").exists()
    assert (folder / "results" / "first.json").exists()  # the others still run
    assert "broken: FAILED with exit code 3" in capsys.readouterr().out


def test_standard_output_contains_only_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "first", "--quick", "--json") == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert printed["quick"] is True
    (run,) = printed["programs"]
    assert (run["name"], run["exit_code"]) == ("first", 0)
    assert run["results"]["first"]["results"] == {"quick": True}
    assert "table of first small" in captured.err


def test_an_unknown_name_is_answered_with_the_known_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(folder, "frist") == 2
    assert "there is no benchmark 'frist'. Use one of broken, first, peers." in capsys.readouterr().err


def test_without_the_programs_it_says_where_to_find_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path) == 2
    said = capsys.readouterr().err
    assert "there are no benchmarks in" in said
    assert "Clone the repository" in said


def test_every_program_has_a_quick_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--json"]) == 0
    names = {program["name"] for program in json.loads(capsys.readouterr().out)}
    root = Path(__file__).parent.parent.parent / "benchmarks"
    no_programs = {"machine", "models", "tables", "peer_tables", "sections", "publish", "script_programs"}
    assert {path.stem for path in root.glob("*.py")} - no_programs <= names
    assert "peers" in names
