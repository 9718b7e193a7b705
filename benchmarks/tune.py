"""Are settings that `steadygrad tune` chooses better than those it was given, and what do they cost?

Each recipe, small and on made data, is tuned once from its first seed: range test, four short trials, no search. Then
whole trainings with the given and the tuned settings, over several seeds; the best validation loss of each counts. Each
is tuned a second time from a learning rate that is a hundred times too high, and trained once. `share` is the steps
that the tuning tried against those of one whole training. Small models: read which is better, not digits.
Run `python benchmarks/tune.py [--recipes seo,cod,mmdit] [--seeds 2]`; writes results/tune.json, and leaves what other
recipes it holds. About ten minutes of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from machine import RESULTS, write_results
from steadygrad.cli.recipe_fields import merge, nest
from steadygrad.config.plain import build, read_mapping
from steadygrad.errors import TrainingHalted
from steadygrad.recipes.catalogue import find_recipe
from steadygrad.tune.ledger import Ledger
from steadygrad.tune.plan import make_plan
from steadygrad.tune.programs import open_recipe
from steadygrad.tune.tuning import Tuned, Tuning, describe_request
from steadygrad.tune.write import CONFIG, write_tuning

SIZES: Mapping[str, Mapping[str, Any]] = {
    "seo": {"batch_size": 16, "epochs": 40, "patience": None},
    "cod": {"epochs": 33, "num_pictures": 0},
    "mmdit": {"training.epochs": 14},
}
"""On top of `--quick`: long enough that a tenth of it is a range test and four trials."""
RATES = {"seo": "learning_rate", "cod": "lr", "mmdit": "optimizer.lr"}
SEEDS = {"seo": "seed", "cod": "seed", "mmdit": "training.seed"}
TOO_HIGH = 100.0


class Silence:
    """A console that nobody reads."""

    def say(self, text: str = "", style: str = "") -> None:
        """Nothing."""


def make_values(recipe: str, **more: Any) -> dict[str, Any]:
    package = find_recipe(recipe).load()
    return merge(nest({**package.QUICK, **SIZES[recipe]}), nest(more))


def tune(recipe: str, values: Mapping[str, Any], folder: Path) -> tuple[Tuned, dict[str, Any]]:
    """What `steadygrad tune RECIPE` does, and the values of the config that it wrote."""
    target = open_recipe(recipe, build(find_recipe(recipe).load().Config, values))
    plan = make_plan(target.tunable.num_steps, trials=0, steps=None)
    folder.mkdir(parents=True)
    tuned = Tuning(target, plan, Ledger(folder, describe_request(recipe, None, plan, ()), resume=False)).run(
        (), None, folder
    )
    write_tuning(tuned, folder)
    return tuned, dict(read_mapping(folder / CONFIG))


def train(recipe: str, values: Mapping[str, Any], seed: int) -> float | None:
    """The best validation loss of a whole training; None when it was halted before its first."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, loaders = open_training(recipe, merge(values, nest({SEEDS[recipe]: seed})), Path(folder))
        with contextlib.suppress(TrainingHalted):
            trainer.train(*loaders)
        losses = [entry["loss"] for entry in trainer.val_history if math.isfinite(entry["loss"])]
    return min(losses, default=None)


def open_training(recipe: str, values: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """Trainer and loaders, as the recipe's own program makes them."""
    config = build(find_recipe(recipe).load().Config, values)
    if recipe == "seo":
        from steadygrad.recipes.seo.data import load_data
        from steadygrad.recipes.seo.program import build_model
        from steadygrad.recipes.seo.trainer import make_trainer

        data = load_data(config)
        return make_trainer(build_model(config, data), config, run_dir=folder), data.make_loaders(config.batch_size)
    if recipe == "cod":
        from steadygrad.recipes.cod.data import open_datasets, open_loaders
        from steadygrad.recipes.cod.trainer import CodTrainer

        train_set, test_set, _ = open_datasets(config)
        return CodTrainer(config, run_dir=folder), open_loaders(config, train_set, test_set)
    from steadygrad.recipes.mmdit.program import load_corpus, make_loaders, make_trainer

    corpus = load_corpus(config)
    return make_trainer(config, corpus, folder, Silence()), make_loaders(config, corpus)


def measure(recipe: str, values: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """One row: tuned from these values, and trained with what came out and as they were."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tuned, chosen = tune(recipe, values, Path(folder) / "tune")
    seconds = time.perf_counter() - started
    assert tuned.target.tunable.num_steps is not None
    row: dict[str, Any] = {
        "given_lr": tuned.target.given.lr,
        "tuned_lr": tuned.choice.settings.lr,
        "reason": tuned.choice.reason,
        "num_steps_tried": tuned.num_steps,
        "num_steps_of_a_training": tuned.target.tunable.num_steps,
        "share": round(tuned.num_steps / tuned.target.tunable.num_steps, 4),
        "seconds": round(seconds, 1),
        "tuned": [train(recipe, chosen, seed) for seed in seeds],
    }
    row["given"] = [train(recipe, values, seed) for seed in seeds]
    return row


def spell(row: Mapping[str, Any]) -> str:
    def one(losses: Sequence[float | None]) -> str:
        known = [loss for loss in losses if loss is not None]
        return f"{statistics.median(known):.4f} ({min(known):.4f} to {max(known):.4f})" if known else "halted"

    rates = f"{row['given_lr']:.3g} -> {row['tuned_lr']:.3g}"
    return f"{rates:<22}{row['share']:>7.1%}  given {one(row['given']):<30} tuned {one(row['tuned'])}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--recipes", default=",".join(SIZES))
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    results: dict[str, Any] = {}
    for recipe in arguments.recipes.split(","):
        seeds = range(arguments.seeds)
        values = make_values(recipe)
        row = results[recipe] = measure(recipe, values, seeds)
        print(f"{recipe:<18}{spell(row)}", flush=True)
        high = make_values(recipe, **{RATES[recipe]: TOO_HIGH * find_rate(recipe, values)})
        row = results[f"{recipe}, rate x{TOO_HIGH:g}"] = measure(recipe, high, seeds[:1])
        print(f"{recipe + f' x{TOO_HIGH:g}':<18}{spell(row)}", flush=True)
    before = RESULTS / "tune.json"
    held = json.loads(before.read_text(encoding="utf-8"))["results"] if before.is_file() else {}
    print(write_results("tune", {**held, **results}))


def find_rate(recipe: str, values: Mapping[str, Any]) -> float:
    config: Any = build(find_recipe(recipe).load().Config, values)
    for name in RATES[recipe].split("."):
        config = getattr(config, name)
    return float(config)


if __name__ == "__main__":
    main()
