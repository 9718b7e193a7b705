"""clip6d on CUDA at the size of CLIP ViT-B/16: six modalities, bf16 and fp16, a few steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadygrad import FixedNorm, Guard, GuardConfig
from steadygrad.losses import MultiwayScale, multiway_contrastive, safe_normalize
from steadygrad_recipes.clip6d.config import Clip6dConfig, ModelConfig
from steadygrad_recipes.clip6d.encoders import ImageEncoder, TextEncoder, VectorEncoder, count_parameters
from steadygrad_recipes.clip6d.tokens import encode_batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

REAL = ModelConfig(
    embed_dim=512,
    image_size=224,
    patch_size=16,
    image_width=768,
    image_layers=12,
    text_width=512,
    text_layers=12,
    context=77,
    vector_width=1024,
    heads=8,
)
LANGUAGES = 4


class Encoders(nn.Module):
    """The recipe's encoders and scale without Lightning, which may not be installed here."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.vector = ImageEncoder(REAL), TextEncoder(REAL), VectorEncoder(32, REAL)
        self.scale = MultiwayScale(2 + LANGUAGES, REAL.embed_dim, similarity="norm")

    def forward(self, images: Tensor, tokens: Tensor, vectors: Tensor) -> Tensor:
        features = [self.image(images), *self.text(tokens).chunk(LANGUAGES), self.vector(vectors)]
        return multiway_contrastive([safe_normalize(f) for f in features], self.scale(), similarity="norm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_six_modalities_at_real_size_memorise_a_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Encoders().cuda()
    assert count_parameters(model) > 120e6
    size = 8
    texts = [f"caption {n} in language {m}" for m in range(LANGUAGES) for n in range(size)]
    images = torch.randint(0, 256, (size, 3, 224, 224), dtype=torch.uint8, device="cuda")
    tokens, vectors = encode_batch(texts, REAL.context).cuda(), torch.randn(size, 32, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if dtype is torch.float16 else None
    guard = Guard(model, optimizer, scaler=scaler, config=GuardConfig(clip=FixedNorm(max_norm=1.0)))
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", dtype=dtype):
            losses.append(guard.step(model, images, tokens, vectors))
    guard.close()
    first, last = float(losses[0]), float(losses[-1])
    assert last < 0.8 * first, (first, last)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


class Silent:
    """A console that discards its output."""

    def say(self, *_: Any) -> None:
        """Do nothing."""


def train(model: ModelConfig, precision: str, folder: Path, run_dir: Path, resume: Path | None = None) -> nn.Module:
    """Run six steps of the whole recipe, with Lightning."""
    pytest.importorskip("lightning")
    pytest.importorskip("PIL")
    from steadygrad_recipes.clip6d.data import read_corpus
    from steadygrad_recipes.clip6d.fit import build_module, fit
    from steadygrad_recipes.clip6d.synthetic import write_synthetic

    settings: dict[str, Any] = {"batch_size": 8, "epochs": 1, "max_steps": 6, "warmup_steps": 2, "save_every": 3}
    config = Clip6dConfig(precision=precision, device="cuda", model=model, **settings)
    corpus = read_corpus(config, write_synthetic(folder, num=64, seed=0))
    module = build_module(config, corpus)
    path = None if resume is None else str(resume)
    fit(module, corpus, config, run_dir=run_dir, resume=path, console=Silent())
    assert all(bool(p.isfinite().all()) for p in module.parameters())
    return module


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]


def test_the_recipe_trains_at_real_size(tmp_path: Path) -> None:
    module = train(REAL, "bf16", tmp_path / "data", tmp_path / "run")
    assert count_parameters(module) > 120e6
    assert [step["skipped"] for step in read_steps(tmp_path / "run")] == [False] * 6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_recipe_resumes_on_the_gpu(precision: str, tmp_path: Path) -> None:
    small = dataclasses.replace(REAL, image_layers=1, text_layers=1)  # checkpoints of the real size take gigabytes
    train(small, precision, tmp_path / "data", tmp_path / "run")
    steps = read_steps(tmp_path / "run")
    assert len(steps) == 6
    assert sum(not step["skipped"] for step in steps) >= 3, "fp16 may skip while the scaler finds its scale"

    middle = tmp_path / "run" / "checkpoints" / "step_00000003"
    train(small, precision, tmp_path / "data", tmp_path / "again", resume=middle)
    again = read_steps(tmp_path / "again")
    assert [step["step"] for step in again] == [3, 4, 5]
    # The same batches and weights; CUDA sums the backward pass in any order.
    assert again[0]["loss"] == pytest.approx(steps[3]["loss"], rel=1e-3)
