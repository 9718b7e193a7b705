"""The recipe `sft` on CUDA, at the size of a small real language model (about 0.2 billion weights), for a few steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded here

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

from steadygrad_recipes.sft.config import SftConfig, TinyModel
from steadygrad_recipes.sft.fine_tune import Trained, train_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

NUM_STEPS = 12
LARGE = TinyModel(width=1024, num_layers=16, num_heads=16, vocab_size=384)


class Quiet:
    """A console that discards its output."""

    def say(self, text: str = "", style: str = "") -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def track(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """Show no bar."""
        yield lambda *_: None


def fine_tune(run_dir: Path, **changes: Any) -> Trained:
    settings: dict[str, Any] = {
        "tiny": LARGE,
        "num_synthetic": 400,
        "largest_amount": 99,
        "max_steps": NUM_STEPS,
        "warmup_steps": 4,
        "learning_rate": 1e-3,
        "max_length": 64,
        "max_new_tokens": 8,
        "num_answers": 8,
        "log_every": 1,
    }
    return train_model(SftConfig(**(settings | changes)), run_dir=run_dir, console=Quiet())


def losses_of(trained: Trained) -> list[float]:
    return [line["loss"] for line in trained.trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_the_loss_falls_and_there_are_no_findings(precision: str | None, tmp_path: Path) -> None:
    trained = fine_tune(tmp_path, precision=precision)
    args = trained.trainer.args
    assert args.bf16 or args.fp16
    assert args.fp16 == (precision == "fp16" or (precision is None and not torch.cuda.is_bf16_supported()))
    assert sum(p.numel() for p in trained.trainer.model.parameters()) > 1.5e8
    losses = losses_of(trained)
    assert len(losses) == NUM_STEPS
    assert losses[-1] < 0.7 * losses[0]
    assert trained.callback is not None
    stats = trained.callback.guard.stats()
    assert stats["num_steps"] == NUM_STEPS
    if not args.fp16:  # a scaler may first search its scale
        assert stats["num_skipped"] == 0
    assert all(bool(p.isfinite().all()) for p in trained.trainer.model.parameters())


def test_bf16_weights_with_lora_in_fp32_train_too(tmp_path: Path) -> None:
    trained = fine_tune(tmp_path, base_precision="bf16", gradient_checkpointing=True)
    formats = {p.dtype for p in trained.trainer.model.parameters() if p.requires_grad}
    assert formats == {torch.float32}
    losses = losses_of(trained)
    assert losses[-1] < 0.8 * losses[0]


def test_a_poisoned_gradient_is_skipped_under_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steadygrad.testing import poison_gradient
    from steadygrad_recipes.sft import fine_tune as module

    build = module.build_trainer

    def build_and_poison(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        weight = next(p for p in built[0].model.parameters() if p.requires_grad)
        poison_gradient(weight, at={6}, value=float("inf"))
        return built

    monkeypatch.setattr(module, "build_trainer", build_and_poison)
    trained = fine_tune(tmp_path, precision="fp16", tiny=TinyModel())
    assert trained.callback is not None
    assert int(trained.callback.guard.stats()["num_skipped"] or 0) >= 1
    assert all(bool(p.isfinite().all()) for p in trained.trainer.model.parameters())
