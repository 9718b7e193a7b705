"""Large files read in parts by several processes give exactly the same as when read by one."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from view_runs import add_update_ratios, make_incident, make_step, open_directory, write_run

from steadygrad.view.headline import judge_run, list_numbers
from steadygrad.view.read import together
from steadygrad.view.read.run import RunReader
from steadygrad.view.read.together import Part
from steadygrad.view.render.charts import describe_charts


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "count_processes", lambda: 2)


def read(path: Path, monkeypatch: pytest.MonkeyPatch, *, worth_bytes: int) -> RunReader:
    monkeypatch.setattr(together, "WORTH_BYTES", worth_bytes)
    return RunReader(path).read_all()


def write_hard_run(path: Path) -> None:
    """Resumed twice, with a jump of the rate, custom numbers, a NaN end, and layers under changing names."""
    run = open_directory(path)
    for start, end in ((0, 150), (120, 260), (260, 400)):
        for step in range(start, end):
            bad = step >= 380
            extra = {"kl": step / 7} if step % 3 else {}
            rate = 1e-3 if step < 200 else 1e-5
            record = make_step(
                step,
                loss=math.nan if bad else 5.0 / (1 + step),
                skipped=bad,
                extra=extra,
                learning_rates=(rate,),
                time_seconds=(step - start) * 0.5,
            )
            run.write_step(record)
    run.write_incident(make_incident(385))
    run.close()


@pytest.mark.parametrize("kind", ["everything", "hard", "torn", "corrupt"])
def test_joined_parts_equal_the_run_read_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "hard":
        write_hard_run(tmp_path)
    else:
        add_update_ratios(write_run(tmp_path))
    if kind == "torn":
        with (tmp_path / "steps.jsonl").open("a") as file:
            file.write('not a line\n{"step":600,"lo')
    if kind == "corrupt":
        lines = (tmp_path / "steps.jsonl").read_bytes().splitlines()
        lines = [line[:-1] + b',"pad":"%s"}' % (b"x" * 4000) for line in lines]  # parts longer than the corrupt line
        lines.insert(10, b"\0" * (1 << 19))
        (tmp_path / "steps.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    alone = read(tmp_path, monkeypatch, worth_bytes=1 << 60)
    joined = read(tmp_path, monkeypatch, worth_bytes=1)

    expected, found = describe_charts(alone), describe_charts(joined)
    times = [one.pop("clock") for one in (expected, found)]
    assert found == expected
    assert (times[0]["x"][-1], times[0]["y"][-1]) == (times[1]["x"][-1], times[1]["y"][-1])
    assert list_numbers(joined) == list_numbers(alone)
    assert judge_run(joined) == judge_run(alone)
    assert joined.steps.num_steps == alone.steps.num_steps == (430 if kind == "hard" else 600)
    assert joined.notes == alone.notes
    assert joined.steps.last_extra == alone.steps.last_extra
    assert joined.progress == 1


def test_a_file_is_split_between_lines_and_each_line_is_in_one_part(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [f'{{"step":{i},"pad":"{"x" * (i * 7 % 90)}"}}\n' for i in range(500)]
    path.write_text("".join(lines) + '{"step":500')
    parts = Part.split(path, 6)
    whole = path.read_bytes()
    assert len(parts) == 6
    assert b"".join(whole[part.start : part.end] for part in parts) == "".join(lines).encode()
    assert all(whole[part.start : part.start + 1] == b"{" for part in parts)


def test_without_other_processes_the_files_are_read_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, 50)
    monkeypatch.setattr(together.sys, "executable", str(tmp_path / "no-python"))
    assert read(tmp_path, monkeypatch, worth_bytes=1).steps.num_steps == 50


def test_modules_in_the_current_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", 50)
    here, trace = tmp_path / "here", tmp_path / "trace"
    here.mkdir()
    (here / "json.py").write_text(f"open({str(trace)!r}, 'w'); from this_is_not_json import *")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [".", *sys.path])  # like a program that was started elsewhere
    monkeypatch.setattr(together, "WORTH_BYTES", 1)

    found = together.read_together([tmp_path / "run" / "steps.jsonl"], 100)

    assert not trace.exists()
    assert found is not None
