"""Guard in a notebook that a real kernel runs: its outputs are what a reader sees."""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadygrad import Guard
from steadygrad.view.notebook import NotebookChart, draw_curve

CELLS = [
    """
import torch
from steadygrad import Guard
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
chart = guard.show()
for step in range(40):
    x = torch.randn(8, 4)
    x[0] = float("nan") if step == 20 else x[0]
    guard.step(lambda x: model(x).square().mean(), x)
guard.flush()
""",
    "guard",
    "guard.incidents[0]",
    "guard.incidents[0].finding",
    "guard.incidents[0].cause",
    "guard.summary()",
    "guard.close()",
]


def read_html(cell: Any) -> str:
    return "".join(one.data["text/html"] for one in cell.outputs if "text/html" in one.get("data", {}))


def test_a_notebook_shows_guard_chart_incident_finding_cause_and_summary(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="no ipykernel: pip install nbclient ipykernel")
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import KernelManager

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    manager = KernelManager()
    manager._kernel_spec = KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    resources = {"metadata": {"path": str(tmp_path)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client leaves sockets open until it is garbage collected
        nbclient.NotebookClient(notebook, km=manager, timeout=300, resources=resources).execute()
        del manager
        gc.collect()
    chart, guard, incident, finding, cause, summary, _ = map(read_html, notebook.cells)
    assert chart.count("<svg") == 2
    assert "ended, 40 steps, 1 skipped" in chart  # updated by the last cell
    assert "NaN" in chart
    assert "<b>Guard</b>: 40 steps, 1 skipped" in guard
    assert "step 20: nonfinite_loss" in incident
    assert "the step was skipped" in incident
    assert "the loss is NaN" in finding
    assert "already in the input" in cause
    assert summary.startswith("<pre")
    assert "incidents  1 in 1 problem" in summary


def test_notebook_output_is_escaped() -> None:
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    chart = guard.show()
    guard.step(lambda x: model(x).sum() * float("nan"), torch.ones(1, 2))
    guard.close()
    for shown in (chart, guard, guard.incidents[0], guard.incidents[0].finding):
        text = shown._repr_html_()
        assert "<script" not in text
        assert "<lambda>" not in text
    assert isinstance(chart, NotebookChart)


def test_a_curve_over_powers_of_ten_is_logarithmic_and_an_empty_one_shows_nothing() -> None:
    assert "loss, logarithmic" in draw_curve("loss", [0, 1, 2], [1000.0, 10.0, 0.1])
    assert "logarithmic" not in draw_curve("loss", [0, 1], [-1.0, 1000.0])
    assert draw_curve("loss", [], []) == ""
