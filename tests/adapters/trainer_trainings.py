"""Small transformers trainings for several tests: two models, their data, and one call of `train()`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

NUM_STEPS = 8
BATCH = 2


class Regression(nn.Module):
    """A custom model with floats as input: the Trainer accepts anything whose forward returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.net(x).squeeze(-1)
        return {"loss": (output - labels).square().mean(), "logits": output}


def make_language_model(**overrides: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | overrides)))


def make_rows(count: int = NUM_STEPS * BATCH) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(6, generator=generator), "labels": torch.randn((), generator=generator)} for _ in range(count)
    ]


def make_texts(count: int = NUM_STEPS * BATCH, *, masked: Sequence[int] = ()) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(1, 32, (8,), generator=generator) for _ in range(count)]
    return [
        {"input_ids": ids, "labels": torch.full_like(ids, -100) if i in masked else ids} for i, ids in enumerate(tokens)
    ]


def spoil(rows: list[dict[str, Tensor]], step: int, fault: str) -> list[dict[str, Tensor]]:
    """Return the same rows with those of `step` bad: NaN, or finite with an infinite sum."""
    rows = [dict(row) for row in rows]
    for row in rows[step * BATCH : (step + 1) * BATCH]:
        row |= {"x": row["x"] * math.nan} if fault == "nan" else {"labels": torch.tensor(3e38)}
    return rows


class InOrder(transformers.Trainer):
    """Keeps the order of the rows, so that a test knows which step gets which."""

    def _get_train_sampler(self, *_args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "max_grad_norm": 1e9,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **(settings | options))


def train(
    model: nn.Module,
    rows: Sequence[Any],
    folder: Path,
    *callbacks: Any,
    kind: Callable[..., transformers.Trainer] = InOrder,
    prepare: Callable[[transformers.Trainer], Any] | None = None,
    resume: Any = None,
    validation: Sequence[Any] | None = None,
    **options: Any,
) -> transformers.Trainer:
    trainer = kind(
        model=model,
        args=make_arguments(folder, **options),
        train_dataset=list(rows),
        eval_dataset=validation,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if prepare is not None:
        prepare(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_of(trainer: transformers.Trainer) -> list[dict[str, float]]:
    """Return the lines of the log that are about training."""
    return [line for line in trainer.state.log_history if "loss" in line]


def state_of(trainer: transformers.Trainer) -> dict[str, Tensor]:
    """Return every tensor that the training has changed: weights, buffers, moments, counters, rates."""
    state = {f"model.{name}": value.clone() for name, value in trainer.model.state_dict().items()}
    saved = trainer.optimizer.state_dict()
    for i, moments in saved["state"].items():
        state |= {f"{i}.{name}": v.clone() for name, v in moments.items() if isinstance(v, Tensor)}
    state |= {f"lr.{i}": torch.tensor(float(group["lr"])) for i, group in enumerate(saved["param_groups"])}
    return state


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def is_finite(model: nn.Module) -> bool:
    return all(bool(value.isfinite().all()) for value in model.state_dict().values())
