"""Update ratios on record: written when measured, read back and drawn; sinks may ignore them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from steadygrad import Guard, GuardConfig, MeasureConfig, RecordConfig
from steadygrad.errors import UsageError
from steadygrad.facts import GradientTable, Incident, StepRecord
from steadygrad.record import Recorder, RunDirectory
from steadygrad.view.read.run import RunReader

TABLE = GradientTable(("a",), (4,), [1.5, 1.0, 0.0, 0.0, 1.0])


class OldSink:
    """A sink in the style from before ratios existed."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write_step(self, record: StepRecord) -> None: ...

    def write_layers(self, step: int, gradients: GradientTable) -> None:
        self.steps.append(step)

    def write_incident(self, incident: Incident) -> None: ...

    def close(self) -> None: ...


class NewSink(OldSink):
    """A sink that accepts them."""

    def __init__(self) -> None:
        super().__init__()
        self.ratios: list[Mapping[str, float] | None] = []

    def write_layers(
        self, step: int, gradients: GradientTable, update_ratios: Mapping[str, float] | None = None
    ) -> None:
        super().write_layers(step, gradients)
        self.ratios.append(update_ratios)


def read_layers(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "layers.jsonl").read_text(encoding="utf-8").splitlines()]


def train(run_dir: Path, *, num_steps: int, parameters_every: int, layers_every: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    config = GuardConfig(
        measure=MeasureConfig(parameters_every=parameters_every), record=RecordConfig(layers_every=layers_every)
    )
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), config=config, run_dir=run_dir) as guard:
        for x in torch.randn(num_steps, 8, 4):
            guard.step(lambda x: model(x).square().mean(), x)
    return model


def test_a_line_of_layers_has_exactly_the_measured_ratios(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, config={}, parameters=["a"], versions={})
    run.write_layers(0, TABLE)
    run.write_layers(1, TABLE, {"a": 1e-3, "b": math.nan})
    run.close()
    first, second = read_layers(tmp_path)
    assert "update_ratios" not in first
    assert second["update_ratios"] == {"a": 1e-3, "b": "nan"}


def test_a_sink_without_ratios_still_works() -> None:
    old, new = OldSink(), NewSink()
    recorder = Recorder([old, new])
    recorder.write_layers(0, TABLE)
    recorder.write_layers(1, TABLE, {"a": 0.5})
    assert old.steps == new.steps == [0, 1]
    assert new.ratios == [None, {"a": 0.5}]


def test_recorded_ratios_are_those_of_the_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.nn.Linear(4, 1).weight.detach()
    after = train(tmp_path, num_steps=1, parameters_every=1, layers_every=1).get_parameter("weight").detach()
    (line,) = read_layers(tmp_path)
    ratios = line["update_ratios"]
    assert isinstance(ratios, dict)
    assert set(ratios) == {"weight", "bias"}
    # A difference of float32 weights: three digits remain of an update of a thousandth.
    assert ratios["weight"] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-2)


@pytest.mark.parametrize(
    ("parameters_every", "layers_every", "steps"),
    [(10, 20, [0, 20, 40]), (7, 20, [0, 21, 42]), (1, 20, [0, 20, 40]), (0, 20, [])],
)
def test_ratios_are_written_about_as_often_as_layers_at_any_measuring_step(
    tmp_path: Path, parameters_every: int, layers_every: int, steps: list[int]
) -> None:
    train(tmp_path, num_steps=50, parameters_every=parameters_every, layers_every=layers_every)
    lines = read_layers(tmp_path)
    assert [line["step"] for line in lines if "update_ratios" in line] == steps
    assert {line["step"] for line in lines} == {0, 20, 40, *steps}


def test_disabled_layers_stay_disabled(tmp_path: Path) -> None:
    train(tmp_path, num_steps=5, parameters_every=1, layers_every=0)
    assert read_layers(tmp_path) == []


def test_the_view_reads_ratios_and_a_plot_shows_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from steadygrad.view.plot import plot_run

    train(tmp_path / "with", num_steps=30, parameters_every=5, layers_every=5)
    train(tmp_path / "without", num_steps=30, parameters_every=0, layers_every=5)
    run = RunReader(tmp_path / "with").read_all()
    assert run.ratios.names == ["weight", "bias"]
    assert run.ratios.steps == [0, 5, 10, 15, 20, 25]
    text = plot_run(tmp_path / "with", ["layers", "ratios"], tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "<!-- log10 of update / weight -->" in text
    with pytest.raises(UsageError, match="holds no update ratios"):
        plot_run(tmp_path / "without", ["ratios"], tmp_path / "y.svg")
