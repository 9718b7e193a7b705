"""The recipe as `steadygrad train cod` runs it: settings -> a run directory: record, checkpoints, pictures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad.checkpoint.run import FOLDER
from steadygrad.errors import UsageError
from steadygrad.trainer import load_trained
from steadygrad.trainer.files import find_best as find_best_checkpoint
from steadygrad.trainer.ranks import is_first
from steadygrad_recipes.cod.config import CodConfig
from steadygrad_recipes.cod.data import ADVICE, LEFT_OUT, PairDataset, Sample, open_datasets, open_loaders, read_picture
from steadygrad_recipes.cod.folder import SUFFIXES, Split, import_pillow
from steadygrad_recipes.cod.model import build_network, take_outputs
from steadygrad_recipes.cod.pictures import encode_png
from steadygrad_recipes.cod.trainer import CodTrainer, choose_place
from steadygrad_recipes.imaging import find_shown_size
from steadygrad_recipes.tables import write_lines

BEST = ("best", "best_model.pth")
PREDICTIONS = "predictions"
NUM_NAMED = 3
"""Number of pictures that an error names."""


def train(config: CodConfig, *, run_dir: Path, resume: str | None, console: Any) -> int:
    """Train both stages, or resume them; returns 0 when training reached its end."""
    train_set, test_set, splits = open_datasets(config, run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    _print_data(splits, len(train_set), len(test_set), run_dir, console)  # type: ignore[arg-type]
    loaders = open_loaders(config, train_set, test_set)
    trainer = CodTrainer(config, run_dir=run_dir, tell=console.say, shown=_choose_shown(config, test_set))
    if resume is not None:
        step = trainer.resume(find_best(resume, run_dir))
        if step is None:
            console.say("No checkpoint yet: starting from scratch.")
        elif step:  # 0: a file of weights, which the trainer has reported
            console.say(f"Resuming before step {step}.")
    try:
        stats = trainer.train(*loaders)
    except ValueError as error:
        if trainer.is_protected:
            raise
        console.say(f"ValueError: {error}", "red")
        console.say(f"To continue from the last checkpoint: steadygrad train cod --resume {run_dir}")
        return 2
    _print_end(stats, console)
    return 0


def predict(config: CodConfig, path: str | Path, *, run_dir: Path, console: Any) -> int:
    """Write masks of an image or a folder of images, by the best weights of a run, into the run's `predictions`."""
    path = Path(path)
    files = sorted(one for one in path.iterdir() if one.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    if not files or (files == [path] and not path.is_file()):
        raise UsageError(f"there is no picture at {path}. Give an image, or a folder that holds {', '.join(SUFFIXES)}.")
    # The run's weights replace all of it; the backbone's own file need not be here any more
    model = build_network(dataclasses.replace(config, backbone_weights=None))
    load_trained(run_dir, model)
    device, _ = choose_place(config)
    model.to(device).eval()
    folder = run_dir / PREDICTIONS
    folder.mkdir(exist_ok=True)
    stems = Counter(file.stem for file in files)
    refused = []
    for file in files:
        try:
            mask = _find_mask(model, file, config.image_size, device)
        except UsageError as error:
            refused.append(str(error).removesuffix(ADVICE))
            continue
        # a.jpg and a.png would overwrite each other's mask
        target = folder / f"{file.stem if stems[file.stem] == 1 else file.name}.png"
        target.write_bytes(encode_png(mask.expand(3, -1, -1)))
        console.say(f"{file.name}: {float((mask > 0.5).float().mean()):.1%} of it is object -> {target}")
    if len(refused) == len(files):
        raise UsageError(f"{'; '.join(refused[:NUM_NAMED])} Give another picture.")
    for line in refused:
        console.say(f"no mask: {line}", "yellow")
    return 0


@torch.no_grad()
def _find_mask(model: nn.Module, file: Path, size: int, device: str) -> Tensor:
    """Return probabilities at the picture's own size: [1, H, W]."""
    pixels = read_picture(file, size)[None].to(device)
    with import_pillow("reading pictures").open(file) as picture:
        width, height = find_shown_size(picture)
    logits = take_outputs(model(pixels), pixels.shape[-2:])[0]
    return F.interpolate(logits, size=(height, width), mode="bilinear", align_corners=False)[0].sigmoid().cpu()


def find_best(resume: str, run_dir: Path) -> str:
    """Return the path to resume from; `best` or FOLDER/best_model.pth means the best checkpoint of this or that run."""
    path = Path(resume)
    if path.name not in BEST or path.is_file():
        return resume
    return str(find_best_checkpoint(run_dir / FOLDER if resume == "best" else path.parent))


def _choose_shown(config: CodConfig, test_set: Any) -> list[tuple[str, Sample]]:
    """Choose pictures spread over the evaluation data."""
    num = min(config.num_pictures, len(test_set))
    chosen = [round(i * (len(test_set) - 1) / max(1, num - 1)) for i in range(num)]
    if isinstance(test_set, PairDataset):
        return [(test_set.pairs[i].image.name, test_set[i]) for i in chosen]
    return [(f"made picture {i}", test_set[i]) for i in chosen]


def _print_data(splits: dict[str, Split], num_train: int, num_test: int, run_dir: Path, console: Any) -> None:
    made = "" if splits else " They are generated: no dataset_path was given."
    console.say(f"{num_train} images to train on, {num_test} to evaluate on.{made}")
    for name, split in splits.items():
        console.say(f"{name}: {split.images}")
        if split.num_noncam:
            console.say(f"{name}: {split.num_noncam} NonCAM images are not used (--include-noncam true uses them).")
    bad = [f"{name}: {reason}" for name, split in splits.items() for reason in split.bad]
    if bad and is_first():
        write_lines(run_dir / LEFT_OUT, bad)
        console.say(f"{len(bad)} files are left out; each is named in {run_dir / LEFT_OUT}.", "yellow")


def _print_end(stats: dict[str, Any], console: Any) -> None:
    last = stats["val_history"][-1]
    num_steps = stats.get("num_steps")  # without a guard no steps are counted
    skipped = f"; {stats['num_skipped']} of {num_steps} steps skipped" if num_steps else ""
    console.say(
        f"Done: IoU {last['iou']:.4f}, Dice {last['dice']:.4f}, MAE {last['mae']:.4f}, "
        f"S-measure {last['s_measure']:.4f}, weighted F {last['weighted_f']:.4f}, "
        f"E-measure {last['e_measure']:.4f}{skipped}."
    )
