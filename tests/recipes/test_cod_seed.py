"""What the training's own account promises, literally: flags, defaults, rates, scaler, lines; and settings refused."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from steadygrad.errors import ConfigError
from steadygrad.facts import StepRecord
from steadygrad_recipes.cod import QUICK, TAKES_WEIGHTS, CodConfig, words
from steadygrad_recipes.cod.model import CamouflageNet
from steadygrad_recipes.cod.stages import free_backbone, freeze_backbone, make_cycle, make_optimizer, make_stages
from steadygrad_recipes.cod.trainer import CodTrainer

TINY: dict[str, Any] = {**QUICK, "num_made": 16, "epochs": 2, "stage1_epochs": 1, "device": "cpu"}


def test_the_defaults_are_those_of_the_account() -> None:
    config = CodConfig()
    told = {
        "dataset_path": None,
        "batch_size": 2,
        "accumulation_steps": 4,
        "lr": 0.00025,
        "epochs": 140,
        "stage1_epochs": 30,
        "grad_clip": 0.5,
        "keep_last": 3,
        "eval_every": 1000,
        "save_every": 1000,
    }
    assert {name: getattr(config, name) for name in told} == told
    assert config.stage2_lr == 0.000125
    assert config.stage2_backbone_lr == pytest.approx(0.0000125, rel=1e-12)
    assert config.stage2_scaler == {
        "init_scale": 2.0**10,
        "growth_factor": 1.5,
        "backoff_factor": 0.5,
        "growth_interval": 1000,
    }


def test_every_flag_of_the_account_is_taken_by_the_command() -> None:
    pytest.importorskip("click")
    from steadygrad.cli.recipes import find_recipe
    from steadygrad.cli.train import RecipeCommand, make_config
    from steadygrad_recipes import cod

    arguments = (
        "--dataset-path /path/to/COD10K --resume ./checkpoints/best_model.pth --lr 0.000125 --batch-size 2 "
        "--accumulation-steps 4 --epochs 140 --stage1-epochs 30 --grad-clip 0.3"
    )
    command = RecipeCommand(find_recipe("cod"))
    request = command.read_request(command.make_context("cod", arguments.split()))
    config = make_config(cod, request)
    assert request.resume == "./checkpoints/best_model.pth"
    assert request.run_dir is request.predict is request.config is None
    assert config == CodConfig(dataset_path="/path/to/COD10K", lr=0.000125, grad_clip=0.3)


def test_every_field_is_explained_in_the_help() -> None:
    pytest.importorskip("click")
    from steadygrad.cli.recipe_fields import list_fields

    fields = {item.opts[0]: item.help for item in list_fields(CodConfig)}
    assert len(fields) == len(dataclasses.fields(CodConfig))
    assert all(len(text) > 10 for text in fields.values()), [flag for flag, text in fields.items() if len(text) <= 10]
    assert fields["--grad-clip"] == "Maximum gradient norm for clipping (lower = more stable)."


def test_every_field_and_its_default_are_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes" / "cod.md").read_text(encoding="utf-8")
    for item in dataclasses.fields(CodConfig):
        default = str(item.default).lower() if item.default in (None, True, False) else item.default
        assert f"| `--{item.name.replace('_', '-')}` | {default} | " in page


def test_the_lines_of_the_account_are_printed_literally() -> None:
    metrics = {
        "loss": 2.37,
        "val_iou": 0.5845,
        "val_dice": 0.735,
        "val_mae": 0.0421,
        "val_s_measure": 0.7312,
        "grad_norm_mean": 0.381,
        "grad_norm_max": 0.498,
    }
    bar = words.spell_bar(44, 140, 125, 125, 345.0, 2.37, 0.423)
    assert bar == "Epoch 44/140: 100%|████████| 125/125 [05:45<00:00, loss=2.37, grad=0.423]"
    assert words.spell_metrics(metrics).startswith("Loss: 2.3700 | IoU: 0.5845 | Dice: 0.7350")
    assert words.spell_norms(metrics) == "   Gradient norm - Avg: 0.381, Max: 0.498"
    assert words.spell_high_norm(2.5, 0.5) == "⚠️  High gradient norm detected: 2.50 (clipped to 0.5)"
    assert words.spell_advice(0.5) == "   Consider reducing --grad-clip to 0.3 or --lr by 50%."
    # It is no lower there
    assert words.spell_advice(0.3) == words.spell_advice(0.1) == "   Consider reducing --lr by 50%."
    assert words.spell_bad_gradients(5, float("inf")) == [
        "❌ NaN/Inf detected in gradients at batch 5!",
        "   Gradient norm: inf",
        "   This indicates gradient explosion.",
    ]


def record(step: int, grad_norm: float) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0,
        grad_norm=grad_norm,
        clip_coefficient=1.0,
        clipped=False,
        skipped=False,
        num_nonfinite=0,
        learning_rates=(1.0,),
        loss_scale=None,
        num_microbatches=1,
        num_dropped_microbatches=0,
        time_seconds=0.0,
    )


def test_the_early_warning_comes_above_five_times_the_threshold_once_an_epoch() -> None:
    told: list[str] = []
    trainer = CodTrainer(CodConfig(**TINY), tell=told.append)
    for step, norm in enumerate((2.5, 2.51, 3.0)):
        trainer.end_step(record(step, norm))
    assert told == ["⚠️  High gradient norm detected: 2.51 (clipped to 0.5)"]


def test_stage_1_freezes_the_backbone_and_stage_2_frees_it() -> None:
    model = CamouflageNet("tiny")
    freeze_backbone(model)
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"decoder", "head"}
    free_backbone(model)
    assert all(p.requires_grad for p in model.parameters())


def test_rates_of_the_stages_are_those_of_the_account() -> None:
    model, config = CamouflageNet("tiny"), CodConfig()
    first, second = (make_optimizer(model, config, stage=stage, fused=False) for stage in (1, 2))
    assert [group["lr"] for group in first.param_groups] == [0.00025]
    assert [group["lr"] for group in second.param_groups] == pytest.approx([0.000125, 0.0000125])
    held = {id(p) for group in second.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    assert {id(p) for p in second.param_groups[1]["params"]} == {id(p) for p in model.backbone.parameters()}


def test_each_stage_cycles_from_zero_to_its_highest_rate_and_back() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.00025)
    schedule = make_cycle(optimizer, 100, 0.1)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] < 0.1 * 0.00025
    assert max(rates) == pytest.approx(0.00025)
    assert rates.index(max(rates)) == 10
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_stage_2_has_the_conservative_scaler_and_stage_1_the_usual_one() -> None:
    stages = make_stages(CodConfig(), fused=False, make_scaler=lambda settings: torch.amp.GradScaler("cpu", **settings))
    assert [(stage.name, stage.epochs) for stage in stages] == [("stage 1", 30), ("stage 2", 110)]
    usual, conservative = (stage.scaler() for stage in stages if stage.scaler is not None)
    assert usual is not None
    assert conservative is not None
    assert (usual.get_scale(), usual.get_growth_factor()) == (65536.0, 2.0)
    assert conservative.get_scale() == 1024.0
    assert conservative.get_growth_factor() == 1.5
    assert conservative.get_backoff_factor() == 0.5
    assert conservative.get_growth_interval() == 1000


def test_a_backbone_with_weights_keeps_its_statistics_and_another_does_not(tmp_path: Path) -> None:
    torch.save({**CamouflageNet("tiny").backbone.state_dict(), "fc.weight": torch.zeros(2, 2)}, tmp_path / "resnet.pth")
    given, made = CamouflageNet("tiny", weights=tmp_path / "resnet.pth"), CamouflageNet("tiny")
    before = {name: value.clone() for name, value in given.backbone.named_buffers()}
    for model in (given, made):
        model.train()(torch.randn(2, 3, 32, 32))
    assert all(torch.equal(value, before[name]) for name, value in given.backbone.named_buffers())
    assert not torch.equal(made.backbone.bn1.running_mean, torch.zeros(8))  # type: ignore[arg-type]


def test_weights_of_another_backbone_are_refused_by_name(tmp_path: Path) -> None:
    state = CamouflageNet("tiny").backbone.state_dict()
    state["conv1.weight"] = torch.zeros(9, 3, 7, 7)
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(ConfigError, match=r"backbone_weights: .*other.pth does not fit.*conv1.weight"):
        CamouflageNet("tiny", weights=tmp_path / "other.pth")


@pytest.mark.parametrize("size", ["resnet18", "resnet50"])
def test_the_real_backbones_carry_the_usual_names(size: str) -> None:
    with torch.device("meta"):
        names = set(CamouflageNet(size).backbone.state_dict())
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer4.1.bn2.bias"} <= names
    assert ("layer3.5.conv3.weight" in names) == (size == "resnet50")
    assert len(names) == {"resnet18": 120, "resnet50": 318}[size]  # those files without their classifier


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, r"CodConfig\.lr must be a finite number above 0, got 0\.0\. The default is 0\.00025"),
        ({"stage1_epochs": 140}, r"stage1_epochs must be less than epochs, which is 140"),
        ({"image_size": 100}, r"image_size must be a multiple of 32, at least 64, got 100"),
        ({"model_size": "vgg"}, r"model_size must be one of tiny, resnet18"),
        ({"precision": "fp8"}, r"precision must be one of auto, fp32"),
        ({"batch_size": 0}, r"batch_size must be a whole number, at least 1"),
        ({"protect": "no"}, r"protect must be True or False"),
        ({"stage2_growth_factor": 1.0}, r"stage2_growth_factor must be above 1"),
        ({"ema_decay": 1.0}, r"ema_decay must be at least 0 and below 1"),
        ({"side_weight": -1.0}, r"side_weight must be a finite number, not below 0"),
    ],
)
def test_wrong_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CodConfig(**changes)


def test_settings_can_be_listed_without_torch() -> None:
    code = "import sys, steadygrad_recipes.cod as cod; cod.Config(**cod.QUICK); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_a_file_to_resume_from_begins_a_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--resume ./checkpoints/best_model.pth` of another program: its weights, in a new folder."""
    pytest.importorskip("click")
    from steadygrad.cli.recipe_folder import choose_folder, is_weights
    from steadygrad_recipes.cod.recipe import find_best

    monkeypatch.chdir(tmp_path)
    Path("checkpoints").mkdir()
    model = CamouflageNet("tiny")
    torch.save({"model_state_dict": model.state_dict(), "args": argparse.Namespace(lr=1)}, "checkpoints/best_model.pth")
    resume = "./checkpoints/best_model.pth"
    assert is_weights(resume)
    assert TAKES_WEIGHTS
    assert choose_folder("cod", None, resume, takes_weights=True).parent == Path("runs")
    assert choose_folder("cod", "here", resume, takes_weights=True) == Path("here")
    trainer = CodTrainer(CodConfig(model_size="tiny", device="cpu", seed=5))
    assert trainer.resume(find_best(resume, Path("runs"))) == 0
    assert all(torch.equal(own, theirs) for own, theirs in zip(trainer.model.parameters(), model.parameters()))
