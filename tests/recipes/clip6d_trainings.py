"""Small trainings of clip6d that the tests share: a config of a few thousand weights, and a console that remembers."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad_recipes.clip6d.config import Clip6dConfig, ModelConfig
from steadygrad_recipes.clip6d.data import Corpus, read_corpus
from steadygrad_recipes.clip6d.fit import build_module, fit
from steadygrad_recipes.clip6d.module import EnhancedLightningCLIPModule
from steadygrad_recipes.clip6d.saving import RunSaver
from steadygrad_recipes.clip6d.synthetic import write_synthetic

TINY = ModelConfig(
    embed_dim=32,
    image_size=24,
    patch_size=6,
    image_width=32,
    image_layers=1,
    text_width=32,
    text_layers=1,
    context=64,
    vector_width=32,
    heads=2,
)
SIX = ("image", "en", "de", "es", "zh", "vector")


def make_config(**changes: Any) -> Clip6dConfig:
    settings: dict[str, Any] = {"batch_size": 6, "epochs": 1, "learning_rate": 2e-3, "warmup_steps": 5, "model": TINY}
    return Clip6dConfig(**(settings | changes))


@functools.cache
def shapes_folder(num: int = 432) -> Path:
    """The synthetic set, made once for all tests of a process."""
    folder = Path(tempfile.mkdtemp(prefix="clip6d-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_synthetic(folder, num=num, seed=0)


def open_shapes(config: Clip6dConfig, num: int = 432) -> Corpus:
    return read_corpus(config, shapes_folder(num))


class Console:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str = "", style: str = "") -> None:
        self.lines.append(text)

    def show_table(self, header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
        self.lines += ["  ".join(row) for row in (header, *rows)]


def train(
    config: Clip6dConfig, run_dir: Path, *, resume: str | None = None, corpus: Corpus | None = None
) -> tuple[EnhancedLightningCLIPModule, RunSaver]:
    corpus = open_shapes(config) if corpus is None else corpus
    module = build_module(config, corpus)
    saver = fit(module, corpus, config, run_dir=run_dir, resume=resume, console=Console())
    return module, saver


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def poison_vector(corpus: Corpus, index: int, value: float) -> Corpus:
    """The same, with the vector of one training sample spoilt after it was read."""
    key = corpus.train[index].id
    spoilt = corpus.vectors[key].clone().fill_(value)
    return dataclasses.replace(corpus, vectors={**corpus.vectors, key: spoilt})
