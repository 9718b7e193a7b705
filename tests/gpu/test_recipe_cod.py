"""The camouflage training at real size on a GPU: ResNet-50, 352 pixels, fp16 and bf16, both stages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from steadygrad.testing import poison_gradient
from steadygrad_recipes.cod import CodConfig, train
from steadygrad_recipes.cod.data import open_datasets, open_loaders
from steadygrad_recipes.cod.trainer import CodTrainer

REAL: dict[str, Any] = {
    "num_made": 12,
    "accumulation_steps": 2,
    "epochs": 2,
    "stage1_epochs": 1,
    "model_size": "resnet50",
    "image_size": 352,
    "device": "cuda",
    "num_pictures": 1,
}


def train_exploding(**changes: Any) -> tuple[CodTrainer, dict[str, Any]]:
    trainer = CodTrainer(CodConfig(**{**REAL, **changes}))
    weight = trainer.model.get_parameter("decoder.laterals.0.weight")
    poison_gradient(weight, at={9}, value=math.inf)  # the fourth batch of stage 2
    train_set, test_set, _ = open_datasets(trainer.cod)
    return trainer, trainer.train(*open_loaders(trainer.cod, train_set, test_set))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_both_stages_run_at_real_size_and_survive_an_explosion(precision: str) -> None:
    trainer, stats = train_exploding(precision=precision)
    assert stats["num_steps"] == 6
    assert stats["num_skipped"] >= 1
    assert sum(p.numel() for p in trainer.model.parameters()) > 23_000_000
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert all(math.isfinite(one["loss"]) for one in stats["val_history"])
    scale = stats["loss_scale"]
    if precision == "fp16":
        assert scale is not None
        assert scale <= 1024.0  # stage 2's scaler: it starts there, and the overflow has halved it
    else:
        assert scale is None


def test_auto_selects_fp16_with_a_fused_optimizer_on_cuda() -> None:
    trainer = CodTrainer(CodConfig(**{**REAL, "model_size": "tiny", "image_size": 64}))
    assert trainer.guard_config.autocast is not None
    assert trainer.guard_config.autocast.value == "fp16"
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert all(group["fused"] for group in trainer.optimizer.param_groups)


def test_without_protection_an_overflow_ends_the_training() -> None:
    config = CodConfig(**{**REAL, "stage2_init_scale": 2.0**40, "stage1_epochs": 0, "epochs": 1}, protect=False)
    trainer = CodTrainer(config)
    train_set, test_set, _ = open_datasets(config)
    with pytest.raises(ValueError, match=r"Training stopped due to NaN/Inf gradients\."):
        trainer.train(*open_loaders(config, train_set, test_set))


def test_the_recipe_writes_checkpoints_and_pictures(tmp_path: Path) -> None:
    class Console:
        def say(self, text: str = "", style: str = "") -> None:
            pass

    settings = {**REAL, "model_size": "resnet18", "image_size": 128, "precision": "bf16"}
    assert train(CodConfig(**settings), run_dir=tmp_path, resume=None, console=Console()) == 0
    assert len([one for one in (tmp_path / "checkpoints").iterdir() if one.is_dir()]) == 2
    assert (tmp_path / "pictures" / "prediction-00.png").stat().st_size > 1000
