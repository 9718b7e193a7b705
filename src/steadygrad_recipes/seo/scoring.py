"""`steadygrad train seo --predict PAGE`: the trained model of a run and a page -> its scores, printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from steadygrad.errors import UsageError
from steadygrad.trainer import load_trained
from steadygrad_recipes.seo.config import UltraOptimizedConfig
from steadygrad_recipes.seo.data import Names, encode_rows
from steadygrad_recipes.seo.features import parse_page
from steadygrad_recipes.seo.model import UltraOptimizedSEOMetricsModule
from steadygrad_recipes.seo.readers import PAGES, Row


def predict_page(config: UltraOptimizedConfig, path: str, *, run_dir: Path, console: Any) -> int:
    """Print the scores of a page, or of every page of a folder; the exit code."""
    pages = _find_pages(Path(path))
    names = Names.read(run_dir)
    model = UltraOptimizedSEOMetricsModule(config, num_features=len(names.features), metrics=names.metrics)
    step = load_trained(run_dir, model)
    model.eval()
    console.say(f"Scores by {run_dir}, trained for {step} steps:", "bold")
    for page in pages:
        scores = score_page(page.read_text(encoding="utf-8", errors="replace"), model, names, config)
        console.say(f"{page}: " + ", ".join(f"{name}={value:.1f}" for name, value in scores.items()))
    return 0


@torch.no_grad()
def score_page(
    html: str, model: UltraOptimizedSEOMetricsModule, names: Names, config: UltraOptimizedConfig
) -> dict[str, float]:
    """Metric -> score of one page."""
    page = parse_page(html)
    features, words, _, _ = encode_rows([Row(page.features, page.text, {})], names, config)
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
