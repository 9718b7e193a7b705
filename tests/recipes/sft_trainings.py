"""Small fine-tunings that the tests of the recipe `sft` share: a config, a console that remembers, rows with faults."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded here

import torch
from torch import Tensor

from steadygrad_recipes.sft.config import SftConfig, TinyModel
from steadygrad_recipes.sft.data import Example, make_examples

SMALL: dict[str, Any] = {
    "num_synthetic": 700,
    "largest_amount": 99,
    "tiny": TinyModel(width=32),
    "epochs": 5,
    "warmup_steps": 20,
    "learning_rate": 5e-3,
    "max_length": 40,
    "max_new_tokens": 16,
    "num_answers": 70,
    "use_cpu": True,
}
"""200 steps, a few seconds on one core; learns most questions."""


class Lines:
    """A console that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str = "", style: str = "") -> None:
        self.said.append(text)

    @contextlib.contextmanager
    def track(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        yield lambda done, text: self.beside_bar.append(text)

    @property
    def beside_bar(self) -> list[str]:
        return self.__dict__.setdefault("_beside_bar", [])

    @property
    def log(self) -> list[dict[str, float]]:
        """The lines of the training log, read back."""
        names = {"nan": float("nan"), "inf": float("inf")}
        return [eval(line, {"__builtins__": {}}, names) for line in self.said if line.startswith("{'loss'")]


def make_config(**changes: Any) -> SftConfig:
    return SftConfig(**(SMALL | changes))


def write_rows(path: Path, rows: Sequence[Example]) -> str:
    lines = [json.dumps({"prompt": row.prompt, "completion": row.completion}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def make_rows_with_long_prompts(num_long: int) -> list[Example]:
    """Questions, some of them behind so much small talk that nothing after it fits."""
    rows = make_examples(700, 99)
    return [Example("Well, " * 60 + row.prompt, row.completion) if i < num_long else row for i, row in enumerate(rows)]


def adapter_of(run_dir: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "model" / "adapter_model.safetensors")


def assert_same_weights(left: Path, right: Path) -> None:
    first, second = adapter_of(left), adapter_of(right)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def is_finite(run_dir: Path) -> bool:
    return all(bool(value.isfinite().all()) for value in adapter_of(run_dir).values())


RARE = "!"
"""A sign whose activations do not fit into fp16 in the model below."""


def make_overflowing_folder(folder: Path, rows: Sequence[Example], width: int = 32) -> str:
    """A model in which one neuron answers to RARE with about 1e5: more than fp16 can hold, nothing to fp32 or bf16."""
    from steadygrad_recipes.sft.model import make_model, make_tokenizer

    tokenizer = make_tokenizer(rows, 384)
    model = make_model(TinyModel(width=width), tokenizer, 64, 0)
    token = tokenizer.convert_tokens_to_ids(RARE)
    with torch.no_grad():
        embedding, mlp = model.model.embed_tokens.weight, model.model.layers[0].mlp
        embedding[:, 0] = 0.0
        embedding[token] = 0.0
        embedding[token, 0] = 8.0
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[0] = 0.0
            projection.weight[0, 0] = 60.0  # RMSNorm makes the 8 above sqrt(width): (60 * sqrt(32))**2 is 115,200
        mlp.down_proj.weight[:, 0] = 1e-6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_rows_with_rare_sign(num_rare: int) -> list[Example]:
    """Questions, some of which end in RARE."""
    rows = make_examples(700, 99)
    shouted = [Example(row.prompt.replace("?", RARE), row.completion) for row in rows[:num_rare]]
    return [*shouted, *rows[num_rare:]]
