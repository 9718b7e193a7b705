"""RankFile: what only one rank has seen, on disk during the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadygrad import ConfigError
from steadygrad.facts import Action, Finding, Incident, Outcome, Severity, Verdict
from steadygrad.record import rank_file
from steadygrad.record.rank_file import RankFile

INCIDENT = Incident(
    step=3,
    finding=Finding(kind="nonfinite_input", severity=Severity.ERROR, step=3, message="the batch holds NaN"),
    verdict=Verdict(action=Action.SKIP, reason="a bad batch"),
    outcome=Outcome(action=Action.SKIP, message="the step was skipped"),
)


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_start_writes_rank_machine_and_process_at_once(tmp_path: Path) -> None:
    first = RankFile(tmp_path, 2, 8)
    second = RankFile(tmp_path, 2, 8)
    for line in read(tmp_path / "rank_2.jsonl"):
        assert (line["rank"], line["num_ranks"]) == (2, 8)
        assert line["node"]
        assert line["process"]
    assert len(read(tmp_path / "rank_2.jsonl")) == 2
    first.close()
    second.close()


def test_an_incident_and_the_steps_before_it_are_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    file = RankFile(tmp_path, 0, 2)
    file.write_own(2, float("nan"))
    file.write_incident(INCIDENT)
    _, step, incident = read(file.path)
    assert (step["step"], step["loss"]) == (2, "nan")
    assert incident["incident"]["finding"]["kind"] == "nonfinite_input"  # type: ignore[index]
    file.close()


def test_a_sign_of_life_is_written_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(rank_file.time, "monotonic", lambda: clock[0])
    file = RankFile(tmp_path, 0, 2)
    file.write_own(0, 1.0)
    assert len(read(file.path)) == 1, "held back"
    clock[0] += 1.5
    file.write_own(1, 1.0)
    assert [line.get("step") for line in read(file.path)] == [None, 0, 1]
    file.close()


def test_a_closed_file_takes_no_more_and_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    file = RankFile(tmp_path, 0, 2)
    file.close()
    file.close()
    file.write_own(5, 1.0)
    assert len(read(tmp_path / "rank_0.jsonl")) == 1
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="rank 1"):
        RankFile(tmp_path / "taken", 1, 2)
