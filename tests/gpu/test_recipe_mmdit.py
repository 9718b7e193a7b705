"""The mmdit recipe on CUDA: a size and a fault that once broke it, in bf16; and it learns in fp16."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from steadygrad.facts import Severity, StepRecord
from steadygrad.testing import poison_gradient
from steadygrad_recipes.mmdit import program
from steadygrad_recipes.mmdit.config import (
    DataConfig,
    LossConfig,
    MMDiTConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from steadygrad_recipes.mmdit.data import Rows
from steadygrad_recipes.mmdit.metrics import measure_baseline
from steadygrad_recipes.mmdit.model import MMDiT, Shapes
from steadygrad_recipes.mmdit.trainer import MMDiTTrainer

LARGE = ModelConfig(hidden_size=1024, num_layers=23, num_heads=16)
SHAPES = Shapes(vocab_size=8192, text_length=256, num_latents=32, latent_dim=64)


class Silent:
    def say(self, text: str = "", style: str = "") -> None:
        pass


class Watched(MMDiTTrainer):
    """Keeps the records of its steps."""

    def end_step(self, record: StepRecord) -> None:
        super().end_step(record)
        self.records = [*getattr(self, "records", []), record]


@pytest.fixture
def no_memory_left_behind() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def make_rows(num: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 257, (num, 1), generator=generator)
    return Rows(
        torch.randint(0, SHAPES.vocab_size, (num, SHAPES.text_length), generator=generator),
        torch.arange(SHAPES.text_length) < lengths,
        torch.randn(num, SHAPES.num_latents, SHAPES.latent_dim, generator=generator),
    )


@pytest.mark.usefixtures("no_memory_left_behind")
def test_892_million_parameters_in_bf16_survive_an_inf() -> None:
    printed: list[str] = []
    config = MMDiTConfig(model=LARGE, training=TrainingConfig(device="cuda", epochs=1, max_steps=6, warmup_steps=2))
    with torch.device("cuda"):
        model = MMDiT(LARGE, SHAPES)
    trainer = Watched(model, config, tell=printed.append)
    poison_gradient(model.blocks[11].text.up.weight, at={6}, value=math.inf)  # type: ignore[union-attr, arg-type]

    stats = trainer.train(DataLoader(make_rows(48), config.training.train_batch_size, pin_memory=True))

    assert sum(p.numel() for p in model.parameters()) == pytest.approx(892e6, rel=0.01)
    assert [record.skipped for record in trainer.records] == [False, False, False, True, False, False]
    assert "ERROR: NaN/Inf gradient norm at step 3" in printed
    for record in trainer.records:
        assert 0 < record.extra["text_loss"] < 2 * math.log(SHAPES.vocab_size)
        assert 0 < record.extra["latent_loss"] <= 4 / SHAPES.latent_dim
    assert stats["num_steps"] == 6
    assert trainer.monitor_training_health()["parameters_healthy"]


def test_computing_the_loss_never_waits_for_the_device() -> None:
    config = MMDiTConfig(training=TrainingConfig(device="cuda"))
    with torch.device("cuda"):
        model = MMDiT(ModelConfig(hidden_size=64, num_layers=2, num_heads=4), SHAPES)
    trainer = MMDiTTrainer(model, config)
    rows = make_rows(8)
    batch = {"tokens": rows.tokens.cuda(), "mask": rows.mask.cuda(), "latents": rows.latents.cuda()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        trainer.compute_loss(batch)[0].backward()  # kernels are loaded here
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.compute_loss(batch)[0].backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_learns_in_half_precision(dtype: str) -> None:
    config = MMDiTConfig(
        data=DataConfig(num_synthetic=2048),
        model=ModelConfig(hidden_size=64, num_layers=1, num_heads=4),
        optimizer=OptimizerConfig(lr=6e-3),
        loss=LossConfig(latent_loss_weight=20.0),
        training=TrainingConfig(
            dtype=dtype,  # type: ignore[arg-type]
            device="cuda",
            warmup_steps=20,
            train_batch_size=32,
            gradient_accumulation_steps=1,
            epochs=10,
            max_steps=250,
        ),
    )
    corpus = program.load_corpus(config)
    trainer = program.make_trainer(config, corpus, None, Silent())
    loaders = program.make_loaders(config, corpus)

    trainer.train(*loaders)

    baseline = measure_baseline(trainer.model, corpus.train, loaders[1], config)
    reached = trainer.val_history[-1]
    assert reached["text_loss"] < 0.65 * baseline["text_loss"]
    assert reached["latent_loss"] < 0.65 * baseline["latent_loss"]
    assert trainer.guard is not None
    if dtype == "bf16":  # fp16's first steps are skipped: the loss scaler is searching
        assert [f for f in trainer.guard.findings if f.severity.rank > Severity.INFO.rank] == []
    assert trainer.guard.stats()["num_rollbacks"] == 0
