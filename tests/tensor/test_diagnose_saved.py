"""The failing batch on disk: complete, bounded, read without running code, and replayed in a separate process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from steadygrad.cli import main
from steadygrad.diagnose.capture import Capture
from steadygrad.diagnose.quarantine import Quarantine, load_batch
from steadygrad.errors import UsageError

TRAIN = """
import torch
from torch import nn

def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Dropout(0.01))

    def step(batch):
        lengths = model(batch["x"]).square().sum(-1)
        return lengths.sqrt().mean()

    return step, model

def healthy():
    _, model = build()
    return lambda batch: model(batch["x"]).mean(), model
"""


@dataclass
class Views:
    left: Tensor
    title: str


class Pair(NamedTuple):
    x: Tensor
    y: float


def capture_of(*args: Any, model: nn.Module | None = None, **kwargs: Any) -> Capture:
    return Capture.take(lambda *a, **k: None, args, kwargs, model=model)


def test_a_saved_batch_is_read_back(tmp_path: Path) -> None:
    batch = {
        "x": torch.tensor([[math.nan, 1.0]], requires_grad=True),
        "half": torch.ones(2).bfloat16(),
        "wave": torch.tensor([1 + 2j]),
        3: [torch.tensor([True]), "text", -math.inf, None],
        "pair": Pair(torch.arange(3), 0.5),
        "views": Views(torch.zeros(2, 2)[:, :1], "left"),
    }
    model = nn.Linear(2, 1)
    capture = capture_of(batch, model, model=model, flag=True)

    path = Quarantine(run_dir=tmp_path).save(12, capture, scale=8.0)
    assert path == "batches/step-00000012.json"
    saved = load_batch(tmp_path / path)

    (back, hole), kwargs = saved.args, saved.kwargs
    assert (saved.step, saved.scale, kwargs, hole, saved.modules) == (12, 8.0, {"flag": True}, None, (1,))
    torch.testing.assert_close(back["x"], batch["x"], equal_nan=True)
    assert back["x"].requires_grad
    assert torch.equal(back["half"], batch["half"])
    assert torch.equal(back["wave"], batch["wave"])
    assert torch.equal(back[3][0], batch[3][0])
    assert back[3][1:] == ["text", -math.inf, None]
    assert torch.equal(back["pair"].x, torch.arange(3))
    assert back["pair"].y == 0.5
    assert torch.equal(back["views"].left, torch.zeros(2, 1))
    assert back["views"].title == "left"
    assert torch.equal(saved.weights["weight"], model.weight)
    assert saved.random is not None
    assert capture.random is not None
    assert torch.equal(saved.random["torch"], capture.random["torch"])
    assert saved.random["python"] == capture.random["python"]


def test_unsaveable_values_are_reported(tmp_path: Path) -> None:
    path = Quarantine(run_dir=tmp_path).save(
        0, capture_of({"x": torch.ones(1), "f": open, "s": torch.eye(2).to_sparse()})
    )
    assert path is not None
    saved = load_batch(tmp_path / path)

    assert saved.args[0]["f"] is None
    assert len(saved.missing) == 2


def test_the_limit_holds_for_bytes_and_for_number(tmp_path: Path) -> None:
    keeper = Quarantine(run_dir=tmp_path, max_bytes=40_000, max_batches=2)

    assert keeper.save(0, capture_of(torch.zeros(100_000))) is None
    assert "over the bound of 40000" in keeper.refused
    assert keeper.save(1, capture_of(torch.zeros(10))) is not None
    assert keeper.save(2, capture_of(torch.zeros(10))) is not None
    assert keeper.save(3, capture_of(torch.zeros(10))) is None
    assert sum(file.stat().st_size for file in (tmp_path / "batches").iterdir()) < 45_000
    assert {file.suffix for file in (tmp_path / "batches").iterdir()} == {".json", ".safetensors"}


def test_too_large_weights_are_left_out(tmp_path: Path) -> None:
    model = nn.Linear(100, 100)
    path = Quarantine(run_dir=tmp_path, max_bytes=100_000).save(0, capture_of(torch.zeros(1), model=model))

    assert path is not None
    assert load_batch(tmp_path / path).weights == {}


def test_weights_over_the_limit_are_left_out(tmp_path: Path) -> None:
    model, batch = nn.Linear(24, 24), torch.zeros(25_000)
    alone = Quarantine(run_dir=tmp_path / "alone").save(0, capture_of(batch))
    assert alone is not None
    bound = (tmp_path / "alone" / alone).with_suffix(".safetensors").stat().st_size + 1000

    # The weights take 2.4 kB: less than the share of one step, more than the batch leaves.
    path = Quarantine(run_dir=tmp_path, max_bytes=bound).save(0, capture_of(batch, model=model))

    assert path is not None
    assert load_batch(tmp_path / path).weights == {}
    assert (tmp_path / path).with_suffix(".safetensors").stat().st_size <= bound


def test_a_file_that_is_not_a_batch_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "step-00000000.json"
    with pytest.raises(UsageError, match="cannot be read"):
        load_batch(path)
    path.write_text("[]")
    torch.save({}, tmp_path / "step-00000000.safetensors")  # a pickle with the wrong extension
    with pytest.raises(UsageError, match="cannot be read"):
        load_batch(path)


# --- the command -----------------------------------------------------------------------------------------------------


def make_run(folder: Path) -> Path:
    """Make a run directory with one incident with a saved batch, and the program that failed."""
    (folder / "train.py").write_text(TRAIN)
    namespace: dict[str, Any] = {}
    exec(TRAIN, namespace)
    _, model = namespace["build"]()
    x = torch.randn(6, 4)
    x[2] = 0.0
    run = folder / "run"
    assert Quarantine(run_dir=run).save(7, capture_of({"x": x}, model=model)) is not None
    (run / "incidents.jsonl").write_text(json.dumps({"step": 7}) + "\n" + json.dumps({"step": 8}) + "\n")
    return run


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "steadygrad", "diagnose", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_new_process_replays_the_incident(tmp_path: Path) -> None:
    make_run(tmp_path)

    done = run_command(tmp_path, "run", "--incident", "0", "--entry", "train:build", "--json")

    assert done.returncode == 1, done.stderr
    expected = json.loads(done.stdout)
    cause = expected["cause"]
    assert (cause["op"], cause["phase"], cause["step"], cause["samples"]) == ("aten.sqrt", "backward", 7, [2])
    assert cause["source"] == "return lengths.sqrt().mean()"


ODD = """
import sys
import torch
print("hello from the module")
number = 3
layer = torch.nn.Linear(9, 1)

def other_model(batch):
    return layer(batch["x"]).mean()

def no_loss(batch):
    return "text"

def breaks(batch):
    raise KeyError("x")

def builder_that_fails():
    raise RuntimeError("no data here")
"""


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run of `make_run` in the current folder, next to modules that fail in various ways."""
    make_run(tmp_path)
    (tmp_path / "odd_entries.py").write_text(ODD)
    (tmp_path / "entry_without_syntax.py").write_text("def f(:\n")
    (tmp_path / "entry_that_exits.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("train", "odd_entries", "entry_that_exits"):  # from an earlier test or another program
        sys.modules.pop(name, None)
    yield tmp_path
    for name in ("train", "odd_entries", "entry_that_exits"):
        sys.modules.pop(name, None)


def test_a_healthy_replay_exits_with_0_and_a_missing_batch_with_2(
    run_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", "run", "--incident", "0", "--entry", "train:healthy"]) == 0
    assert capsys.readouterr().out == "The replayed step is healthy.\n"
    assert main(["diagnose", "run", "--incident", "1", "--entry", "train:build"]) == 2
    assert "whose batch was not kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("odd_entries:nothing", "odd_entries:nothing is not a function. Name one"),
        ("odd_entries:number", "is not a function, it is of type int"),
        ("odd_entries:builder_that_fails", "RuntimeError: no data here ("),
        ("odd_entries:other_model", "the weights saved with the batch do not fit the Linear of --entry"),
        ("no_such_module:f", "cannot be imported from"),
        ("entry_without_syntax:f", "SyntaxError: invalid syntax (entry_without_syntax.py, line 1)"),
        ("entry_that_exits:f", "SystemExit: 0"),
    ],
)
def test_a_failing_entry_prints_one_error_and_exits_with_2(
    run_here: Path, entry: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", "run", "--entry", entry]) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("entry", "expected"), [("no_loss", "the loss must be a tensor, got str"), ("breaks", "KeyError")]
)
def test_a_step_that_cannot_be_replayed_is_neither_healthy_nor_diagnosed(
    run_here: Path, entry: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_here / "weightless.py").write_text(ODD.replace("Linear(9, 1)", "Identity()"))
    assert main(["diagnose", "run", "--entry", f"weightless:{entry}"]) == 2
    assert expected in capsys.readouterr().out
    sys.modules.pop("weightless")


def test_output_of_the_module_does_not_corrupt_the_json(run_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_here / "train.py").write_text(TRAIN + "\nprint('importing')\n")
    assert main(["diagnose", "run", "--entry", "train:build", "--json"]) == 1
    said = capsys.readouterr()
    assert (
        json.loads(said.out)["cause"]["op"] == "aten.sqrt"
    )  # the last incident has no batch, so the previous one is used
    assert "importing" in said.err


@pytest.mark.parametrize(
    ("incidents", "arguments", "expected"),
    [
        (b"", (), "run has no incident"),
        (b'{"step": 7', (), "none has a batch in run/batches"),
        (b'{"step": 7', ("--incident", "0"), "line 0 of run/incidents.jsonl is truncated or corrupt"),
        (b"\xff\xfe\n[1]\n", (), "none has a batch"),
        (b'{"step": 7}\n', ("--incident", "5"), "Use --incident 0 to 0"),
        (b'{"step": 7}\n', ("--incident", "-1"), "there is no incident -1"),
        (b'{"step": 7}\n', ("--weights", "train.py"), "--weights train.py is not a safetensors file"),
    ],
)
def test_a_corrupt_or_truncated_record_is_reported(
    run_here: Path, incidents: bytes, arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_here / "run" / "incidents.jsonl").write_bytes(incidents)
    assert main(["diagnose", "run", "--entry", "train:build", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert "Traceback" not in said


def test_without_an_entry_it_explains_what_one_is(run_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "run"]) == 2
    assert "--entry train:step" in capsys.readouterr().err
