"""Trackers, clip strategies, policies and progress lines, by the same names in every recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steadygrad import ConfigError, Policy, Trainer, TrainerConfig, ZClip
from steadygrad.cli import main
from steadygrad.config.trainer import CLIPS, POLICIES
from steadygrad.trainer.choices import choose_clip, choose_policy
from steadygrad_recipes.clip6d import Config as Clip6d
from steadygrad_recipes.cod import Config as Cod
from steadygrad_recipes.mmdit.config import TrainingConfig
from steadygrad_recipes.seo import Config as Seo
from steadygrad_recipes.sft import Config as Sft


@pytest.mark.parametrize("config", [Clip6d, Cod, TrainingConfig, Seo, Sft])
def test_every_recipe_has_them(config: Any) -> None:
    names = {field.name for field in dataclasses.fields(config)}

    assert {"tensorboard", "wandb", "clip", "policy", "log_every", "strategy"} <= names
    with pytest.raises(ConfigError, match="zclipp"):
        config(clip="zclipp")
    with pytest.raises(ConfigError, match="angry"):
        config(policy="angry")


def test_every_name_makes_a_strategy_and_a_policy() -> None:
    made = {name: choose_clip(name, 0.5) for name in CLIPS}

    assert made["none"] is None
    assert made["zclip"] == ZClip(max_norm=0.5)
    assert len({type(clip) for clip in made.values()}) == len(CLIPS)
    assert choose_policy("eager") == Policy.eager()
    assert all(isinstance(choose_policy(name), Policy) for name in POLICIES)


def train(tmp_path: Path, **settings: Any) -> list[str]:
    lines: list[str] = []
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    config = TrainerConfig(epochs=2, device="cpu", **settings)
    trainer = Trainer(nn.Linear(3, 1), config, loss_fn=nn.functional.mse_loss, run_dir=tmp_path, tell=lines.append)
    trainer.train(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))
    return lines


def test_a_line_every_few_steps_tells_loss_norm_rate_and_time_left(tmp_path: Path) -> None:
    lines = [line for line in train(tmp_path, log_every=5) if line.startswith("Step ")]

    assert [line.partition(":")[0] for line in lines] == ["Step 5/16", "Step 10/16", "Step 15/16"]
    assert all(word in line for line in lines for word in ("loss=", "grad=", "lr=0.001", " left"))


def test_the_log_has_the_norm_before_and_after_clipping(tmp_path: Path) -> None:
    train(tmp_path, max_grad_norm=0.1)
    line = (tmp_path / "train.log").read_text().splitlines()[0]

    assert "grad_norm=" in line
    assert "grad_norm_after=0.1" in line


def test_tensorboard_from_python_and_from_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path / "a", tensorboard=True)
    code = main(
        ["train", "mmdit", "--quick", "--training.max-steps", "2", "--tensorboard", "--clip", "zclip", "--policy",
         "observe", "--run-dir", str(tmp_path / "b")]
    )  # fmt: skip

    assert code == 0
    for run in ("a", "b"):
        assert list((tmp_path / run / "tensorboard").glob("events*"))
    assert '"zclip"' in (tmp_path / "b" / "run.json").read_text()


def test_wandb_runs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    train(tmp_path, wandb=True)

    assert list((tmp_path / "wandb").glob("offline-run-*"))
