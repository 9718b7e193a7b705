"""The recipe `sft`: supervised fine-tuning of a language model with LoRA, by transformers' Trainer.

Follows a training whose log read `{'loss': 0.0, 'grad_norm': nan}`. `steadygrad train sft` trains and scores it; with
`--predict FILE` the trained model answers. transformers and torch are loaded only when one of them is called.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygrad.errors import ConfigError, UsageError
from steadygrad_recipes.sft.config import QUICK, SftConfig
from steadygrad_recipes.sft.data import Example, read_file
from steadygrad_recipes.tables import read_lines, require_text

if TYPE_CHECKING:
    from steadygrad_recipes.sft.console import Console

__all__ = ["FIXED", "LOOP", "QUICK", "SUMMARY", "Config", "predict", "train"]

Config = SftConfig
SUMMARY = "supervised fine-tuning with LoRA, by transformers' Trainer"
_CLASSES = {
    "GradientMonitoringCallback": "steadygrad.adapters.transformers",
    "safe_compute_loss": "steadygrad.adapters.transformers",
    "train_model": "steadygrad_recipes.sft.fine_tune",
}
"""Name -> module, for `__getattr__`."""
LOOP = "transformers' Trainer"
FIXED = (
    "model", "tiny", "lora_rank", "lora_alpha", "lora_targets",
    "seed", "num_synthetic", "largest_amount", "validation_share",
)  # fmt: skip


def train(config: SftConfig, *, run_dir: Path, resume: str | None = None, console: Console) -> int:
    """Train; returns 0 when the model was trained, saved and scored."""
    if config.hub:
        os.environ["HF_HUB_OFFLINE"] = "0"  # read when the libraries are imported
    from steadygrad_recipes.sft.fine_tune import MODEL, train_model

    trained = train_model(config, run_dir=run_dir, resume=resume, console=console)
    if trained.safe_loss is not None and trained.safe_loss.counts:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in trained.safe_loss.counts.items())
        console.say(f"Losses that were replaced by a small one: {reasons}.", "yellow")
    if trained.callback is not None:
        console.say(trained.callback.guard.summary())
    if trained.scores.num_prompts:
        console.say(f"{trained.scores} on {trained.scores.num_prompts} held-out prompts.", "bold")
        console.say(f"Always the most common answer: {trained.baseline}.")
    else:
        console.say("No held-out row has a prompt, so no answer was scored.")
    console.say(f"Weights: {run_dir / MODEL}")
    return 0


def predict(config: SftConfig, path: str | Path, *, run_dir: Path, console: Console) -> int:
    """Answer each prompt of a file: JSON lines as for training, or one prompt per line."""
    from steadygrad_recipes.sft.fine_tune import MODEL
    from steadygrad_recipes.sft.metrics import answer
    from steadygrad_recipes.sft.model import load_trained
    from steadygrad_recipes.sft.quiet import quiet_libraries

    folder = run_dir / MODEL
    if not folder.is_dir():
        raise UsageError(f"{run_dir} holds no trained model ({MODEL}/). Train first, or give its --run-dir.")
    examples = read_prompts(Path(path))
    with quiet_libraries():
        model, tokenizer = load_trained(folder, config, run_dir)
        texts = answer(model, tokenizer, examples, max_new_tokens=config.max_new_tokens)
    for example, text in zip(examples, texts):
        console.say(f"{_spell_prompt(example)} -> {text}")
    return 0


def read_prompts(path: Path) -> list[Example]:
    """Return the prompts of a table or a folder of `datasets`, or the lines of any other file."""
    if path.suffix.lower() in (".jsonl", ".json", ".csv", ".tsv", ".parquet") or path.is_dir():
        return read_file(path, needs_completion=False)
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a file. Give a .jsonl file with prompts, or a text file with a prompt a line."
        )
    require_text(path)
    lines = list(read_lines(path))
    wrong = [f"{path}:{number}: {line}" for number, line in lines if isinstance(line, ValueError)]
    if wrong or not lines:
        raise ConfigError(f"{wrong[0] if wrong else f'{path} has no line'}. Give a text in UTF-8 with a prompt a line.")
    return [Example(line, "") for _, line in lines]


def _spell_prompt(example: Example) -> Any:
    return example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]


def __getattr__(name: str) -> Any:
    """Import a class of this recipe when it is asked for: the command line needs none of them."""
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CLASSES[name]), name)
