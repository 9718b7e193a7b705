"""Pictures of the pages for the documentation, taken with Chromium of trainings that this program runs.

Seven scenes, each at three widths in both themes: a healthy run, one that survived, one that is lost, one that runs,
four runs compared, a hundred incidents, a million steps. They are written to docs/assets with a reduced palette;
docs/screenshots.md shows all of them.

    python docs/_site/screenshots.py [--folder build/screenshots] [--steps 1000000] [--scene lost]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WIDTHS, THEMES = (1400, 900, 400), ("light", "dark")
HEIGHT = 950


def train(folder: Path, *, steps: int = 400, faults: int = 0, rate: float = 1e-2, closes: bool = True) -> Any:
    """Train a small model that divides by a spread: `faults` batches hold one sample of equal features."""
    import torch
    from torch import nn

    from steadygrad import Guard

    torch.manual_seed(0)
    encoder, head = nn.Linear(8, 32), nn.Linear(32, 1)
    model = nn.ModuleDict({"encoder": encoder, "head": head})
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=rate), run_dir=folder)

    def training_step(features: torch.Tensor) -> torch.Tensor:
        centred = features - features.mean(dim=1, keepdim=True)
        normed = centred / centred.square().sum(dim=1, keepdim=True).sqrt()
        return (head(torch.tanh(encoder(normed))).squeeze(1) - normed[:, 0]).square().mean()

    gap = steps // (faults + 1)
    for step in range(steps):
        features = torch.randn(32, 8)
        if step and step % gap == 0 and step <= gap * faults:
            features[5] = 1.0
        guard.step(training_step, features)
    guard.flush()
    if closes:
        guard.close()
    return guard


def make_scenes(folder: Path, num_steps: int) -> Iterator[tuple[str, list[Path], Any]]:
    """Yield the name of each scene, its runs, and what must stay alive while it is looked at."""
    from steadygrad.cli import main

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from report import write_long_run

    yield "healthy", [folder / "healthy"], train(folder / "healthy")
    if not (folder / "demo" / "guarded").exists():
        main(["demo", "--run-dir", str(folder / "demo")])
    yield "survived", [folder / "demo" / "guarded"], None
    yield "lost", [folder / "demo" / "unguarded"], None
    running = train(folder / "running", faults=2, closes=False)
    yield "running", [folder / "running"], running
    running.close()
    rates = (1e-3, 3e-3, 1e-2, 1e-1)
    for rate in rates:
        train(folder / "compared" / f"rate-{rate:g}", rate=rate, faults=1 if rate == 1e-2 else 0)
    yield "compared", [folder / "compared" / f"rate-{rate:g}" for rate in rates], None
    yield "incidents", [folder / "incidents"], train(folder / "incidents", steps=2500, faults=108)
    long = folder / f"long-{num_steps}"
    if not long.exists():
        write_long_run(long, num_steps)
    yield "million", [long], None


def take(browser: Any, page_file: Path, folder: Path, scene: str) -> None:
    """Take the first screen of a page at every width in both themes."""
    for width in WIDTHS:
        for theme in THEMES:
            context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=theme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            page.wait_for_selector("figure.chart:not([hidden]) .plot > svg")
            target = folder / f"{scene}-{width}-{theme}.png"
            page.screenshot(path=target)
            context.close()
            shrink(target, ROOT / "docs" / "assets" / f"report-{target.stem}.webp")


def shrink(source: Path, target: Path) -> None:
    """Write a picture with 256 colours and nothing else lost, a third of its size."""
    from PIL import Image

    with Image.open(source) as picture:
        # The colours farthest apart are kept: those of the lines, which cover few pixels.
        few = picture.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.convert("RGB").save(target, lossless=True, quality=80, method=4)


def main() -> None:
    """Train, write the reports, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "screenshots")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the long run")
    parser.add_argument("--scene", action="append", help="only this one; may be given several times")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from steadygrad.view.render.report import write_report

    runs = arguments.folder / "runs"
    for old in ("healthy", "running", "compared", "incidents"):
        shutil.rmtree(runs / old, ignore_errors=True)
    runs.mkdir(parents=True, exist_ok=True)
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for scene, paths, _ in make_scenes(runs, arguments.steps):
            if arguments.scene and scene not in arguments.scene:
                continue
            write_report(paths, arguments.folder / f"{scene}.html")
            take(browser, arguments.folder / f"{scene}.html", arguments.folder, scene)
            print(scene, f"{(arguments.folder / f'{scene}.html').stat().st_size / 1e6:.2f} MB", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
