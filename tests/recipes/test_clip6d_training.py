"""clip6d, whole: it learns, resumes bit for bit, survives a bad sample, and fails as it used to when unprotected."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from clip6d_trainings import (
    TINY,
    assert_equal,
    make_config,
    open_shapes,
    poison_vector,
    shapes_folder,
    train,
    weights_of,
)
from torch import Tensor

from steadygrad.checkpoint import CheckpointStore
from steadygrad.cli import main
from steadygrad.recipes.clip6d.evaluate import evaluate
from steadygrad.recipes.clip6d.fit import build_module
from steadygrad.recipes.clip6d.retrieval import expect_by_chance


def test_six_modalities_learn_to_find_each_other(tmp_path: Path) -> None:
    config = make_config(epochs=2)
    corpus = open_shapes(config)
    chance = expect_by_chance(len(corpus.val))
    before = evaluate(build_module(config, corpus), corpus, config)
    assert before["R@10"] < 1.5 * chance["R@10"], "an untrained model only guesses"

    _, keeper = train(config, tmp_path, corpus=corpus)

    found = keeper.metrics
    assert found["R@1"] > 5 * chance["R@1"]
    assert found["R@10"] > 2 * chance["R@10"]
    assert found["val_loss"] < 0.8 * math.log(config.batch_size**5), "below that of guessing among all combinations"
    assert {
        f"R@{k}/{a}->{b}" for k in (1, 5, 10) for a in config.modalities for b in config.modalities if a != b
    } < set(found)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_every_version_of_the_loss_learns(version: int, tmp_path: Path) -> None:
    config = make_config(modalities=("en", "zh", "vector"), stable_loss_version=version)
    corpus = open_shapes(config)
    _, keeper = train(config, tmp_path, corpus=corpus)
    assert keeper.metrics["val_loss"] < 0.9 * math.log(config.batch_size**2), "below that of guessing"
    if version > 0:  # a product of three is large for vectors that are not alike in pairs
        assert keeper.metrics["R@1"] > 4 * expect_by_chance(len(corpus.val))["R@1"]


@pytest.mark.parametrize(
    "modalities", [("image", "en"), ("image", "vector"), ("en", "en.2"), ("image", "en", "de", "vector")]
)
def test_any_of_the_modalities_can_be_trained(modalities: tuple[str, ...], tmp_path: Path) -> None:
    config = make_config(modalities=modalities, max_steps=4)
    before = weights_of(build_module(config, open_shapes(config)))
    module, keeper = train(config, tmp_path)
    assert len([name for name in keeper.metrics if name.startswith("R@1/")]) == len(modalities) * (len(modalities) - 1)
    still = [name for name, value in weights_of(module).items() if torch.equal(value, before[name])]
    assert not still, "every weight takes part"


# --- the failures of the seed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1])
def test_gradients_vanish_without_the_stable_loss(
    version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Norm-based logits above their clamp, or products of six unit vectors: the loss does not decrease."""
    wide = dataclasses.replace(TINY, embed_dim=256)
    config = make_config(stable_loss_version=version, use_stable_loss=False, protect=False, max_steps=25, model=wide)
    corpus = open_shapes(config)
    chance = expect_by_chance(len(corpus.val))
    start = evaluate(build_module(config, corpus), corpus, config)

    module, keeper = train(config, tmp_path / "plain", corpus=corpus)

    assert module.gradient_monitor is not None
    assert max(module.gradient_monitor.history["global_norm"]) < 1e-6
    assert "Vanishing gradients detected" in capsys.readouterr().out
    assert keeper.metrics["val_loss"] == pytest.approx(start["val_loss"], rel=1e-3)
    assert keeper.metrics["R@1"] < 3 * chance["R@1"]

    stable = dataclasses.replace(config, use_stable_loss=True, protect=True, max_steps=60)
    _, keeper = train(stable, tmp_path / "stable", corpus=corpus)
    assert keeper.metrics["val_loss"] < 0.95 * math.log(config.batch_size**5)
    if version == 1:  # products of six need not be alike in pairs after sixty steps
        assert keeper.metrics["R@1"] > 3 * chance["R@1"]


def test_the_guard_tells_of_gradients_that_vanish(tmp_path: Path) -> None:
    config = make_config(use_stable_loss=False, max_steps=25, model=dataclasses.replace(TINY, embed_dim=256))
    _, keeper = train(config, tmp_path)
    assert keeper.guard is not None
    assert {finding.kind for finding in keeper.guard.findings} == {"vanishing_gradient", "dead_units"}


def test_a_bad_sample_kills_the_unprotected_training_and_not_the_protected_one(tmp_path: Path) -> None:
    config = make_config(modalities=("en", "zh", "vector"))
    corpus = poison_vector(open_shapes(config), index=100, value=math.nan)

    dead, _ = train(dataclasses.replace(config, protect=False), tmp_path / "off", corpus=corpus)
    assert not all(bool(value.isfinite().all()) for value in dead.state_dict().values())
    assert not CheckpointStore(tmp_path / "off" / "checkpoints").list(), "no checkpoint holds what is not finite"

    alive, keeper = train(config, tmp_path / "on", corpus=corpus)
    assert all(bool(value.isfinite().all()) for value in alive.state_dict().values())
    assert keeper.metrics["R@1"] > 3 * expect_by_chance(len(corpus.val))["R@1"]
    steps = [json.loads(line) for line in (tmp_path / "on" / "steps.jsonl").read_text().splitlines()]
    assert [step["skipped"] for step in steps].count(True) == 1
    kinds = {
        json.loads(line)["finding"]["kind"] for line in (tmp_path / "on" / "incidents.jsonl").read_text().splitlines()
    }
    assert "nonfinite_loss" in kinds


# --- resume ---------------------------------------------------------------------------------------------------------


def test_a_resume_from_any_checkpoint_is_exact(tmp_path: Path) -> None:
    """In the middle of an epoch, at its end, with dropout, accumulation and another caption each epoch."""
    model = dataclasses.replace(TINY, dropout=0.1)
    changes = {"epochs": 3, "save_every": 4, "eval_every": 3, "accumulation_steps": 2, "keep_last": 20, "model": model}
    config = make_config(modalities=("image", "en", "vector"), num_synthetic=60, **changes)
    corpus = open_shapes(config, num=60)
    whole, keeper = train(config, tmp_path / "whole", corpus=corpus)
    checkpoints = CheckpointStore(tmp_path / "whole" / "checkpoints").list()
    steps = [info.step for info in checkpoints]
    assert steps == [4, 5, 8, 10, 12, 15]

    for info in checkpoints[:-1]:
        torch.manual_seed(info.step)  # another process would have drawn other numbers
        resumed, again = train(config, tmp_path / f"from{info.step}", resume=str(info.path), corpus=corpus)
        assert_equal(weights_of(resumed), weights_of(whole))
        assert again.metrics == keeper.metrics
        assert again._progress.train_history == keeper._progress.train_history
        first = json.loads((tmp_path / f"from{info.step}" / "steps.jsonl").read_text().splitlines()[0])
        assert first["step"] == info.step


def test_a_training_killed_by_sigkill_resumes_exactly(
    tmp_path: Path,
    kill_at: Callable[[Sequence[str], int], None],
    read_weights: Callable[[Path], dict[str, Tensor]],
) -> None:
    fields = {"data": shapes_folder(42), "batch-size": 6, "epochs": 2, "save-every": 3, "modalities": "image,en,vector"}
    fields |= {f"model.{name}": value for name, value in dataclasses.asdict(TINY).items()}
    words = ["train", "clip6d", *(f"--{name}={value}" for name, value in fields.items())]
    assert main([*words, f"--run-dir={tmp_path / 'whole'}"]) == 0

    kill_at([*words, f"--run-dir={tmp_path / 'killed'}"], 9)
    saved = [info.step for info in CheckpointStore(tmp_path / "killed" / "checkpoints").list()]
    assert saved
    assert max(saved) < 12
    assert main(["train", "clip6d", "--resume=latest", f"--run-dir={tmp_path / 'killed'}"]) == 0

    assert_equal(read_weights(tmp_path / "killed"), read_weights(tmp_path / "whole"))


def test_a_run_that_is_over_has_nothing_left_to_do(tmp_path: Path) -> None:
    config = make_config(modalities=("en", "vector"), max_steps=3)
    module, keeper = train(config, tmp_path)
    again, kept = train(config, tmp_path, resume="latest")
    assert_equal(weights_of(again), weights_of(module))
    assert kept.metrics == keeper.metrics


def test_patience_stops_a_training_that_gets_no_better(tmp_path: Path) -> None:
    config = make_config(modalities=("en", "vector"), learning_rate=1e-30, eval_every=2, patience=2)
    train(config, tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2, 4, 6], "the first is the best, two are no better"


def test_switched_off_in_the_environment_it_is_lightnings_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADYGRAD", "off")
    config = make_config(modalities=("en", "vector"), max_steps=3)
    _, keeper = train(config, tmp_path)
    assert not (tmp_path / "steps.jsonl").exists()
    assert keeper._progress.train_history[0]["num_steps"] == 3
