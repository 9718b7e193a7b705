"""trackio and MLflow with the real packages, offline, read back by themselves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadygrad import Guard, GuardConfig, MlflowSink, RecordConfig, TrackioSink
from steadygrad.testing.faults import poison_batches


@pytest.fixture(autouse=True)
def _third_party_warnings_are_not_ours() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(sink: Any) -> None:
    """Six steps, the fourth with a NaN in its batch; per-layer numbers every second step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    config = GuardConfig(record=RecordConfig(layers_every=2))
    with Guard(model, torch.optim.AdamW(model.parameters()), config=config, sinks=[sink]) as guard:
        for batch in poison_batches(torch.randn(6, 8, 4), at={3}):
            guard.step(lambda x: model(x).square().mean(), batch)
        guard.validate(0.5)


def test_mlflow_has_the_curves_and_the_text_of_each_incident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no mlflow: pip install 'steadygrad[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    sink = MlflowSink(run_name="a")
    train(sink)
    assert mlflow.active_run() is None  # opened here, so ended here
    client = mlflow.MlflowClient()
    skipped = client.get_metric_history(sink.run_id, "action/skipped")
    assert [(point.step, point.value) for point in skipped] == [(step, float(step == 3)) for step in range(6)]
    losses = {point.step: point.value for point in client.get_metric_history(sink.run_id, "health/loss")}
    assert [step for step, loss in losses.items() if not math.isfinite(loss)] == [3]
    assert [p.value for p in client.get_metric_history(sink.run_id, "health/validation_loss")] == [0.5]
    marks = client.get_metric_history(sink.run_id, "incidents/nonfinite_loss")
    assert [(point.step, point.value) for point in marks] == [(3, 1.0)]
    (text,) = (one.path for one in client.list_artifacts(sink.run_id, "incidents"))
    assert "the loss is NaN" in Path(client.download_artifacts(sink.run_id, text, str(tmp_path))).read_text()


def test_mlflow_keeps_an_open_run_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="no mlflow: pip install 'steadygrad[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    with mlflow.start_run() as run:
        train(MlflowSink(every=5))
        assert mlflow.active_run().info.run_id == run.info.run_id
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "grad/norm")
    assert [point.step for point in history] == [0, 3, 5]  # including the skipped one


def test_trackio_has_the_curves_an_alert_and_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio", reason="no trackio: pip install 'steadygrad[trackio]'")
    sink = TrackioSink(project="demo", name="a", embed=False, histograms=True)
    train(sink)
    logs = trackio.SQLiteStorage.get_logs("demo", "a")
    skipped = {row["step"]: row["action/skipped"] for row in logs if "action/skipped" in row}
    assert skipped == {step: float(step == 3) for step in range(6)}
    texts = [str(row["incidents/nonfinite_loss"]) for row in logs if "incidents/nonfinite_loss" in row]
    assert len(texts) == 1
    assert "the loss is NaN" in texts[0]
    assert any("grad/layer_norms" in row for row in logs)
    alerts = trackio.SQLiteStorage.get_alerts("demo")  # trackio itself may send one again on a busy machine
    assert {alert["title"] for alert in alerts} == {"steadygrad: nonfinite_loss at step 3"}
