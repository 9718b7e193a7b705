"""The names, defaults, methods and lines of the SEO training, one by one. The five tests it names keep their names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from seo_trainings import make_training, train

from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.model import UltraOptimizedSEOMetricsModule
from steadygrad_recipes.seo.trainer import MOST_WEIGHT_DECAY, UltraOptimizedSEOTrainer

PARTS = ["model_healthy", "gradients_healthy", "losses_healthy", "parameters_healthy", "overall_healthy"]


@pytest.fixture(autouse=True)
def _every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="steadygrad")


def make_trainer() -> UltraOptimizedSEOTrainer:
    config = UltraOptimizedConfig(
        max_grad_norm=1.0,  # Enable gradient clipping
        use_amp=True,  # Enable automatic mixed precision
        learning_rate=1e-3,  # Initial learning rate
        weight_decay=1e-4,  # Initial weight decay
        patience=10,  # Early stopping patience
    )
    model = UltraOptimizedSEOMetricsModule(config)
    return UltraOptimizedSEOTrainer(model, config)


def fill_gradients(trainer: UltraOptimizedSEOTrainer, scale: float = 100.0) -> None:
    for parameter in trainer.model.parameters():
        parameter.grad = scale * torch.ones_like(parameter)


def test_the_defaults_are_those_of_the_seed() -> None:
    config = UltraOptimizedConfig()

    assert dataclasses.is_dataclass(UltraOptimizedConfig)
    assert config.max_grad_norm == 1.0
    assert config.use_amp is True
    assert config.learning_rate == 1e-3
    assert config.weight_decay == 1e-4
    assert config.patience == 10
    assert (config.eval_every, config.save_every) == (1000, 1000)
    assert (config.precision, UltraOptimizedConfig(use_amp=False).precision) == ("auto", "fp32")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_clip_gradients", ["max_norm=None"]),
        ("_check_nan_inf", ["tensor", "name='tensor'"]),
        ("_handle_nan_inf", ["tensor", "replacement_value=0.0"]),
        ("_check_training_stability", ["train_loss", "val_loss"]),
        ("_handle_training_instability", ["issue_type"]),
        ("_get_gradient_norm", []),
        ("save_checkpoint", ["path", "include_optimizer=True"]),
        ("load_checkpoint", ["path", "trust=False"]),
        ("monitor_training_health", []),
        ("get_training_stats", []),
        ("train", ["train_loader", "val_loader=None"]),
    ],
)
def test_the_methods_take_what_they_took(name: str, parameters: list[str]) -> None:
    signature = inspect.signature(getattr(UltraOptimizedSEOTrainer, name))
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    assert found == parameters


def test_gradient_clipping(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    fill_gradients(trainer)
    before = trainer._get_gradient_norm()

    trainer._clip_gradients()

    assert before > 1000
    assert trainer._get_gradient_norm() == pytest.approx(1.0, rel=1e-3)  # half a million equal squares in float32
    assert f"Gradient norm before clipping: {before:.6f}" in caplog.messages
    assert f"Gradient norm after clipping: {trainer._get_gradient_norm():.6f}" in caplog.messages
    trainer._clip_gradients(max_norm=0.25)
    assert trainer._get_gradient_norm() == pytest.approx(0.25, rel=1e-3)


def test_clipping_replaces_what_is_not_finite(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    fill_gradients(trainer, 0.001)
    assert trainer.model.inlet.weight.grad is not None
    trainer.model.inlet.weight.grad[0, 0] = math.nan
    assert trainer.model.inlet.bias.grad is not None
    trainer.model.inlet.bias.grad[3] = math.inf

    trainer._clip_gradients()

    assert "NaN detected in gradient of inlet.weight" in caplog.messages
    assert "Inf detected in gradient of inlet.bias" in caplog.messages
    assert trainer.model.inlet.weight.grad[0, 0] == 0.0
    assert math.isfinite(trainer._get_gradient_norm())


def test_nan_inf_handling(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    bad = torch.tensor([1.0, math.nan, -math.inf])

    assert trainer._check_nan_inf(bad, "bad") is True
    assert trainer._check_nan_inf(torch.tensor([math.inf])) is True
    assert trainer._check_nan_inf(torch.ones(3)) is False
    assert caplog.messages == ["NaN detected in bad", "Inf detected in tensor"]
    assert trainer._handle_nan_inf(bad).tolist() == [1.0, 0.0, 0.0]
    assert trainer._handle_nan_inf(bad, 7.0).tolist() == [1.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("losses", "lines", "rate", "decay"),
    [
        (
            ([1.0, math.nan], [1.0, 1.0]),
            [
                "Training loss is nan, training may be unstable",
                "Reducing learning rate to handle NaN/Inf in training loss",
            ],
            0.5,
            1.0,
        ),
        (
            ([1.0, 0.9], [1.0, math.inf]),
            [
                "Validation loss is inf, training may be unstable",
                "Reducing learning rate to handle NaN/Inf in validation loss",
            ],
            0.5,
            1.5,  # inf is above 1.0 while the training loss fell
        ),
        (
            ([0.5, 5.5], [1.0, 0.9]),
            [
                "Training loss exploded from 0.500000 to 5.500000",
                "Reducing learning rate to handle loss explosion",
            ],
            0.1,
            1.0,
        ),
        (
            ([1.0, 0.5], [0.8, 0.9]),
            ["Potential overfitting detected", "Increasing weight decay to handle overfitting"],
            1.0,
            1.5,
        ),
        (([1.0, 0.5], [0.8, 0.7]), [], 1.0, 1.0),
        (([0.5, 5.0], [0.8, 0.7]), [], 1.0, 1.0),
    ],
)
def test_training_stability_monitoring(
    losses: tuple[list[float], list[float]],
    lines: list[str],
    rate: float,
    decay: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = make_trainer()
    trainer.train_history.extend({"loss": loss} for loss in losses[0])
    trainer.val_history.extend({"loss": loss} for loss in losses[1])

    trainer._check_training_stability(losses[0][-1], losses[1][-1])

    assert caplog.messages[: len(lines)] == lines
    if not lines:
        assert not caplog.messages
    assert trainer._param_groups[0]["lr"] == pytest.approx(rate * 1e-3)
    assert trainer._param_groups[0]["weight_decay"] == pytest.approx(decay * 1e-4)


def test_what_was_changed_is_told_with_its_value_before_and_after() -> None:
    told: list[str] = []
    config = UltraOptimizedConfig()
    trainer = UltraOptimizedSEOTrainer(UltraOptimizedSEOMetricsModule(config), config, tell=told.append)

    for issue in ("overfitting", "loss_explosion"):
        trainer._handle_training_instability(issue)

    assert told == [
        "   Increasing weight decay to handle overfitting: 0.0001 -> 0.00015",
        "   Reducing learning rate to handle loss explosion: 0.001 -> 0.0001",
    ]


@pytest.mark.parametrize("policy", ["observe", "patient"])
def test_a_policy_that_changes_nothing_holds_at_an_epochs_end_too(policy: str) -> None:
    told: list[str] = []
    config = UltraOptimizedConfig(policy=policy)
    trainer = UltraOptimizedSEOTrainer(UltraOptimizedSEOMetricsModule(config), config, tell=told.append)

    trainer._handle_training_instability("overfitting")

    assert trainer._weight_decay == 1e-4
    assert told == ["   overfitting: reported only, since the policy changes no hyperparameter"]


def test_an_epoch_tells_losses_norms_and_how_far_the_scores_are_off() -> None:
    metrics = {"epoch": 1, "loss": 0.5, "val_loss": 0.25, "val_r2": 0.75, "val_mae_title": 4.86, "val_mae_links": 3.0}
    norms = {"grad_norm_mean": 0.381, "grad_norm_max": 0.498, "num_skipped": 0, "learning_rate": 1e-3}

    assert make_trainer().describe_epoch(metrics | norms).splitlines() == [
        "Epoch 2/30: loss=0.5000, val_loss=0.2500, val_r2=0.7500, grad avg=0.381 max=0.498, lr=0.001",
        "   Mean error - title: 4.9, links: 3.0",
    ]


def test_the_weight_decay_does_not_grow_without_end() -> None:
    trainer = make_trainer()

    for _ in range(30):
        trainer._handle_training_instability("overfitting")

    assert trainer._weight_decay <= 1e-4 * MOST_WEIGHT_DECAY * 1.5


def test_checkpoint_safety(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, path = make_trainer(), str(tmp_path / "models" / "seo_model.pth")
    with torch.no_grad():
        trainer.model.inlet.bias[2] = math.nan
    trainer.train_history.append({"loss": 0.5})

    trainer.save_checkpoint(path)

    assert "NaN detected in parameter inlet.bias" in caplog.messages
    assert "NaN/Inf detected in parameter inlet.bias, cleaning before save" in caplog.messages
    assert "Model contained NaN/Inf values that were cleaned before saving" in caplog.messages
    assert trainer.model.inlet.bias[2] == 0.0
    saved = torch.load(path, weights_only=True)
    assert {"model_state_dict", "config", "train_history", "val_history"} <= set(saved)
    assert saved["config"]["max_grad_norm"] == 1.0
    other = make_trainer()
    success = other.load_checkpoint(path)
    assert success is True
    assert torch.equal(other.model.inlet.bias, trainer.model.inlet.bias)
    assert other.train_history == [{"loss": 0.5}]


def test_the_health_of_a_training_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer()
    fill_gradients(trainer)
    assert trainer.monitor_training_health() == dict.fromkeys(PARTS, True)
    with torch.no_grad():
        trainer.model.norm.weight[0] = math.inf
    assert trainer.model.norm.bias.grad is not None
    trainer.model.norm.bias.grad[1] = math.nan

    health_status = trainer.monitor_training_health()

    assert list(health_status) == PARTS
    assert [health_status[part] for part in PARTS] == [False, False, True, False, False]
    assert "Unhealthy parameter detected: norm.weight" in caplog.messages
    assert "Unhealthy gradient detected: norm.bias" in caplog.messages


def test_full_training_cycle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, data = make_training(epochs=2, run_dir=tmp_path / "run")

    train(trainer, data)

    stats = trainer.get_training_stats()
    assert stats["current_learning_rate"] == 1e-3
    assert stats["current_gradient_norm"] > 0
    assert stats["num_steps"] == len([m for m in caplog.messages if m.startswith("Gradient norm before clipping: ")])
    assert trainer.monitor_training_health()["overall_healthy"]
    after = [float(m.rpartition(" ")[2]) for m in caplog.messages if m.startswith("Gradient norm after clipping: ")]
    assert max(after) <= 1.0 + 1e-4
    trainer.save_checkpoint(tmp_path / "seo_model.pth")
    assert trainer.load_checkpoint(tmp_path / "seo_model.pth")


def test_norms_and_actions_go_to_tensorboard_where_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from steadygrad_recipes.seo.program import build_model
    from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer

    first, data = make_training(epochs=1)
    config = dataclasses.replace(first.config, tensorboard=True)
    trainer = UltraOptimizedSEOTrainer(build_model(config, data), config, run_dir=tmp_path, tell=lambda _: None)
    train(trainer, data)

    (events,) = (tmp_path / "tensorboard").iterdir()
    written = events.read_bytes()
    assert all(name in written for name in (b"grad/norm", b"health/loss", b"action/clip_coefficient"))


def test_scores_in_their_own_units_are_compared_with_their_mean() -> None:
    trainer = make_trainer()  # of a model that was not given the scales of any data
    scores = torch.tensor([[60.0], [80.0]]).expand(2, len(trainer.model.metrics))

    assert trainer.guess_loss([(torch.zeros(2, 26), scores)]) == 100.0


# --- the document's tests -------------------------------------------------------------------------------------------


def test_the_checks_of_the_document_are_functions_of_the_package_and_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    seo = importlib.import_module("steadygrad_recipes.seo")
    for name in ("gradient_clipping", "nan_inf_handling", "training_stability_monitoring", "checkpoint_safety"):
        getattr(seo, f"test_{name}")()

    monkeypatch.setattr(UltraOptimizedSEOTrainer, "_clip_gradients", lambda *_: None)
    with pytest.raises(AssertionError, match=r"the norm was .* not 0\.5"):
        seo.test_gradient_clipping()


def test_the_checks_of_the_document_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "steadygrad_recipes.seo.check_setup"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["✓ test_full_training_cycle", "All checks passed."]
    assert "no_better_than_guessing" not in done.stderr
