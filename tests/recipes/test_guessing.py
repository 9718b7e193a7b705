"""A run whose validation is no better than a guess, or whose start exploded, is never called healthy."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from clip6d_trainings import Console, make_config, open_shapes
from ranked_recipes import Silence
from sft_trainings import Lines
from sft_trainings import make_config as make_sft_config
from torch import nn

from steadygrad import Trainer
from steadygrad.config.trainer import TrainerConfig
from steadygrad.trainer.guessing import find_best
from steadygrad.view.headline import judge_run
from steadygrad.view.read.run import open_run
from steadygrad_recipes.clip6d.evaluate import guess_loss as guess_clip6d
from steadygrad_recipes.clip6d.fit import build_module, fit
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.cod.data import open_datasets, open_loaders
from steadygrad_recipes.cod.trainer import CodTrainer, structure_loss
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.program import train_seo
from steadygrad_recipes.sft.fine_tune import train_model
from steadygrad_recipes.sft.metrics import guess_loss

GUESSING = "no_better_than_guessing"


def kinds(run_dir: Path) -> Counter[str]:
    lines = (run_dir / "incidents.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["finding"]["kind"] for line in lines)


def word(run_dir: Path) -> str:
    """What every view calls the run."""
    return judge_run(open_run(run_dir).read_all()).word


class Regression(Trainer):
    """y = 2x, which one step at a rate of 0.5 learns, and one at 1e-9 does not."""

    broken = False

    def evaluate(self, val_loader: Any) -> dict[str, float]:
        if self.broken and not self.val_history:
            return {"loss": math.nan}
        return {"loss": sum(float(nn.functional.mse_loss(self.model(x), y)) for x, y in val_loader)}

    def guess_loss(self, val_loader: Any) -> float:
        return sum(float(y.square().mean()) for _, y in val_loader)


def train_regression(run_dir: Path, rate: float, *, broken: bool = False, epochs: int = 2) -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(64, 1)
    batches = list(zip(x.split(8), (2 * x).split(8), strict=True))
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    lines: list[str] = []
    config = TrainerConfig(epochs=epochs, device="cpu", learning_rate=rate)
    trainer = Regression(model, config, loss_fn=nn.functional.mse_loss, run_dir=run_dir, tell=lines.append)
    trainer.broken = broken
    trainer.resume()
    trainer.train(batches, batches[:2])
    return lines


def test_a_trainer_that_learned_nothing_says_so_once(tmp_path: Path) -> None:
    lines = train_regression(tmp_path, 1e-9)

    assert kinds(tmp_path)[GUESSING] == 1
    verdict = judge_run(open_run(tmp_path).read_all())
    assert verdict.word == "Unwell"
    assert "and a guess that ignores the input gets" in verdict.text
    assert not [line for line in lines if "guess" in line]  # the guard has printed it


def test_a_finished_run_that_is_resumed_is_judged_once(tmp_path: Path) -> None:
    for _ in range(3):
        train_regression(tmp_path, 1e-9)

    assert kinds(tmp_path)[GUESSING] == 1
    assert word(tmp_path) == "Unwell"


def test_a_start_that_exploded_is_recorded_once_however_often_the_run_goes_on(tmp_path: Path) -> None:
    for epochs in (1, 1, 3):
        train_regression(tmp_path, 40.0, epochs=epochs)

    assert kinds(tmp_path)["exploded_start"] == 1


def test_a_run_that_learns_after_all_is_not_reproached_for_its_past(tmp_path: Path) -> None:
    train_regression(tmp_path, 1e-9)
    train_regression(tmp_path, 0.3, epochs=4)

    assert kinds(tmp_path)[GUESSING] == 1
    assert word(tmp_path) != "Unwell"


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "one validation is NaN"])
def test_a_trainer_that_learned_is_not_suspected(tmp_path: Path, broken: bool) -> None:
    train_regression(tmp_path, 0.3, broken=broken)

    assert GUESSING not in kinds(tmp_path)


def test_the_best_loss_is_the_smallest_finite_one() -> None:
    assert find_best([math.nan, 0.5, 0.2, math.inf]) == 0.2
    assert math.isnan(find_best([math.nan, math.inf]) or 0.0)
    assert find_best([]) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_learning_rate_300_times_too_high_is_never_called_healthy(tmp_path: Path, seed: int) -> None:
    config = UltraOptimizedConfig(
        learning_rate=0.3, seed=seed, device="cpu", epochs=3, num_synthetic=200, hidden=32, text_dim=16,
        num_buckets=512,
    )  # fmt: skip
    train_seo(config, run_dir=tmp_path, resume=None, console=Silence())

    assert kinds(tmp_path).keys() & {"exploded_start", GUESSING, "rate_too_high"}
    assert word(tmp_path) != "Healthy"


@pytest.mark.parametrize("version", range(4))
def test_the_guess_of_clip6d_is_the_logarithm_of_the_number_of_combinations(version: int) -> None:
    config = make_config(modalities=("en", "zh", "vector"), stable_loss_version=version)
    corpus = open_shapes(config)
    module = build_module(config, corpus)

    guess = guess_clip6d(module, corpus, config)

    assert guess == pytest.approx(2 * math.log(config.batch_size), rel=1e-3)  # the root of a rounded distance of 0
    assert module.training


@pytest.mark.parametrize("stable", [False, True], ids=["vanishes", "stable"])
def test_a_clip6d_run_that_learned_nothing_is_not_called_healthy(tmp_path: Path, stable: bool) -> None:
    rate = 2e-3 if stable else 1e-7
    config = make_config(modalities=("en", "zh", "vector"), use_stable_loss=stable, epochs=2, learning_rate=rate)
    corpus = open_shapes(config)

    fit(build_module(config, corpus), corpus, config, run_dir=tmp_path, resume=None, console=Console())

    assert (GUESSING in kinds(tmp_path)) is not stable
    if not stable:
        assert word(tmp_path) == "Unwell"


def test_the_guess_of_sft_knows_places_and_not_prompts() -> None:
    def row(*labels: int) -> dict[str, list[int]]:
        return {"input_ids": [0, *labels], "labels": [-100, *labels]}

    training = [row(1, 9) if index % 2 else row(2, 9) for index in range(2000)]

    assert guess_loss(training, training) == pytest.approx(math.log(2) / 2, rel=0.02)  # a coin, then a certainty
    assert guess_loss(training, [row(7)]) == pytest.approx(-math.log(10 / 2010 / 4004), rel=0.01)  # unseen
    assert guess_loss(training, []) is None


@pytest.mark.parametrize("rate", [1e-9, 5e-3])
def test_an_sft_run_that_learned_nothing_is_not_called_healthy(tmp_path: Path, rate: float) -> None:
    console = Lines()
    train_model(make_sft_config(learning_rate=rate, epochs=1), run_dir=tmp_path, console=console)

    assert (GUESSING in kinds(tmp_path)) is (rate == 1e-9)
    assert {"loss", "grad_norm", "learning_rate", "epoch", "seconds_left"} <= console.log[0].keys()
    if rate == 1e-9:
        assert word(tmp_path) == "Unwell"


def test_the_guess_of_cod_is_the_best_answer_that_is_the_same_everywhere() -> None:
    config = CodConfig(device="cpu", model_size="tiny", image_size=64, batch_size=2, num_made=16)
    trainer = CodTrainer(config, tell=lambda _: None)
    train_set, test_set, _ = open_datasets(config)
    _, val_loader = open_loaders(config, train_set, test_set)
    masks = torch.cat([batch["mask"] for batch in val_loader])

    guess = trainer.guess_loss(val_loader)

    for logit in (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0):
        same = float(structure_loss(torch.full_like(masks, logit), masks))
        assert guess <= same * 1.01  # answers are tried in steps
    assert trainer.evaluate(val_loader)["loss"] > 0.95 * guess  # of a network that has learned nothing
