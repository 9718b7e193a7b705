"""`steadygrad train seo`: config -> data, model, trainer -> a trained run, reported on the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from steadygrad.errors import UsageError
from steadygrad.trainer import load_trained
from steadygrad.trainer.ranks import is_first, share_from_first
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import NAMES, Names, SEOData, encode_rows, load_data
from steadygrad_recipes.seo.features import parse_page
from steadygrad_recipes.seo.model import UltraOptimizedSEOMetricsModule
from steadygrad_recipes.seo.readers import PAGES, Row, is_table, read_unscored, require_html
from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer
from steadygrad_recipes.tables import write_lines

NUM_SHOWN = 5
LEFT_OUT = "left_out.txt"


def train_seo(config: UltraOptimizedConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train; returns the exit code."""
    data = load_data(config)
    print_data(data, run_dir, console)
    if resume is not None:
        require_same_names(data.names, run_dir)
    if is_first():
        data.names.write(run_dir)
    warn_of_equal_scores(data, console)
    trainer = UltraOptimizedSEOTrainer(build_model(config, data), config, run_dir=run_dir, tell=console.say)
    if resume is not None:
        step = trainer.resume(resume)
        console.say("No checkpoint yet: training starts from scratch." if step is None else f"Resumed at step {step}.")
    train_loader, val_loader = data.make_loaders(config.batch_size)
    stats = trainer.train(train_loader, val_loader)
    if stats["best"] is not None:
        step, loss = stats["best"]
        guess = trainer.guess_loss(val_loader)
        console.say(
            f"Best validation loss {loss:.4f}, after {step + 1} steps. The mean of the scores gets {guess:.4f}."
        )
    return 0


def require_same_names(names: Names, run_dir: Path) -> None:
    """Raise UsageError if the run was trained on other features or scores: the same weights would mean others."""
    earlier = share_from_first(lambda: Names.read(run_dir) if (run_dir / NAMES).is_file() else None)
    if earlier is None:
        return
    for what, one, other in (
        ("features", earlier.features, names.features),
        ("scores", earlier.metrics, names.metrics),
    ):
        if list(one) != list(other):
            apart = sorted(set(one) ^ set(other)) or list(other)
            raise UsageError(
                f"{run_dir} was trained on other {what} than this data has: {', '.join(apart[:NUM_SHOWN])}. Resume "
                "with the data that it began with, or start a new run."
            )


def build_model(config: UltraOptimizedConfig, data: SEOData) -> UltraOptimizedSEOMetricsModule:
    """Build a model for this data, the same for the same seed, with its means and spreads."""
    if config.seed is not None:
        torch.manual_seed(config.seed)
    names = data.names
    model = UltraOptimizedSEOMetricsModule(config, num_features=len(names.features), metrics=names.metrics)
    model.take_scales(*data.train_tensors())
    return model


def print_data(data: SEOData, run_dir: Path, console: Any) -> None:
    """Print how many pages there are and which rows were left out; list all of those in the run directory."""
    num_train, num_val = len(data.train), len(data.val)
    scores = ", ".join(data.names.metrics)
    console.say(f"{num_train} pages to train on, {num_val} to validate; {len(data.names.features)} features; {scores}")
    if data.left_out and is_first():
        write_lines(run_dir / LEFT_OUT, data.left_out)
        console.say(f"{len(data.left_out)} rows were left out, each is named in {run_dir / LEFT_OUT}:", "yellow")
        for line in data.left_out[:NUM_SHOWN]:
            console.say(f"  {line}", "yellow")
        if len(data.left_out) > NUM_SHOWN:
            console.say(f"  ... and {len(data.left_out) - NUM_SHOWN} more", "yellow")


def warn_of_equal_scores(data: SEOData, console: Any) -> None:
    """Name each metric whose scores are all the same: a loss near 0 is then no sign of learning."""
    _, scores, given = data.train_tensors()
    for i, metric in enumerate(data.names.metrics):
        known = scores[given[:, i], i]
        if known.numel() and bool((known == known[0]).all()):
            console.say(f"Every score of {metric} is {float(known[0]):g}: there is nothing to learn from it.", "yellow")


# --- scoring ------------------------------------------------------------------------------------------------------
# `steadygrad train seo --predict PAGE`: the trained model of a run and a page -> its scores, printed.


def predict_page(config: UltraOptimizedConfig, path: str, *, run_dir: Path, console: Any) -> int:
    """Print the scores of a page, of every page of a folder, or of each row of a table; returns the exit code."""
    rows, left_out = _read_subjects(Path(path))
    names = Names.read(run_dir)
    model = UltraOptimizedSEOMetricsModule(config, num_features=len(names.features), metrics=names.metrics)
    step = load_trained(run_dir, model)
    model.eval()
    console.say(f"Scores by {run_dir}, trained for {step} steps:", "bold")
    known = [(place, row) for place, row in rows if knows(row, names)]
    if not known:
        raise UsageError(_spell_unknown(*rows[0], names))
    left_out += [_spell_unknown(place, row, names) for place, row in rows if not knows(row, names)]
    for place, row in known:
        scores = score_row(row, model, names, config)
        console.say(f"{place}: " + ", ".join(f"{name}={value:.1f}" for name, value in scores.items()))
    absent = [name for name in names.features if any(name not in row.features for _, row in known)]
    if absent:
        shown = ", ".join(absent[:NUM_SHOWN]) + (", ..." if len(absent) > NUM_SHOWN else "")
        console.say(f"counted as 0 where a row does not have them, as in training: {shown}", "yellow")
    for line in left_out:
        console.say(f"not scored: {line}", "yellow")
    return 0


def _read_subjects(path: Path) -> tuple[list[tuple[str, Row]], list[str]]:
    """Return place and row of what is to be scored, and what cannot be."""
    if path.is_file() and is_table(path):
        rows, left_out = read_unscored(path)
        if not rows:
            raise UsageError(f"{path} has no row that can be scored: {'; '.join(left_out[:3]) or 'it has no rows'}.")
        return rows, left_out
    rows, left_out = [], []
    for file in _find_pages(path):
        try:
            page = parse_page(require_html(file))
            rows.append((str(file), Row(page.features, page.text, {})))
        except UsageError as error:
            if file == path:
                raise
            left_out.append(str(error))
    if not rows:
        raise UsageError(f"{path} has no page that can be scored: {'; '.join(left_out[:3])}")
    return rows, left_out


def knows(row: Row, names: Names) -> bool:
    """Return whether the row has any of the features that the model was trained on, if it was on any."""
    return not names.features or bool(set(names.features) & set(row.features))


def _spell_unknown(place: str, row: Row, names: Names) -> str:
    has, wants = ", ".join(list(row.features)[:5]) or "none", ", ".join(names.features[:5])
    return (
        f"{place} has none of the features that this run was trained on. It has {has}; the run wants {wants}. "
        "Give rows with those columns, or a run that was trained on such pages."
    )


def score_page(
    html: str, model: UltraOptimizedSEOMetricsModule, names: Names, config: UltraOptimizedConfig
) -> dict[str, float]:
    """Return metric -> score of one page."""
    page = parse_page(html)
    return score_row(Row(page.features, page.text, {}), model, names, config)


@torch.no_grad()
def score_row(
    row: Row, model: UltraOptimizedSEOMetricsModule, names: Names, config: UltraOptimizedConfig
) -> dict[str, float]:
    """Return metric -> score of one row."""
    features, words, _, _ = encode_rows([row], names, config)
    return dict(zip(names.metrics, model.predict(features, words)[0].tolist()))


def _find_pages(path: Path) -> list[Path]:
    if path.is_dir():
        pages = sorted(page for page in path.rglob("*") if page.suffix.lower() in PAGES)
        if not pages:
            raise UsageError(f"{path} holds no page that ends in {' or '.join(PAGES)}. Give another folder, or a file.")
        return pages
    if not path.is_file():
        raise UsageError(f"there is no page {path} to score. Give --predict an HTML file, or a folder of them.")
    return [path]
