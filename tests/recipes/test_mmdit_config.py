"""The settings of the mmdit recipe are those of the document it comes from, and its YAML is read as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadygrad.config import Precision
from steadygrad.config.plain import build, read_mapping, to_plain
from steadygrad.errors import ConfigError
from steadygrad_recipes.mmdit import QUICK, Config
from steadygrad_recipes.mmdit.config import MMDiTConfig, OptimizerConfig, TrainingConfig
from steadygrad_recipes.mmdit.trainer import make_trainer_config

RECOMMENDED = """
optimizer:
  lr: 5e-5  # Reduced from 1e-4
  grad_clip_norm: 0.5  # Reduced from 1.0

training:
  warmup_steps: 2000  # Increased warmup
  dtype: bf16  # Keep bf16 but add safeguards
  gradient_accumulation_steps: 2  # Reduce effective batch size
  train_batch_size: 4  # Keep same per-GPU batch size

loss:
  loss_scale: 1.0  # Keep at 1.0
  text_loss_weight: 1.0
  latent_loss_weight: 0.1  # Reduce latent loss weight
"""


def test_the_recommended_yaml_is_read_and_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "seed.yaml").write_text(RECOMMENDED)

    config = build(Config, read_mapping(tmp_path / "seed.yaml"))

    assert config == MMDiTConfig()
    assert (config.optimizer.lr, config.optimizer.grad_clip_norm) == (5e-5, 0.5)
    training = config.training
    assert (training.warmup_steps, training.dtype) == (2000, Precision.BF16)
    assert (training.gradient_accumulation_steps, training.train_batch_size) == (2, 4)
    loss = config.loss
    assert (loss.loss_scale, loss.text_loss_weight, loss.latent_loss_weight, loss.ceiling) == (1.0, 1.0, 0.1, 100.0)


def test_it_validates_and_saves_every_1000_steps() -> None:
    training = MMDiTConfig().training

    assert (training.eval_every, training.save_every) == (1000, 1000)


def test_the_shared_loop_is_given_these_settings() -> None:
    shared = make_trainer_config(MMDiTConfig())

    assert (shared.learning_rate, shared.max_grad_norm, shared.accumulation_steps) == (5e-5, 0.5, 2)
    assert (shared.precision, shared.warmup_steps, shared.schedule) == ("bf16", 2000, "cosine")
    assert (shared.eval_every, shared.save_every, shared.protect) == (1000, 1000, True)


def test_no_clip_norm_means_1_and_not_1e6() -> None:
    assert make_trainer_config(MMDiTConfig(optimizer=OptimizerConfig(grad_clip_norm=0.0))).max_grad_norm == 1.0


def test_settings_come_back_from_plain_values() -> None:
    config = MMDiTConfig(training=TrainingConfig(dtype="fp16", ema_decay=0.99))  # type: ignore[arg-type]

    assert build(Config, to_plain(config)) == config


def test_quick_changes_only_fields_that_exist() -> None:
    for name in QUICK:
        part, _, inner = name.partition(".")
        assert hasattr(getattr(MMDiTConfig(), part), inner)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model": {"hidden_size": 100, "num_heads": 3}}, "multiple of twice num_heads"),
        ({"diffusion": {"prediction": "x0"}}, "be one of flow, epsilon, got 'x0'"),
        ({"training": {"dtype": "bf8"}}, "must be one of bf16, fp16, fp32"),
        ({"loss": {"latent_loss_weight": -1.0}}, "not below 0, got -1.0"),
        ({"data": {"val_fraction": 1.0}}, "be below 1"),
        ({"training": {"ema_decay": 1.0}}, "between 0 and 1"),
        ({"optimizer": {"learning_rate": 1.0}}, "optimizer.learning_rate: unknown; OptimizerConfig has beta2"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Config, values)

    assert told in str(caught.value)
