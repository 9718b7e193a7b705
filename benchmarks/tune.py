"""Are the settings that `steadygrad tune` chooses better than the given ones, and what does tuning cost?

Each recipe, small and on synthetic data, is tuned from seed 0 in two ways: by the range test alone, and with a search
over learning rate, warm-up and clip threshold. Then whole trainings run with the given and with the chosen settings,
over seeds that were not used for tuning; the best validation loss of each counts. The noise is the standard deviation
of the given settings' losses over those seeds. Chosen settings are `better` when they win with every seed, `within
noise` when their mean exceeds the given settings' mean by no more than the noise, and otherwise `worse`. Each recipe is
also tuned from a learning rate that is a hundred times too high, and trained once: `repaired` when the result is no
worse than with the recipe's own learning rate, apart from noise. "Share of the steps": steps spent on tuning, relative
to one whole training. The models are small: read which settings are better, not the digits.

    python benchmarks/tune.py [--recipes seo,cod,mmdit] [--ways range,search,x100] [--seeds 3] [--quick]

Writes results/tune.json, and keeps its rows of other recipes and ways. Takes about 15 minutes on one core; `--quick`
runs a shortened recipe on two seeds in a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from machine import RESULTS, write_results
from steadygrad.cli.recipe_config import flatten, nest
from steadygrad.cli.recipes import find_recipe, open_recipe
from steadygrad.config.plain import build, read_mapping
from steadygrad.errors import TrainingHalted
from steadygrad.tune.ledger import Ledger
from steadygrad.tune.plan import make_plan
from steadygrad.tune.search import Search
from steadygrad.tune.storage import open_study
from steadygrad.tune.tuning import Tuned, Tuning, describe_request
from steadygrad.tune.write import CONFIG, write_tuning

SIZES: Mapping[str, Mapping[str, Any]] = {
    "seo": {"hidden": 32, "batch_size": 8, "epochs": 35, "patience": None},
    "cod": {"batch_size": 2, "epochs": 29, "num_pictures": 0},
    "mmdit": {
        "data.num_synthetic": 512,
        "model.hidden_size": 32,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "training.train_batch_size": 8,
        "training.gradient_accumulation_steps": 1,
        "training.epochs": 25,
    },
}
"""Settings on top of `--quick`: long enough that a tenth of the run fits a range test, a short search and the
comparison.
"""
EPOCHS = {"seo": "epochs", "cod": "epochs", "mmdit": "training.epochs"}
RATES = {"seo": "learning_rate", "cod": "lr", "mmdit": "optimizer.lr"}
SEEDS = {"seo": "seed", "cod": "seed", "mmdit": "training.seed"}
CHOOSING_SEED = 0
SEARCHED = ("lr", "warmup", "clip")
TOO_HIGH = 100.0
WAYS = ("range", "search", "x100")
QUICK_RECIPES, QUICK_EPOCHS = ("seo",), 6


class Silence:
    """A console that discards its output."""

    def say(self, text: str = "", style: str = "") -> None:
        """Do nothing."""


def make_values(recipe: str, **more: Any) -> dict[str, Any]:
    """Return field path -> value."""
    package = find_recipe(recipe).load()
    return {**package.QUICK, **SIZES[recipe], **more}


def make_config(recipe: str, values: Mapping[str, Any]) -> Any:
    return build(find_recipe(recipe).load().Config, nest(values))


def tune(recipe: str, values: Mapping[str, Any], names: tuple[str, ...], folder: Path) -> tuple[Tuned, dict[str, Any]]:
    """Run `steadygrad tune RECIPE [--search NAMES]`; return its result and the values of the config that it wrote."""
    target = open_recipe(recipe, make_config(recipe, {**values, SEEDS[recipe]: CHOOSING_SEED}))
    plan = make_plan(target.tunable.num_steps, trials=None if names else 0, steps=None)
    folder.mkdir(parents=True)
    request = describe_request(recipe, None, plan, names)
    search = Search(open_study(None, folder, request), names) if names else None
    tuned = Tuning(target, plan, Ledger(folder, request, resume=False), search=search).run()
    write_tuning(tuned, folder)
    return tuned, flatten(read_mapping(folder / CONFIG))


def train(recipe: str, values: Mapping[str, Any], seed: int) -> float | None:
    """Return the best validation loss of a whole training, or None if it was halted before the first one."""
    trainer, loaders = open_training(recipe, {**values, SEEDS[recipe]: seed})
    with contextlib.suppress(TrainingHalted):
        trainer.train(*loaders)
    return min((entry["loss"] for entry in trainer.val_history if math.isfinite(entry["loss"])), default=None)


def open_training(recipe: str, values: Mapping[str, Any]) -> tuple[Any, Any]:
    """Make trainer and loaders as the recipe's own program does; nothing is written."""
    config = make_config(recipe, values)
    if recipe == "seo":
        from steadygrad_recipes.seo.data import load_data
        from steadygrad_recipes.seo.program import build_model
        from steadygrad_recipes.seo.trainer import make_trainer

        data = load_data(config)
        return make_trainer(build_model(config, data), config, run_dir=None), data.make_loaders(config.batch_size)
    if recipe == "cod":
        from steadygrad_recipes.cod.data import open_datasets, open_loaders
        from steadygrad_recipes.cod.trainer import CodTrainer

        train_set, test_set, _ = open_datasets(config)
        return CodTrainer(config, run_dir=None), open_loaders(config, train_set, test_set)
    from steadygrad_recipes.mmdit.program import load_corpus, make_loaders, make_trainer

    corpus = load_corpus(config)
    return make_trainer(config, corpus, None, Silence()), make_loaders(config, corpus)


def measure(
    recipe: str,
    values: Mapping[str, Any],
    names: tuple[str, ...],
    seeds: Sequence[int],
    given: list[float | None],
) -> dict[str, Any]:
    """Return one row: tuned from these values, then trained with the result; `given`: the losses without tuning."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tuned, chosen = tune(recipe, values, names, Path(folder) / "tune")
    seconds = time.perf_counter() - started
    whole, changed = tuned.target.tunable.num_steps, tuned.choice.changed
    assert whole is not None
    losses = [train(recipe, chosen, seed) for seed in seeds] if changed else given
    return {
        "given_lr": tuned.target.given.lr,
        "tuned_lr": tuned.choice.settings.lr,
        "changed": [f"{name}: {before} -> {after}" for name, before, after, _ in tuned.evidence if before != after],
        "reason": tuned.choice.reason,
        "num_trials": len(tuned.searched),
        "num_steps_tried": tuned.num_steps,
        "num_steps_of_a_training": whole,
        "share": round(tuned.num_steps / whole, 4),
        "seconds": round(seconds, 1),
        "seeds": list(seeds),
        "given": given,
        "tuned": losses,
        **judge(given, losses, changed=bool(changed)),
    }


def judge(given: Sequence[float | None], tuned: Sequence[float | None], *, changed: bool) -> dict[str, Any]:
    """Return better, within noise, or worse."""
    if not changed:
        return {"verdict": "kept"}
    pairs = [(math.inf if a is None else a, math.inf if b is None else b) for a, b in zip(given, tuned)]
    before, after = [a for a, _ in pairs], [b for _, b in pairs]
    finite = all(map(math.isfinite, [*before, *after]))
    noise = statistics.stdev(before) if finite and len(pairs) > 1 else None
    difference = statistics.fmean(after) - statistics.fmean(before) if finite else None
    if all(b < a for a, b in pairs):
        verdict = "better"
    elif noise is not None and difference is not None and difference <= noise:
        verdict = "within noise"
    else:
        verdict = "worse"
    return {
        "verdict": verdict,
        "num_better": sum(b < a for a, b in pairs),
        "noise": noise,
        "mean_difference": difference,
        "noise_of_difference": statistics.stdev([b - a for a, b in pairs]) if noise is not None else None,
    }


def spell(row: Mapping[str, Any]) -> str:
    def one(losses: Sequence[float | None]) -> str:
        known = [loss for loss in losses if loss is not None]
        return f"{statistics.median(known):.4f} ({min(known):.4f} to {max(known):.4f})" if known else "halted"

    rates = f"{row['given_lr']:.3g} -> {row['tuned_lr']:.3g}"
    cost = f"{row['num_trials']:>3} trials {row['share']:>6.1%}"
    return f"{rates:<22}{cost}  given {one(row['given']):<28} tuned {one(row['tuned']):<28} {row['verdict']}"


def measure_recipe(recipe: str, ways: Sequence[str], num_seeds: int, **more: Any) -> Iterator[tuple[str, Any]]:
    """Return the named rows of one recipe."""
    seeds = range(CHOOSING_SEED + 1, CHOOSING_SEED + 1 + num_seeds)
    values = make_values(recipe, **more)
    own = [train(recipe, values, seed) for seed in seeds]
    for way, names in (("range", ()), ("search", SEARCHED)):
        if way in ways:
            yield f"{recipe}, {way}", measure(recipe, values, names, seeds, own)
    if "x100" in ways:
        high = {**values, RATES[recipe]: TOO_HIGH * find_rate(recipe, values)}
        given = [train(recipe, high, seed) for seed in seeds[:1]]
        row = measure(recipe, high, (), seeds[:1], given)
        yield f"{recipe}, x{TOO_HIGH:g}", row | judge_repair(own, row["tuned"][0])


def judge_repair(own: Sequence[float | None], tuned: float | None) -> dict[str, Any]:
    """Judge whether the repaired training ends no worse than the recipe's own settings; it uses the first seed."""
    known = [loss for loss in own if loss is not None]
    noise = statistics.stdev(known) if len(known) > 1 else 0.0
    repaired = tuned is not None and own[0] is not None and tuned <= own[0] + noise
    return {"own": own[0], "noise": noise, "verdict": "repaired" if repaired else "not repaired"}


def find_rate(recipe: str, values: Mapping[str, Any]) -> float:
    config = make_config(recipe, values)
    for name in RATES[recipe].split("."):
        config = getattr(config, name)
    return float(config)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--recipes", help=f"some of {','.join(SIZES)}")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {','.join(WAYS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one shortened recipe, two seeds; nothing is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("steadygrad").setLevel(logging.CRITICAL)
    quick = arguments.quick
    recipes = arguments.recipes.split(",") if arguments.recipes else QUICK_RECIPES if quick else list(SIZES)
    written = None
    for recipe in recipes:
        more = {EPOCHS[recipe]: QUICK_EPOCHS} if quick else {}
        num_seeds = 2 if quick else arguments.seeds
        for name, row in measure_recipe(recipe, arguments.ways.split(","), num_seeds, **more):
            print(f"{name:<15}{spell(row)}", flush=True)
            written = add_row(name, row, quick=quick)
    print("written:", written)


def add_row(name: str, row: Mapping[str, Any], *, quick: bool) -> Path | None:
    """Add a row to the results file at once, because all of them take a while."""
    path = Path(os.environ.get("OUT") or RESULTS) / "tune.json"
    held = json.loads(path.read_text(encoding="utf-8"))["results"] if path.is_file() else {}
    return write_results("tune", {**held, name: row}, quick=quick)


if __name__ == "__main__":
    main()
