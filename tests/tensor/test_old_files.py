"""Files of other programs: tensors and plain values are read without running code, the rest is named."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from steadygrad import Trainer, TrainerConfig, load_checkpoint
from steadygrad.cli import main
from steadygrad.errors import CheckpointError, UnsafePickleError
from steadygrad.scan.checkpoint_scan import scan_checkpoint
from steadygrad.scan.values import load_values


@dataclasses.dataclass
class Config:
    """A program's settings."""

    lr: float = 1e-3
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


class Mode(enum.Enum):
    """Pickled by a call of the class."""

    FAST = "fast"


class Scores(dict[str, float]):
    """A custom container."""


class Payload:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


STRANGERS: dict[str, Any] = {
    "dataclass": Config(),
    "enum": Mode.FAST,
    "container": Scores(iou=0.5),
    "class": Config,
    "list of them": [Config(), Config(lr=1.0)],
}


def save_old(path: Path, stranger: Any, *, legacy: bool = False) -> nn.Module:
    model = make_model()
    content = {
        "model_state_dict": model.state_dict(),
        "config": stranger,
        "args": argparse.Namespace(lr=0.1, out=Path("runs") / "a"),
        "best": numpy.float64(0.25),
        "count": numpy.int32(7),
        "curve": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
        "columns": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        "epoch": 3,
        "dtype": torch.float16,
    }
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    return model


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "stream"])
@pytest.mark.parametrize("what", list(STRANGERS))
def test_tensors_and_plain_values_are_read_and_the_rest_is_named(tmp_path: Path, what: str, legacy: bool) -> None:
    model = save_old(tmp_path / "old.pth", STRANGERS[what], legacy=legacy)
    values, left_out = load_values(tmp_path / "old.pth")
    assert all(torch.equal(values["model_state_dict"][name], value) for name, value in model.state_dict().items())
    assert (values["best"], values["count"], values["epoch"]) == (0.25, 7, 3)
    assert values["args"].lr == 0.1
    assert str(values["args"].out) == "runs/a"
    assert values["dtype"] is torch.float16
    for name in ("curve", "columns"):
        torch.testing.assert_close(values[name].double(), torch.arange(6.0).reshape(2, 3).double(), rtol=0, atol=0)
    assert left_out
    assert all(name.startswith(f"{__name__}.") for name in left_out)
    if what != "list of them":
        assert "config" not in values or values["config"] is None


def test_weights_are_loaded_from_such_a_file(tmp_path: Path) -> None:
    saved = save_old(tmp_path / "old.pth", Config())
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    report = load_checkpoint(tmp_path / "old.pth", model)
    assert report.prefix == "model_state_dict."
    assert all(torch.equal(own, theirs) for own, theirs in zip(model.parameters(), saved.parameters()))


def test_a_scan_names_what_it_left_out_and_still_finds_a_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_old(tmp_path / "old.pth", Config())
    assert main(["scan", str(tmp_path / "old.pth")]) == 0
    assert "Config" in capsys.readouterr().out
    torch.save({"w": torch.tensor([torch.nan]), "config": Config()}, tmp_path / "bad.pth")
    assert main(["scan", "--json", str(tmp_path / "bad.pth")]) == 1
    found = json.loads(capsys.readouterr().out)["checkpoints"][0]
    assert found["num_bad_tensors"] == 1
    assert any("left out" in note for note in found["notes"])


def test_a_trainer_loads_the_model_of_such_a_file_and_reports_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save_old(tmp_path / "old.pth", Config())
    trainer = Trainer(make_model(), TrainerConfig(device="cpu"), loss_fn=nn.functional.mse_loss)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    with caplog.at_level(logging.WARNING, logger="steadygrad"):
        assert trainer.load_checkpoint(tmp_path / "old.pth")
    assert all(torch.equal(own, theirs) for own, theirs in zip(trainer.model.parameters(), saved.parameters()))
    assert "test_old_files.Config" in caplog.text


def test_resuming_from_a_file_starts_a_training_with_its_weights(tmp_path: Path) -> None:
    saved = save_old(tmp_path / "best_model.pth", Config())
    seen: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not seen:
            seen.extend(p.detach().clone() for p in trainer.model.parameters())
        return (output - target).square().mean()

    config = TrainerConfig(epochs=1, device="cpu", ema_decay=0.9)
    trainer = Trainer(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), config, loss_fn=loss)
    assert trainer.resume(tmp_path / "best_model.pth") == 0
    trainer.train([(torch.ones(2, 4), torch.zeros(2, 1))])
    assert all(torch.equal(own, theirs) for own, theirs in zip(seen, saved.parameters()))


def test_training_arguments_are_left_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.save({"w": torch.ones(2), "args": transformers.TrainingArguments(str(tmp_path))}, tmp_path / "hf.pt")
    values, left_out = load_values(tmp_path / "hf.pt")
    assert torch.equal(values["w"], torch.ones(2))
    assert "transformers.training_args.TrainingArguments" in left_out
    assert scan_checkpoint(tmp_path / "hf.pt").is_clean


# --- what is still refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True], ids=["alone", "with settings"])
def test_a_file_that_calls_a_function_is_refused_and_run_only_if_trusted(tmp_path: Path, hidden: bool) -> None:
    mark = tmp_path / "mark"
    content = {"0.weight": torch.ones(1, 1), "x": Payload(mark)}
    torch.save({**content, "config": Config()} if hidden else content, tmp_path / "odd.pt")
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    for read in (load_values, scan_checkpoint):
        with pytest.raises(UnsafePickleError, match=r"posix\.mkdir"):
            read(tmp_path / "odd.pt")  # type: ignore[operator]
    with pytest.raises(UnsafePickleError, match="trust=True"):
        load_checkpoint(tmp_path / "odd.pt", model)
    assert main(["scan", str(tmp_path / "odd.pt")]) == 2
    assert not mark.exists()

    load_checkpoint(tmp_path / "odd.pt", model, trust=True)
    assert mark.exists()
    assert torch.equal(model[0].weight, torch.ones(1, 1))  # type: ignore[arg-type]
    mark.rmdir()
    assert main(["scan", "--trust", str(tmp_path / "odd.pt")]) == 0
    assert mark.exists()


def test_a_whole_model_is_refused_and_read_if_trusted(tmp_path: Path) -> None:
    saved = make_model()
    torch.save(saved, tmp_path / "model.pt")
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    with pytest.raises(UnsafePickleError):
        load_checkpoint(tmp_path / "model.pt", model)
    load_checkpoint(tmp_path / "model.pt", model, trust=True)
    assert all(torch.equal(own, theirs) for own, theirs in zip(model.parameters(), saved.parameters()))


def test_trust_does_not_make_a_damaged_file_readable(tmp_path: Path) -> None:
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match="even with trust"):
        load_checkpoint(tmp_path / "cut.pt", make_model(), trust=True)


# --- folders and formats ----------------------------------------------------------------------------------------------


def test_a_scan_of_a_folder_is_recursive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    torch.save({"a": torch.ones(2)}, tmp_path / "ok.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "deep" / "ok.pt")
    torch.save({"a": torch.tensor([1.0, torch.nan])}, tmp_path / "deep" / "er" / "bad.pt")
    assert main(["scan", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "bad.pt" in said
    assert said.count("ok.pt") == 2


@pytest.mark.parametrize("legacy", [False, True], ids=["archive", "stream"])
def test_clean_writes_safetensors_if_the_name_says_so(tmp_path: Path, legacy: bool) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {
        "a": torch.tensor([1.0, torch.nan, torch.inf]),
        "b": torch.arange(3),
        "c": torch.ones(2, 3).half().t(),
        "mask": torch.tensor([0.0, -torch.inf]),
    }
    torch.save(weights, tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    assert main(["clean", str(tmp_path / "x.pt"), str(tmp_path / "y.safetensors"), "--value", "2"]) == 0
    cleaned = safetensors.load_file(tmp_path / "y.safetensors")
    assert torch.equal(cleaned["a"], torch.tensor([1.0, 2.0, 2.0]))
    assert all(torch.equal(cleaned[name], weights[name]) for name in ("b", "c", "mask"))


def test_clean_of_a_folder_to_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    torch.save({"a": torch.ones(2)}, tmp_path / "many" / "x.pt")
    assert main(["clean", str(tmp_path / "many"), str(tmp_path / "y.safetensors")]) == 2
    assert not (tmp_path / "y.safetensors").exists()
