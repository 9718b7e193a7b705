"""The run directory: what its files contain, when they are on disk, and that a broken sink never harms a training."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad import ConfigError, FixedNorm, Guard, GuardConfig, RecordConfig, __version__
from steadygrad.facts import (
    Action,
    Cause,
    Finding,
    GradientTable,
    Incident,
    Outcome,
    Severity,
    StepRecord,
    Verdict,
)
from steadygrad.record import Recorder, RunDirectory
from steadygrad.testing import poison_batches

FILES = ["incidents.jsonl", "layers.jsonl", "run.json", "steps.jsonl", "train.log"]


def read_json(line: str) -> Any:
    """Read one value of strict JSON: a bare NaN or Infinity, which most parsers refuse, is an error."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON: {line}")

    return json.loads(line, parse_constant=refuse)


def read_lines(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [read_json(line) for line in text.splitlines()]


def open_run(path: Path) -> RunDirectory:
    return RunDirectory(path, config={"clip": None}, parameters=["a", "b"], versions={"steadygrad": "9.9"})


def make_record(**changes: Any) -> StepRecord:
    healthy = {
        "step": 0,
        "loss": 2.5,
        "grad_norm": 0.25,
        "clip_coefficient": 1.0,
        "clipped": False,
        "skipped": False,
        "num_nonfinite": 0,
        "learning_rates": (0.1, 0.01),
        "loss_scale": None,
        "num_microbatches": 1,
        "num_dropped_microbatches": 0,
        "time_seconds": 1.5,
    }
    return StepRecord(**{**healthy, **changes})


def make_incident(severity: Severity = Severity.ERROR, **changes: Any) -> Incident:
    finding = Finding(
        kind="nonfinite_loss",
        severity=severity,
        step=4,
        message="the loss is nan",
        advice="Look for log(0).",
        evidence={"loss": math.nan, "norms": [1.0, math.inf, -math.inf], "parameter": "größe.weight"},
    )
    return Incident(
        **{
            "step": 4,
            "finding": finding,
            "verdict": Verdict(action=Action.SKIP, reason="it must not reach a weight"),
            "outcome": Outcome(action=Action.SKIP, message="the step was skipped", before={"grad_norm": math.nan}),
            **changes,
        }
    )


# --- a small training -----------------------------------------------------------------------------------------------


def make_model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def make_batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def train(count: int, *, bad: set[int] = frozenset(), **settings: Any) -> tuple[nn.Linear, Guard]:  # type: ignore[assignment]
    model = make_model()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    for batch in poison_batches(make_batches(count), at=bad):
        guard.step(lambda x: model(x).square().mean(), batch)
    return model, guard


# --- the files ------------------------------------------------------------------------------------------------------


def test_a_run_directory_contains_exactly_its_files(tmp_path: Path) -> None:
    _, guard = train(3, bad={1}, run_dir=tmp_path / "deep" / "run")
    guard.close()
    assert sorted(path.name for path in (tmp_path / "deep" / "run").iterdir()) == ["batches", *FILES]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_run_json_contains_config_versions_machine_and_parameters(tmp_path: Path) -> None:
    config = GuardConfig(clip=FixedNorm(max_norm=0.5))
    _, guard = train(0, run_dir=tmp_path, config=config)
    guard.close()
    run = read_json((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert set(run) == {"id", "started", "ended", "process", "config", "versions", "machine", "parameters"}
    assert GuardConfig.from_dict(run["config"]) == config
    assert run["versions"]["steadygrad"] == __version__
    assert run["versions"]["torch"] == torch.__version__
    assert run["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run["machine"]["num_cpus"] == os.cpu_count()
    assert run["parameters"] == ["weight", "bias"]


def test_a_step_is_one_line_of_strict_json(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.write_step(make_record())
    run.write_step(make_record(step=1, loss=math.nan, grad_norm=math.inf, skipped=True, num_nonfinite=3))
    run.write_step(make_record(step=2, loss=None, grad_norm=-math.inf, loss_scale=1024.0))
    run.close()
    healthy = {
        "step": 0,
        "loss": 2.5,
        "grad_norm": 0.25,
        "clip_coefficient": 1.0,
        "clipped": False,
        "skipped": False,
        "num_nonfinite": 0,
        "learning_rates": [0.1, 0.01],
        "loss_scale": None,
        "num_microbatches": 1,
        "num_dropped_microbatches": 0,
        "time_seconds": 1.5,
    }
    assert read_lines(tmp_path / "steps.jsonl") == [
        healthy,
        {**healthy, "step": 1, "loss": "nan", "grad_norm": "inf", "skipped": True, "num_nonfinite": 3},
        {**healthy, "step": 2, "loss": None, "grad_norm": "-inf", "loss_scale": 1024.0},
    ]


def test_float_reads_back_the_spelling_of_nan_and_inf(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.write_step(make_record(loss=math.nan, grad_norm=-math.inf))
    run.close()
    line = read_lines(tmp_path / "steps.jsonl")[0]
    assert math.isnan(float(line["loss"]))
    assert float(line["grad_norm"]) == -math.inf


def test_a_number_is_unchanged_after_writing_and_reading(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.write_step(make_record(loss=0.1 + 0.2, grad_norm=1e-300))
    run.close()
    line = read_lines(tmp_path / "steps.jsonl")[0]
    assert (line["loss"], line["grad_norm"]) == (0.1 + 0.2, 1e-300)


def test_layers_map_names_to_norm_largest_nonfinite_and_zeros(tmp_path: Path) -> None:
    table = GradientTable(("a", "b"), (4, 3), [1.5, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 1.0, 1.0])
    run = open_run(tmp_path)
    run.write_layers(7, table)
    run.close()
    assert read_lines(tmp_path / "layers.jsonl") == [
        {"step": 7, "gradients": {"a": [1.5, 1.0, 0, 0.25], "b": [0.0, 0.0, 2, 0.333333]}}
    ]


def test_an_incident_is_one_complete_line(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.write_incident(make_incident())
    cause = Cause(kind="nan", phase="forward", op="aten.sqrt", line=41, inputs=("[0, 1]",))
    run.write_incident(make_incident(cause=cause))
    run.close()
    first, second = read_lines(tmp_path / "incidents.jsonl")
    assert first == {
        "step": 4,
        "finding": {
            "kind": "nonfinite_loss",
            "severity": "error",
            "step": 4,
            "message": "the loss is nan",
            "advice": "Look for log(0).",
            "evidence": {"loss": "nan", "norms": [1.0, "inf", "-inf"], "parameter": "größe.weight"},
            "noticed_at": None,
            "acted_at": None,
        },
        "verdict": {"action": "skip", "reason": "it must not reach a weight", "factor": None},
        "outcome": {"action": "skip", "message": "the step was skipped", "before": {"grad_norm": "nan"}, "after": {}},
        "cause": None,
        "also": [],
    }
    assert second["cause"]["op"] == "aten.sqrt"
    assert second["cause"]["inputs"] == ["[0, 1]"]


def test_the_log_contains_the_same_as_greppable_text(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.write_step(make_record())
    run.write_step(make_record(step=1, clipped=True, clip_coefficient=0.125, learning_rates=(0.1,)))
    run.write_step(make_record(step=2, loss=math.nan, grad_norm=math.inf, skipped=True))
    run.write_step(make_record(step=3, loss=None, grad_norm=-math.inf, learning_rates=()))
    run.close()
    assert (tmp_path / "train.log").read_text(encoding="utf-8").splitlines() == [
        "step=0 loss=2.5 grad_norm=0.25 lr=0.1,0.01",
        "step=1 loss=2.5 grad_norm=0.25 lr=0.1 clipped=0.125 grad_norm_after=0.03125",
        "step=2 loss=NaN grad_norm=Inf lr=0.1,0.01 skipped",
        "step=3 loss=- grad_norm=-Inf lr=",
    ]


@pytest.mark.parametrize(
    ("severity", "level"),
    [
        (Severity.INFO, "INFO"),
        (Severity.WARNING, "WARNING"),
        (Severity.ERROR, "ERROR"),
        (Severity.CRITICAL, "ERROR"),
    ],
)
def test_an_incident_is_one_line_of_the_log_with_its_level(severity: Severity, level: str, tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.write_incident(make_incident(severity))
    run.close()
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == (
        f"{level} step=4 nonfinite_loss: the loss is nan | action=skip: the step was skipped | Look for log(0).\n"
    )


def test_a_training_is_recorded_in_the_files(tmp_path: Path) -> None:
    _, guard = train(4, bad={2}, run_dir=tmp_path)
    guard.close()

    steps = read_lines(tmp_path / "steps.jsonl")
    assert [(s["step"], s["skipped"]) for s in steps] == [(0, False), (1, False), (2, True), (3, False)]
    assert (steps[2]["loss"], steps[2]["grad_norm"]) == ("nan", "nan")
    assert steps[3]["loss"] == guard.last.loss  # type: ignore[union-attr]
    incidents = read_lines(tmp_path / "incidents.jsonl")
    assert [(i["step"], i["finding"]["kind"]) for i in incidents] == [(i.step, i.finding.kind) for i in guard.incidents]
    assert {i["step"] for i in incidents} == {2}
    assert [line["step"] for line in read_lines(tmp_path / "layers.jsonl")] == [0, 2]
    log = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert "step=2 loss=NaN grad_norm=NaN lr=0.1 skipped" in log
    assert sum(line.startswith("ERROR step=2 nonfinite_") for line in log) == len(incidents)


def test_steps_are_written_at_the_configured_interval_and_skips_always(tmp_path: Path) -> None:
    config = GuardConfig(record=RecordConfig(steps_every=3, layers_every=0))
    _, guard = train(8, bad={4}, run_dir=tmp_path, config=config)
    guard.close()
    assert [line["step"] for line in read_lines(tmp_path / "steps.jsonl")] == [0, 3, 4, 6]
    assert read_lines(tmp_path / "layers.jsonl") == []


# --- when it is on disk ---------------------------------------------------------------------------------------------


def test_an_incident_is_on_disk_before_the_call_returns(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.write_step(make_record())
    run.write_incident(make_incident())
    try:
        code = "import sys; print(sys.stdin.read() or open(sys.argv[1], encoding='utf-8').read(), end='')"
        seen = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "incidents.jsonl")],
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            check=True,
        ).stdout
        assert read_json(seen)["finding"]["kind"] == "nonfinite_loss"
        assert "ERROR step=4" in (tmp_path / "train.log").read_text(encoding="utf-8")
        assert len(read_lines(tmp_path / "steps.jsonl")) == 1  # and so are the steps before it
    finally:
        run.close()


def test_the_incident_is_on_disk_before_on_incident_is_called(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(incident: Incident) -> None:
        seen.append(len(read_lines(tmp_path / "incidents.jsonl")))

    _, guard = train(3, bad={1}, run_dir=tmp_path, config=GuardConfig(on_incident=look))
    guard.close()
    assert seen == list(range(1, len(guard.incidents) + 1))


def test_a_dying_process_leaves_its_incidents(tmp_path: Path) -> None:
    code = f"""
import os
from steadygrad.facts import Action, Finding, Incident, Outcome, Severity, Verdict
from steadygrad.record import RunDirectory
run = RunDirectory({str(tmp_path)!r}, config={{}}, parameters=[], versions={{}})
finding = Finding(kind="k", severity=Severity.ERROR, step=0, message="m")
incident = Incident(step=0, finding=finding, verdict=Verdict(action=Action.SKIP, reason="r"),
                    outcome=Outcome(action=Action.SKIP, message="o"))
run.write_incident(incident)
os._exit(9)  # nothing is closed or flushed on the way out
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert [line["finding"]["kind"] for line in read_lines(tmp_path / "incidents.jsonl")] == ["k"]


def test_a_fork_does_not_repeat_lines_of_a_rank(tmp_path: Path) -> None:
    code = f"""
import os, sys
from steadygrad.record.rank_file import RankFile
file = RankFile({str(tmp_path)!r}, 1, 2)
file.write_own(0, 1.0)
if os.fork() == 0:
    sys.exit(0)
os.wait()
file.write_own(1, 1.0)
file.close()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [line.get("step") for line in read_lines(tmp_path / "rank_1.jsonl")] == [None, 0, 1]


def test_steps_are_buffered_for_a_limited_time(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    for step in range(RunDirectory.FLUSH_EVERY):
        run.write_step(make_record(step=step))
    assert len(read_lines(tmp_path / "steps.jsonl")) == RunDirectory.FLUSH_EVERY
    run.write_step(make_record(step=RunDirectory.FLUSH_EVERY, skipped=True))
    assert len(read_lines(tmp_path / "steps.jsonl")) == RunDirectory.FLUSH_EVERY + 1
    run.close()


# --- a directory with an earlier run --------------------------------------------------------------------------------


def test_an_earlier_run_that_was_not_resumed_is_moved_aside(tmp_path: Path) -> None:
    _, first = train(3, bad={1}, run_dir=tmp_path)
    first.close()
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")

    _, second = train(2, bad={0}, run_dir=tmp_path)
    second.close()

    assert {name: (tmp_path / "earlier" / "1" / name).read_bytes() for name in FILES} == before
    assert (tmp_path / "earlier" / "1" / "batches").is_dir()
    assert [line["step"] for line in read_lines(tmp_path / "steps.jsonl")] == [0, 1]
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    reported = next(finding for finding in second.findings if finding.kind == "new_run")
    assert "guard.resume()" in reported.advice
    assert str(tmp_path / "earlier" / "1") in reported.message


def test_the_first_run_json_is_kept_and_later_starts_are_added(tmp_path: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        config = GuardConfig(sanitize_value=value).to_dict()
        RunDirectory(tmp_path, config=config, parameters=[], versions={}, run_id="a1").close()
    run = read_json((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert run["config"]["sanitize_value"] == 1.0
    assert [start["config"]["sanitize_value"] for start in run["resumed"]] == [2.0, 3.0]
    assert all(start.keys() == run.keys() - {"resumed", "id"} for start in run["resumed"])
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES


@pytest.mark.parametrize("found", [b"", b"{", b"[1]", b"\xff", b'{"resumed": 3}'])
def test_a_foreign_run_json_is_kept(found: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(found)
    open_run(tmp_path).close()
    assert (tmp_path / "run-unreadable.json").read_bytes() == found
    assert read_json((tmp_path / "run.json").read_text(encoding="utf-8"))["parameters"] == ["a", "b"]


@pytest.mark.parametrize("name", ["steps.jsonl", "layers.jsonl", "incidents.jsonl", "train.log"])
def test_a_truncated_line_affects_no_other(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"step":0}\n{"step":1,"lo', encoding="utf-8")
    train(1, bad={0}, sinks=[open_run(tmp_path)])[1].close()
    whole, half, *added = (tmp_path / name).read_text(encoding="utf-8").splitlines()
    assert (whole, half) == ('{"step":0}', '{"step":1,"lo')
    assert added
    assert name == "train.log" or all(read_json(line)["step"] == 0 for line in added)


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_a_run_directory_that_cannot_be_created_is_reported_in_our_words(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        train(1, run_dir=tmp_path / below)
    message = str(caught.value)
    assert message.startswith("run_dir cannot be used")
    assert str(tmp_path / below) in message
    assert "Use a new folder" in message
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_run_directory_that_fails_halfway_leaves_no_open_file(tmp_path: Path) -> None:
    (tmp_path / "incidents.jsonl").mkdir()
    with pytest.raises(ConfigError, match="run_dir"):
        open_run(tmp_path)
    assert open_files_below(tmp_path) == []


def test_without_a_run_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, guard = train(3, bad={1}, run_dir=None)
    guard.close()
    assert guard.incidents
    assert list(tmp_path.iterdir()) == []


# --- sinks that break -----------------------------------------------------------------------------------------------


class MemorySink:
    """Keeps its input; fails in the calls named in `broken`."""

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.calls: list[str] = []
        self.kept: list[Any] = []

    def _take(self, call: str, value: Any) -> None:
        self.calls.append(call)
        if call in self.broken:
            raise OSError(28, "No space left on device")
        self.kept.append(value)

    def write_step(self, record: StepRecord) -> None:
        self._take("write_step", record.step)

    def write_layers(self, step: int, gradients: GradientTable) -> None:
        self._take("write_layers", dict(gradients))

    def write_incident(self, incident: Incident) -> None:
        self._take("write_incident", incident)

    def close(self) -> None:
        self._take("close", None)


def assert_trained_alike(left: nn.Module, right: nn.Module) -> None:
    for a, b in zip(left.parameters(), right.parameters(), strict=True):
        assert torch.equal(a, b)


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("call", ["write_step", "write_layers", "write_incident"])
def test_a_broken_sink_is_reported_once_and_disabled_while_others_continue(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    healthy, _ = train(6, bad={1, 3})
    broken, other = MemorySink(call), MemorySink()

    model, guard = train(6, bad={1, 3}, sinks=[broken, other])
    guard.close()

    assert_trained_alike(model, healthy)
    assert broken.calls[-2:] == [call, "close"]
    assert broken.calls.count(call) == broken.calls.count("close") == 1
    assert [kept for kept in other.kept if isinstance(kept, int)] == list(range(6))
    assert sum(isinstance(kept, Incident) for kept in other.kept) == len(guard.incidents) > 0
    assert other.calls[-1] == "close"
    reported = errors_of(caplog)
    assert len(reported) == 1
    assert "MemorySink" in reported[0]
    assert "No space left on device" in reported[0]
    assert "training continues" in reported[0]


def test_a_sink_that_fails_to_close_does_not_keep_others_open(caplog: pytest.LogCaptureFixture) -> None:
    broken, other = MemorySink("close"), MemorySink()
    recorder = Recorder([broken, other])
    recorder.close()
    recorder.close()
    assert other.calls == ["close"]
    assert len(errors_of(caplog)) == 1


def test_without_the_recorder_a_broken_sink_would_end_the_training() -> None:
    with pytest.raises(OSError, match="No space left"):
        MemorySink("write_step").write_step(make_record())


needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")


def open_files_below(path: Path) -> list[Path]:
    """Return files under `path` that this process has open; a file dropped while open would also warn."""
    gc.collect()
    opened = [fd.resolve() for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    return [file for file in opened if path in file.parents]


@needs_full_device
@pytest.mark.parametrize("bad", [set(), {0}], ids=["found at close", "found at a skip"])
def test_a_broken_run_directory_leaves_no_open_file(bad: set[int], tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    _, guard = train(1, bad=bad, run_dir=tmp_path)
    guard.close()
    del guard
    assert open_files_below(tmp_path) == []


@needs_full_device
@pytest.mark.parametrize("name", ["steps.jsonl", "layers.jsonl", "incidents.jsonl", "train.log"])
def test_a_full_disk_is_reported_once_and_does_not_affect_the_training(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    healthy, _ = train(6, bad={1, 3})
    (tmp_path / name).symlink_to("/dev/full")
    other = MemorySink()

    model, guard = train(6, bad={1, 3}, run_dir=tmp_path, sinks=[other])
    guard.close()

    assert_trained_alike(model, healthy)
    reported = errors_of(caplog)
    assert len(reported) == 1
    assert "RunDirectory failed and is switched off" in reported[0]
    assert "No space left" in reported[0]
    assert sum(isinstance(kept, Incident) for kept in other.kept) == len(guard.incidents) > 0


def test_deleting_the_directory_does_not_affect_the_training(tmp_path: Path) -> None:
    healthy, _ = train(4, bad={2})
    model = make_model()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run")
    for step, batch in enumerate(poison_batches(make_batches(4), at={2})):
        if step == 1:
            shutil.rmtree(tmp_path / "run")
        guard.step(lambda x: model(x).square().mean(), batch)
    guard.close()
    assert_trained_alike(model, healthy)
    assert {incident.step for incident in guard.incidents if incident.finding.kind != "run_directory_lost"} == {2}
    assert [finding.kind for finding in guard.findings].count("run_directory_lost") == 1
    assert [line["step"] for line in read_lines(tmp_path / "run" / "steps.jsonl")] == [
        0,
        1,
        2,
        3,
    ]  # none was written so far
    assert read_json((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["parameters"] == ["weight", "bias"]
