"""stable_training_arguments: TrainingArguments that start a fine-tuning on the safe side."""

from __future__ import annotations

from typing import Any

import torch

from steadygrad.act.precision import choose_precision
from steadygrad.config import Precision
from steadygrad.extras import import_extra

_transformers = import_extra("transformers", "transformers", what="this adapter")

WARMUP_STEPS = 50
MAX_GRAD_NORM = 1.0


def stable_training_arguments(*, arguments_class: Any = None, **overrides: Any) -> Any:
    """TrainingArguments with bf16 where the GPU has it, else fp16; warm-up; clipping; label names for PEFT models.

    `overrides` win, whatever they are. `arguments_class` is for trainers with arguments of their own:
    `stable_training_arguments(arguments_class=trl.SFTConfig, output_dir="out")`.

    PEFT wraps the model's `forward`, so that the Trainer cannot find out what its labels are called: hence the name.
    """
    arguments_class = arguments_class or _transformers.TrainingArguments
    settings: dict[str, Any] = {
        "max_grad_norm": MAX_GRAD_NORM,
        "warmup_steps": WARMUP_STEPS,
        "label_names": ["labels"],
        **_choose_half_precision(overrides),
    }
    return arguments_class(**(settings | overrides))


def _choose_half_precision(overrides: dict[str, Any]) -> dict[str, bool]:
    """Nothing where the caller has chosen, or where there is no GPU."""
    if overrides.get("bf16") or overrides.get("fp16") or overrides.get("use_cpu") or not torch.cuda.is_available():
        return {"bf16": False, "fp16": False}
    chosen = choose_precision("cuda")
    if chosen is Precision.BF16 and overrides.get("bf16") is False:
        return {"bf16": False, "fp16": False}
    return {"bf16": chosen is Precision.BF16, "fp16": chosen is Precision.FP16}
