"""The settings that recipes share: what each of their configs refuses, and what none of them may lose."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import pytest

from steadygrad import ConfigError
from steadygrad.cli.recipe_fields import read_help
from steadygrad_recipes.clip6d.config import Clip6dConfig
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.mmdit.config import LossConfig, OptimizerConfig, SamplingConfig, TrainingConfig
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.settings import TrainingSettings
from steadygrad_recipes.sft.config import SftConfig

CONFIGS = (Clip6dConfig, CodConfig, SftConfig, TrainingConfig)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", True),
        ("epochs", "3"),
        ("eval_every", 0),
        ("save_every", -1),
        ("keep_last", None),
        ("seed", -1),
    ],
)
def test_every_recipe_refuses_what_no_training_can_be_told(config: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{config.__name__}\.{name} must be a whole number, at least \d, got "):
        config(**{name: value})


@pytest.mark.parametrize(
    ("config", "name"),
    [(Clip6dConfig, "learning_rate"), (CodConfig, "lr"), (SftConfig, "learning_rate"), (OptimizerConfig, "lr")],
)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "1"])
def test_a_learning_rate_that_cannot_train_is_refused(config: Any, name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{config.__name__}\.{name} must be a finite number above 0, got {value!r}"
    ):
        config(**{name: value})


def test_a_threshold_may_be_infinite_which_is_none() -> None:
    assert SftConfig(max_grad_norm=math.inf).max_grad_norm == math.inf
    assert OptimizerConfig(grad_clip_norm=math.inf).grad_clip_norm == math.inf
    assert LossConfig(ceiling=math.inf).ceiling == math.inf
    assert SamplingConfig(temperature=math.inf).temperature == math.inf


@pytest.mark.parametrize("config", CONFIGS)
def test_a_shared_field_is_explained_where_a_recipe_only_changes_its_default(config: Any) -> None:
    shared = read_help(TrainingSettings)
    found = read_help(config)

    assert all(shared.values())
    assert all(found[item.name] for item in dataclasses.fields(TrainingSettings))
    assert found["eval_every"] == shared["eval_every"]


def test_a_text_below_a_field_wins_over_the_one_it_inherits_and_none_does_not() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Own(TrainingSettings):
        epochs: int = 3
        seed: int = 1
        """Mine."""

    found = read_help(Own)

    assert (found["epochs"], found["seed"]) == ("Passes over the training data.", "Mine.")
    assert (Own().epochs, Own().seed) == (3, 1)


def test_the_constructors_take_the_keywords_of_the_trainings_they_follow() -> None:
    UltraOptimizedConfig(max_grad_norm=1.0, use_amp=True, learning_rate=1e-3, weight_decay=1e-4, patience=10)
    CodConfig(dataset_path=None, batch_size=2, accumulation_steps=4, lr=2.5e-4, epochs=140, stage1_epochs=30)
    Clip6dConfig(use_stable_loss=True, stable_loss_version=1, gradient_clip_value=1.0, log_frequency=100, batch_size=4)
    SftConfig(learning_rate=2e-4, max_grad_norm=1.0, warmup_steps=50, accumulation_steps=2, weight_decay=0.0, seed=3)
    TrainingConfig(warmup_steps=2000, dtype="bf16", gradient_accumulation_steps=2, train_batch_size=4, epochs=1)


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ("seo", ["UltraOptimizedConfig", "UltraOptimizedSEOMetricsModule", "UltraOptimizedSEOTrainer"]),
        (
            "clip6d",
            [
                *(
                    "EnhancedLightningCLIPModule",
                    "EnhancedTrainingMixin",
                    "GradientHealthMonitor",
                    "ImprovedActivations",
                ),
                *("StableLossFunctions", "add_gradient_checkpointing", "get_stable_loss_function"),
            ],
        ),
        ("cod", ["CamouflageNet", "CodConfig", "CodTrainer"]),
        ("mmdit", ["MMDiT", "MMDiTConfig", "MMDiTTrainer"]),
        ("sft", ["GradientMonitoringCallback", "SftConfig", "safe_compute_loss", "train_model"]),
    ],
)
def test_the_names_of_a_document_are_importable_from_its_recipe(recipe: str, names: list[str]) -> None:
    module = importlib.import_module(f"steadygrad_recipes.{recipe}")

    assert [name for name in names if not callable(getattr(module, name, None))] == []
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = module.Nonsense
