"""A picture or a sentence, and a trained run -> the nearest samples of the run's data in every other modality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.trainer.files import load_trained
from steadygrad_recipes.clip6d import shards
from steadygrad_recipes.clip6d.captions import Sample
from steadygrad_recipes.clip6d.config import IMAGE, VECTOR, Clip6dConfig, split_modality
from steadygrad_recipes.clip6d.data import (
    CaptionDataset,
    Corpus,
    collate,
    encode_captions,
    has_modality,
    read_corpus,
    read_image,
)
from steadygrad_recipes.clip6d.fit import build_module, find_folder
from steadygrad_recipes.clip6d.module import EnhancedLightningCLIPModule

PICTURES = tuple(f".{ending}" for ending in shards.PICTURES)
"""A query with one of these suffixes is a file, not a text."""
SHOWN = 3
"""Number of neighbours printed for each modality."""


@torch.no_grad()
def find_captions(config: Clip6dConfig, query: str, *, run_dir: Path, console: Any) -> int:
    """Print the samples nearest to an image file or to a text; returns the exit code."""
    corpus = read_corpus(config, find_folder(config, run_dir))
    module = build_module(config, corpus)
    load_trained(run_dir, module)
    module.eval()
    if Path(query).is_dir():
        return print_zero_shot(module, Path(query), config, console)
    own, vector = encode_query(module, query, config)
    samples = [*corpus.train, *corpus.val]
    features = encode_samples(module, samples, corpus, config)
    console.say(f"Nearest to the {own} {query}:", "bold")
    for name, rows in features.items():
        if name == VECTOR or (name == IMAGE and own == IMAGE):
            continue
        scores = (F.normalize(rows, dim=-1) @ F.normalize(vector, dim=-1)).tolist()
        nearest: dict[str, float] = {}  # several samples may have the same caption
        for score, sample in sorted(zip(scores, samples), key=lambda pair: -pair[0]):
            if has_modality(sample, name, corpus.vectors):
                nearest.setdefault(describe_sample(sample, name), score)
        for text, score in list(nearest.items())[:SHOWN]:
            console.say(f"  {name}  {score:.3f}  {text}")
    return 0


def print_zero_shot(module: EnhancedLightningCLIPModule, folder: Path, config: Clip6dConfig, console: Any) -> int:
    """Print how often the pictures of each class are nearest to its name; a class is a folder of pictures."""
    if IMAGE not in config.modalities or not module.texts:
        raise UsageError(f"classes need images and a language, and this run has {', '.join(config.modalities)}.")
    classes = {
        one.name: _list_pictures(one)
        for one in sorted(folder.iterdir())
        if one.is_dir() and not one.name.startswith(".")
    }
    empty = next((name for name, files in classes.items() if not files), None)
    if empty is not None:  # a class that is left out would make the others look easier
        raise UsageError(f"{folder / empty} has no picture ({', '.join(PICTURES)}). Add some, or remove the folder.")
    if len(classes) < 2:
        raise UsageError(
            f"{folder} has {len(classes)} folders of pictures. Give one folder for each class, two or more."
        )
    names = [name.replace("_", " ") for name in classes]
    texts = F.normalize(module.text_encoder(encode_captions(names, config.model)), dim=-1)
    right = total = 0
    for index, (name, files) in enumerate(classes.items()):
        read = (read_image(file, config.model.image_size) for file in files)
        pixels = [one for one in read if one is not None]
        if not pixels:
            raise UsageError(
                f"{folder / name} has no picture that can be read, of {len(files)}. Replace them, or remove the folder."
            )
        batches = torch.stack(pixels).split(config.batch_size)  # a class of all pictures at once may not fit
        found = torch.cat([F.normalize(module.image_encoder(batch), dim=-1) @ texts.mT for batch in batches]).argmax(1)
        hits = int((found == index).sum())
        right, total = right + hits, total + len(pixels)
        console.say(f"  {name}  {hits} of {len(pixels)}")
    console.say(f"Zero-shot accuracy {right / total:.3f}, by chance {1 / len(classes):.3f}", "bold")
    return 0


def _list_pictures(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)


def encode_query(module: EnhancedLightningCLIPModule, query: str, config: Clip6dConfig) -> tuple[str, Tensor]:
    """Return the query's modality and its features."""
    path = Path(query)
    if path.is_file():
        pixels = read_image(path, config.model.image_size) if IMAGE in config.modalities else None
        if pixels is None:
            raise UsageError(
                f"{path} cannot be used as an image by a model of {', '.join(config.modalities)}. "
                "Give a picture that Pillow reads, and a run that was trained on images."
            )
        return IMAGE, module.image_encoder(pixels.unsqueeze(0))[0]
    if not query.strip():
        raise UsageError("there is nothing to look for in an empty text. Give the path of an image, or a text.")
    if path.suffix.lower() in PICTURES:
        raise UsageError(f"there is no picture {path}. Give the path of an image, or a text.")
    if not module.texts:
        raise UsageError(
            f"{path} is not a file, and this model was trained without a language. Give the path of an image."
        )
    return "text", module.text_encoder(encode_captions([query], config.model))[0]


def encode_samples(
    module: EnhancedLightningCLIPModule, samples: Sequence[Sample], corpus: Corpus, config: Clip6dConfig
) -> dict[str, Tensor]:
    """Return the features of every sample in every modality."""
    data, parts = CaptionDataset(samples, corpus, config), []
    for start in range(0, len(samples), config.batch_size):
        items = [data[-1, i] for i in range(start, min(start + config.batch_size, len(samples)))]
        parts.append(module.encode(collate(items, config=config, vector_dim=corpus.vector_dim)))
    return {name: torch.cat([part[name] for part in parts]) for name in config.modalities}


def describe_sample(sample: Sample, name: str) -> str:
    """Return the caption, or the image's file name, or its place in a shard."""
    if name == IMAGE:
        return ", ".join(sample.origin) if sample.shard else str(sample.image.name)
    language, number = split_modality(name)
    return sample.captions[language][(number or 1) - 1]
