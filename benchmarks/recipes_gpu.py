"""What each recipe does at a real size on one GPU: steps and samples a second, memory, and a fault survived.

Every recipe's own model, loss, optimizer and clipping, on batches made here: seo on pages of 4096 words, clip6d with
six modalities at B=64 and encoders of ViT-B's size, cod at 352 x 352 with a ResNet-50, mmdit with 100M parameters, sft
of a Llama of 1.1B built from a config, with LoRA where peft is there. After the timed steps one batch is poisoned:
the step must be skipped, and the next ones must train on. Each takes about a minute.

    python benchmarks/recipes_gpu.py [--only seo,cod] [--device cuda|cpu] [--compile] [--quick]

Needs torch and steadygrad; Lightning (clip6d) and transformers (sft) where they are installed, else torch alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from machine import describe_machine, write_results
from models import GPT
from steadygrad import Guard, GuardConfig
from steadygrad.config import FixedNorm, Precision
from steadygrad.errors import SteadygradError
from steadygrad.losses import MultiwayScale, multiway_contrastive, safe_normalize

WARMUP, SECONDS, MOST_STEPS = 8, 15.0, 400


@dataclass
class Case:
    """One recipe at one size."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any], Any]
    batch: Any
    poison: Callable[[Any], Any]
    """Returns the batch with a NaN in it."""
    config: GuardConfig
    num_samples: int
    """Samples of a batch."""
    about: str
    num_tokens: int = 0


# --- the recipes ------------------------------------------------------------------------------------------------------


def make_seo(device: str, *, quick: bool) -> Case:
    from steadygrad_recipes.seo.config import UltraOptimizedConfig
    from steadygrad_recipes.seo.model import UltraOptimizedSEOMetricsModule
    from steadygrad_recipes.seo.trainer import UltraOptimizedSEOTrainer

    words, batch, hidden, layers = (64, 8, 32, 1) if quick else (4096, 256, 1024, 8)
    config = UltraOptimizedConfig(
        device=device, max_words=words, hidden=hidden, num_layers=layers, text_dim=hidden // 2, num_buckets=1 << 17
    )
    trainer = UltraOptimizedSEOTrainer(UltraOptimizedSEOMetricsModule(config), config, tell=lambda _: None)
    num_features, num_metrics = len(trainer.bare_model.feature_mean), len(trainer.bare_model.metrics)
    made = (
        torch.randn(batch, num_features, device=device),
        torch.randint(1, config.num_buckets, (batch, words), device=device),
        50 + 20 * torch.randn(batch, num_metrics, device=device),
        torch.ones(batch, num_metrics, dtype=torch.bool, device=device),
    )
    about = f"{words} words a page, width {hidden}, {layers} blocks"
    return _of_trainer(trainer, made, lambda b: (b[0] * torch.nan, *b[1:]), batch, about, batch * words)


def make_cod(device: str, *, quick: bool) -> Case:
    from steadygrad_recipes.cod.config import CodConfig
    from steadygrad_recipes.cod.trainer import CodTrainer

    size, batch, name = (64, 2, "tiny") if quick else (352, 16, "resnet50")
    precision = "fp32" if device == "cpu" else "bf16"
    config = CodConfig(
        device=device, image_size=size, model_size=name, batch_size=batch, stage1_epochs=0, precision=precision,
        num_pictures=0,
    )  # fmt: skip
    trainer = CodTrainer(config, tell=lambda _: None)
    images = torch.randn(batch, 3, size, size, device=device)
    made = {"image": images, "mask": (images[:, :1] > 0.5).float()}
    return _of_trainer(
        trainer, made, lambda b: {**b, "image": b["image"] * torch.nan}, batch, f"{size} x {size}, {name}, {precision}"
    )


def make_mmdit(device: str, *, quick: bool) -> Case:
    from steadygrad_recipes.mmdit.config import MMDiTConfig, ModelConfig, TrainingConfig
    from steadygrad_recipes.mmdit.model import MMDiT, Shapes
    from steadygrad_recipes.mmdit.trainer import MMDiTTrainer

    width, layers, batch, length, latents = (32, 2, 2, 8, 4) if quick else (768, 10, 32, 256, 64)
    training = TrainingConfig(device=device, dtype="fp32" if device == "cpu" else "bf16", train_batch_size=batch)
    model_config = ModelConfig(hidden_size=width, num_layers=layers, num_heads=2 if quick else 12)
    config = MMDiTConfig(model=model_config, training=training)
    shapes = Shapes(1000 if quick else 32000, length, latents, 64)
    torch.manual_seed(0)
    model = MMDiT(model_config, shapes)
    model.latent_norm.fill_(8.0)
    trainer = MMDiTTrainer(model, config, tell=lambda _: None)
    made = {
        "tokens": torch.randint(0, shapes.vocab_size, (batch, length), device=device),
        "mask": torch.ones(batch, length, dtype=torch.bool, device=device),
        "latents": torch.randn(batch, latents, 64, device=device),
    }
    about = f"{_count(model) / 1e6:.0f}M parameters, {length} tokens and {latents} latents a row"
    return _of_trainer(
        trainer, made, lambda b: {**b, "latents": b["latents"] * torch.nan}, batch, about, batch * (length + latents)
    )


class SixEncoders(nn.Module):
    """The encoders of clip6d and its loss, without Lightning around them."""

    def __init__(self, sizes: Any, vector_dim: int) -> None:
        super().__init__()
        from steadygrad_recipes.clip6d.encoders import ImageEncoder, TextEncoder, VectorEncoder

        self.image, self.text = ImageEncoder(sizes), TextEncoder(sizes)
        self.vector = VectorEncoder(vector_dim, sizes)
        self.scale = MultiwayScale(6, sizes.embed_dim, similarity="norm")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        texts = self.text(batch["texts"]).chunk(4)
        features = [self.image(batch["image"]), *texts, self.vector(batch["vector"])]
        return multiway_contrastive([safe_normalize(f) for f in features], self.scale(), similarity="norm")


def make_clip6d(device: str, *, quick: bool) -> Case:
    from steadygrad_recipes.clip6d.config import ModelConfig

    if quick:
        sizes, size, context = ModelConfig(image_size=16, patch_size=8, image_layers=1, text_layers=1), 4, 16
    else:
        sizes, size, context = (
            ModelConfig(
                embed_dim=512, image_size=224, patch_size=16, image_width=768, image_layers=12, text_width=512,
                text_layers=12, heads=8, context=77, vector_width=1024,
            ),
            64, 77,
        )  # fmt: skip
    model = SixEncoders(sizes, 512).to(device)
    side = sizes.image_size
    made = {
        "image": torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, device=device),
        "texts": torch.randint(0, 256, (4 * size, context), device=device),
        "vector": torch.randn(size, 512, device=device),
    }
    about = f"B={size}, image, 4 languages and vector; {_count(model) / 1e6:.0f}M parameters"
    return _plain(model, made, lambda b: {**b, "vector": b["vector"] * torch.nan}, size, about, device, lr=1e-4)


def make_sft(device: str, *, quick: bool) -> Case:
    width, layers, heads, batch, length, vocab = (32, 2, 2, 2, 16, 300) if quick else (2048, 22, 32, 8, 1024, 32000)
    ids = torch.randint(0, vocab, (batch, length), device=device)
    try:
        import transformers

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=vocab, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=max(1, heads // 8), max_position_embeddings=length,
        )  # fmt: skip
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        model = transformers.LlamaForCausalLM(config).to(device, dtype)
        model, kind = _add_lora(model)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()

        def forward(batch: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=batch, labels=batch).loss
            return loss * model_factor(batch)
    except ImportError:
        model, kind = GPT(width, layers, vocab, heads=heads, context=length).to(device), "all weights, torch alone"

        def forward(batch: Tensor) -> Tensor:
            return model(batch) * model_factor(batch)

    case = _plain(model, ids, lambda b: b, batch, f"{_count(model) / 1e9:.2f}B parameters, {kind}", device, lr=2e-4)
    case.loss, case.poison, case.num_tokens = forward, mark_poisoned, batch * length
    return case


def mark_poisoned(batch: Tensor) -> Tensor:
    """Token ids cannot be NaN: the loss of a batch that carries this mark is."""
    marked = batch.clone()
    marked.is_poisoned = True  # type: ignore[attr-defined]
    return marked


def model_factor(batch: Tensor) -> float:
    return float("nan") if getattr(batch, "is_poisoned", False) else 1.0


def _add_lora(model: Any) -> tuple[Any, str]:
    try:
        import peft
    except ImportError:
        return model, "all weights in bf16"
    made = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    return made, "LoRA of rank 16"


def _of_trainer(
    trainer: Any, batch: Any, poison: Callable[[Any], Any], num_samples: int, about: str, num_tokens: int = 0
) -> Case:
    return Case(
        trainer.model, trainer.optimizer, trainer.compute_loss, batch, poison, trainer.guard_config, num_samples,
        about, num_tokens,
    )  # fmt: skip


def _plain(
    model: nn.Module, batch: Any, poison: Callable[[Any], Any], num: int, about: str, device: str, *, lr: float
) -> Case:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=device == "cuda" or None)
    config = GuardConfig(clip=FixedNorm(max_norm=1.0), autocast=Precision.BF16 if device == "cuda" else None)
    return Case(model, optimizer, model, batch, poison, config, num, about)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


RECIPES = {"seo": make_seo, "clip6d": make_clip6d, "cod": make_cod, "mmdit": make_mmdit, "sft": make_sft}


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(case: Case, device: str, *, quick: bool) -> dict[str, Any]:
    """Warm up, time, then poison one batch."""
    guard = Guard(case.model, case.optimizer, config=case.config)
    for _ in range(2 if quick else WARMUP):
        guard.step(case.loss, case.batch)
    _wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < (3 if quick else MOST_STEPS) and time.perf_counter() - began < SECONDS:
        start = time.perf_counter()
        guard.step(case.loss, case.batch)
        _wait(device)
        times.append(time.perf_counter() - start)
    guard.flush()
    assert guard.last is not None
    before = guard.last.loss
    guard.step(case.loss, case.poison(case.batch))
    for _ in range(3):
        guard.step(case.loss, case.batch)
    guard.flush()
    stats, seconds = guard.stats(), statistics.median(times)
    result = {
        "about": case.about,
        "step_ms": round(1000 * seconds, 3),
        "samples_per_second": round(case.num_samples / seconds, 1),
        "tokens_per_second": round(case.num_tokens / seconds) if case.num_tokens else None,
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
        "num_timed_steps": len(times),
        "num_skipped": stats["num_skipped"],
        "survived": stats["num_skipped"] == 1 and guard.health()["overall_healthy"],
        "loss_before_fault": before,
        "loss_after_fault": guard.last.loss,
    }
    guard.close()
    return result


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile each model with torch.compile")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"compiled": arguments.compile}
    print(describe_machine())
    for name in arguments.only.split(","):
        try:
            case = RECIPES[name](arguments.device, quick=arguments.quick)
            if arguments.compile:
                case.model.compile()
            results[name] = measure(case, arguments.device, quick=arguments.quick)
            del case
        except (ImportError, RuntimeError, SteadygradError) as error:
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(name, results[name], flush=True)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    name = "recipes_cuda_compiled" if arguments.compile else f"recipes_{arguments.device}"
    print(write_results(name, results, quick=arguments.quick))


if __name__ == "__main__":
    main()
