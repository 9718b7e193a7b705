"""Sinks for trackers, read back with the trackers' own files: TensorBoard's accumulator, wandb's offline log."""

from __future__ import annotations

import importlib
import json
import logging
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadygrad import Guard, GuardConfig, RecordConfig, UsageError
from steadygrad.facts import GradientTable
from steadygrad.monitor import GradientHealthMonitor
from steadygrad.record import Sink
from steadygrad.record.logger import LoggerSink
from steadygrad.record.series import MAX_BLOCKS, list_layers, measure_blocks
from steadygrad.record.tensorboard import TensorBoardSink
from steadygrad.record.wandb import WandbSink
from steadygrad.testing.faults import poison_batches

NUM_STEPS, BAD = 6, 3


@pytest.fixture(autouse=True)
def _third_party_warnings_are_not_ours(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(*sinks: Sink) -> Guard:
    """Six steps, the fourth with a NaN in its batch; per-layer numbers every second step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    config = GuardConfig(record=RecordConfig(layers_every=2))
    with Guard(model, torch.optim.AdamW(model.parameters()), config=config, sinks=sinks) as guard:
        for batch in poison_batches(torch.randn(NUM_STEPS, 8, 4), at={BAD}):
            guard.step(lambda x: model(x).square().mean(), batch)
    return guard


class Keeper:
    """A Sink that keeps everything: the truth that trackers are compared with."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.incidents: list[Any] = []

    def write_step(self, record: Any) -> None:
        self.records.append(record)

    def write_layers(self, step: int, gradients: GradientTable) -> None: ...

    def write_incident(self, incident: Any) -> None:
        self.incidents.append(incident)

    def close(self) -> None: ...


# --- TensorBoard --------------------------------------------------------------------------------------------------


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "histograms": 0, "scalars": 0})
    events.Reload()
    return events


def test_tensorboard_reads_back_the_numbers_of_every_step(tmp_path: Path) -> None:
    truth = Keeper()
    train(TensorBoardSink(tmp_path), truth)

    events = read_events(tmp_path)
    norms = {event.step: event.value for event in events.Scalars("grad/norm")}
    assert list(norms) == list(range(NUM_STEPS))
    for record in truth.records:
        expected = torch.tensor(record.grad_norm, dtype=torch.float32).item()  # event files hold float32
        assert norms[record.step] == expected or (math.isnan(norms[record.step]) and record.step == BAD)
    assert [event.value for event in events.Scalars("action/skipped")] == [0, 0, 0, 1, 0, 0]
    assert math.isnan(events.Scalars("health/loss")[BAD].value)
    assert "health/loss_scale" not in events.Tags()["scalars"]  # none was given


def test_tensorboard_has_incidents_as_text_and_counts_actions(tmp_path: Path) -> None:
    truth = Keeper()
    train(TensorBoardSink(tmp_path), truth)

    events = read_events(tmp_path)
    kinds = {incident.finding.kind for incident in truth.incidents}
    assert "nonfinite_loss" in kinds
    assert set(events.Tags()["tensors"]) == {f"incidents/{kind}/text_summary" for kind in kinds}
    [reported] = events.Tensors("incidents/nonfinite_loss/text_summary")
    text = reported.tensor_proto.string_val[0].decode()
    assert reported.step == BAD
    assert "the loss is NaN" in text
    assert "the step was skipped, no weight was touched" in text
    assert events.Scalars("action/num_skip")[-1].value == len(truth.incidents)


def test_tensorboard_histograms_survive_an_all_nan_step(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write_layers(0, table({"a.weight": (1.0, 0), "b.weight": (100.0, 0)}))
    sink.write_layers(1, table({"a.weight": (math.nan, 4), "b.weight": (10.0, 0)}))
    sink.write_layers(2, table({"a.weight": (math.nan, 4), "b.weight": (math.inf, 4)}))
    sink.write_layers(3, table({}))
    sink.close()

    histograms = {h.step: h.histogram_value for h in read_events(tmp_path).Histograms("grad/layer_norm_log10")}
    assert {step: h.num for step, h in histograms.items()} == {0: 2, 1: 1}
    assert (histograms[0].min, histograms[0].max) == (0.0, 2.0)


def table(rows: dict[str, tuple[float, int]]) -> GradientTable:
    """Return name -> norm and number of non-finite elements, of parameters with four elements."""
    cells = [number for norm, bad in rows.values() for number in (norm, norm, float(bad), float(bad), 0.0)]
    return GradientTable(tuple(rows), (4,) * len(rows), cells)


def test_every_nth_step_is_written_and_all_skipped_ones(tmp_path: Path) -> None:
    train(TensorBoardSink(tmp_path, every=5))
    assert [event.step for event in read_events(tmp_path).Scalars("grad/norm")] == [0, BAD, 5]


# --- layers -------------------------------------------------------------------------------------------------------


def test_a_thousand_layers_are_grouped_into_a_few_curves() -> None:
    names = [f"model.layers.{i}.{part}.weight" for i in range(250) for part in ("q", "k", "v", "o")]
    numbers = list_layers(table(dict.fromkeys(names, (3.0, 0))))
    assert len(numbers) <= 6 + MAX_BLOCKS
    assert numbers["grad/block/model.layers"] == pytest.approx(3.0 * math.sqrt(1000))


def test_blocks_have_the_maximum_depth_and_a_bad_one_is_nan() -> None:
    rows = {f"layers.{i}.{part}": (2.0, 0) for i in range(4) for part in ("weight", "bias")}
    blocks = measure_blocks(table(rows | {"layers.3.bias": (2.0, 1), "head": (5.0, 0)}))
    assert list(blocks) == ["layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert blocks["layers.0"] == pytest.approx(math.sqrt(8))
    assert math.isnan(blocks["layers.3"])


def test_norms_whose_squares_overflow_are_summed() -> None:
    blocks = measure_blocks(table({"a.weight": (3e200, 0), "a.bias": (4e200, 0)}))
    assert blocks == {"a": pytest.approx(5e200)}


# --- Weights & Biases ---------------------------------------------------------------------------------------------


def read_wandb(folder: Path) -> list[Any]:
    """Return the records of an offline run: blocks of a LevelDB log, each record a protocol buffer."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # finish() returns before the service has written everything; this waits for it
    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, records, whole = path.read_bytes(), [], b""
    place = 7  # the file's own header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no space for a record's header: the rest of the block is empty
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def read_history(records: list[Any]) -> list[dict[str, Any]]:
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


QUIET = {"console": "off", "silent": True}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


def test_wandb_offline_has_numbers_texts_and_alerts(offline: Path) -> None:
    truth = Keeper()
    train(WandbSink(project="p", dir=offline, mode="offline", settings=QUIET), truth)

    records = read_wandb(offline)
    rows = read_history(records)
    skipped = {row["optimizer_step"]: row["action/skipped"] for row in rows if "action/skipped" in row}
    assert skipped == {step: float(step == BAD) for step in range(NUM_STEPS)}
    norms = {row["optimizer_step"]: row["grad/norm"] for row in rows if "grad/norm" in row}
    assert norms[0] == truth.records[0].grad_norm
    assert math.isnan(float(norms[BAD]))
    assert any(name.startswith("grad/layer_norms") for row in rows for name in row)
    assert any("the loss is NaN" in row.get("incidents/nonfinite_loss", "") for row in rows)
    alerts = [record.alert for record in records if record.WhichOneof("record_type") == "alert"]
    kinds = {incident.finding.kind for incident in truth.incidents}
    assert {alert.title for alert in alerts} == {f"steadygrad: {kind}" for kind in kinds}
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.WhichOneof("record_type") == "metric"}
    assert {axes[prefix] for prefix in ("grad/*", "health/*", "action/*")} == {"optimizer_step"}


def test_a_given_wandb_run_stays_open(offline: Path) -> None:
    import wandb

    run = wandb.init(project="p", dir=offline, mode="offline", settings=QUIET)
    train(WandbSink(run, alerts=False))
    run.log({"mine": 1.0})  # raises after finish()
    run.finish()

    records = read_wandb(offline)
    assert read_history(records)[-1]["mine"] == 1.0
    assert not any(record.WhichOneof("record_type") == "alert" for record in records)


@pytest.mark.parametrize("gives_steps", [True, False], ids=["log(step=)", "log()"])
def test_a_monitor_and_the_script_lose_no_point_in_a_wandb_run(offline: Path, *, gives_steps: bool) -> None:
    import wandb

    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    monitor = GradientHealthMonitor(model, enable_detailed_logging=False)
    with wandb.init(project="p", dir=offline, mode="offline", settings=QUIET) as run:
        for step in range(6):
            own = {"step": step} if gives_steps else {}
            monitor.log_statistics(monitor.check_gradients(), step=step)
            run.log({"loss": float(step)}, **own)
            run.log({"rate": float(step)}, **own)  # without `step=` wandb is ahead from here

    records = read_wandb(offline)
    rows = read_history(records)
    assert [row["optimizer_step"] for row in rows if "grad/global_norm" in row] == list(range(6))
    assert [row["loss"] for row in rows if "loss" in row] == list(range(6))
    assert [row["rate"] for row in rows if "rate" in row] == list(range(6))
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.WhichOneof("record_type") == "metric"}
    assert axes["grad/*"] == "optimizer_step"


def test_a_wandb_run_that_cannot_be_opened_gives_advice(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(offline / "netrc"))

    with pytest.raises(UsageError, match=r"opened no run: .*Or set WANDB_MODE=offline"):
        WandbSink(project="p", dir=offline, mode="online", settings=QUIET)


# --- validation ---------------------------------------------------------------------------------------------------


def test_a_validation_loss_reaches_every_tracker_and_is_optional_for_custom_sinks(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    logger, keeper = WithStep(), Keeper()
    sinks = [TensorBoardSink(tmp_path / "board"), LoggerSink(logger), keeper]
    with Guard(model, torch.optim.AdamW(model.parameters()), sinks=sinks, run_dir=tmp_path / "run") as guard:
        for x in torch.randn(3, 8, 4):
            guard.step(lambda x: model(x).square().mean(), x)
        guard.validate(0.25)
        guard.step(lambda x: model(x).square().mean(), x)
        guard.validate(math.nan)
    events = read_events(tmp_path / "board").Scalars("health/validation_loss")
    assert (events[0].step, events[0].value) == (2, 0.25)
    assert (2, {"health/validation_loss": 0.25}) in logger.values
    lines = [json.loads(line) for line in (tmp_path / "run" / "validations.jsonl").read_text().splitlines()]
    runs = {line.pop("run") for line in lines}
    assert len(runs) == 1
    assert lines == [{"step": 2, "epoch": 0, "loss": 0.25}, {"step": 3, "epoch": 0, "loss": "nan"}]
    assert "validation step=3 epoch=0 loss=NaN" in (tmp_path / "run" / "train.log").read_text()


# --- any logger ---------------------------------------------------------------------------------------------------


class WithStep:
    def __init__(self) -> None:
        self.values: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.values.append((step, values))


class WithoutStep(WithStep):
    def log(self, values: dict[str, Any]) -> None:
        self.values.append((None, values))


@pytest.mark.parametrize("kind", [WithStep, WithoutStep])
def test_any_logger_with_log_gets_every_step_and_incident(kind: type[WithStep]) -> None:
    logger = kind()
    guard = train(LoggerSink(logger))

    steps = [(step, values) for step, values in logger.values if "grad/norm" in values]
    assert [step for step, _ in steps] == (list(range(NUM_STEPS)) if kind is WithStep else [None] * NUM_STEPS)
    texts = [name for _, values in logger.values for name in values if name.startswith("incidents/")]
    assert texts == [f"incidents/{incident.finding.kind}" for incident in guard.incidents]
    assert texts


@pytest.mark.parametrize("wrong", [object(), logging.getLogger("x")])
def test_an_object_that_cannot_take_numbers_is_refused_at_once(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"needs an object with \.log\(dict"):
        LoggerSink(wrong)


class Breaking(WithStep):
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        super().log(values, step)
        raise ConnectionError("the tracker is gone")


def test_a_failing_logger_is_reported_once_and_loses_no_step(caplog: pytest.LogCaptureFixture) -> None:
    breaking, other = Breaking(), WithStep()
    guard = train(LoggerSink(breaking), LoggerSink(other))

    assert len(breaking.values) == 1
    assert guard.stats()["num_steps"] == NUM_STEPS
    assert sum("grad/norm" in values for _, values in other.values) == NUM_STEPS
    reported = [record for record in caplog.records if "LoggerSink failed and is switched off" in record.message]
    assert len(reported) == 1


# --- missing packages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "make"),
    [("tensorboard", lambda path: TensorBoardSink(path)), ("wandb", lambda path: WandbSink(dir=path))],
)
def test_a_missing_tracker_is_reported_with_its_extra(
    extra: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ImportError, match=rf"pip install 'steadygrad\[{extra}\]'"):
        make(tmp_path)
    for name in ("tensorboard", "wandb", "logger"):
        importlib.reload(importlib.import_module(f"steadygrad.record.{name}"))  # importing the sinks needs neither
