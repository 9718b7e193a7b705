"""How each recipe runs at a real size on one GPU: guarded and plain steps, compiled or not, memory, surviving a fault.

Each recipe has its own model, loss, optimizer and clipping, on synthetic batches: seo on pages of 4096 words, clip6d
with six modalities at B=64 and encoders of ViT-B's size, cod at 352 x 352 with a ResNet-50, mmdit with 267M parameters,
sft of a Llama of 1.1B built from a config, with LoRA. A step's time is the mean over four seconds from the fifth step
on: guarded steps include the scans at the start of a run and the first snapshot, and plain steps are clipped in the
same way. After the timed steps one batch is poisoned: its step must be skipped without changing a weight, its cause
named, and the next steps must train.

    python benchmarks/recipes_gpu.py [--only seo,cod] [--device cuda|cpu] [--minutes 7.5] [--quick]

Each recipe runs in its own process, first as is, then compiled if time is left: one that fails, hangs or breaks the
GPU's context is recorded as such, and the others run. The results are written after each. Needs torch and steadygrad's
dependencies; transformers for the Llama if installed, otherwise a GPT of that size.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from machine import describe_machine, write_results
from models import GPT
from steadygrad import Guard, GuardConfig
from steadygrad.config import FixedNorm, Precision
from steadygrad.losses import MultiwayScale, multiway_contrastive, safe_normalize
from steadygrad.trainer.evaluating import make_autocast

WARMUP, SECONDS, FEWEST_STEPS, MOST_STEPS = 3, 4.0, 3, 300
LEAST_SECONDS = 40.0
"""A recipe starts only if this much time is left."""


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
    """Samples in a batch."""
    about: str
    num_tokens: int = 0
    compiled: Sequence[nn.Module] | None = None
    """What `--compiled` compiles; None means the model."""


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
    """The encoders of clip6d and its loss, without Lightning."""

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
    case = _plain(model, made, lambda b: {**b, "vector": b["vector"] * torch.nan}, size, about, device, lr=1e-4)
    case.compiled = [model.image, model.text, model.vector]  # the loss has its own kernels
    return case


def make_sft(device: str, *, quick: bool) -> Case:
    width, layers, heads, size, length, vocab = (32, 2, 2, 2, 16, 300) if quick else (2048, 22, 32, 8, 1024, 32000)
    torch.manual_seed(0)
    with torch.device(device):
        try:
            model, name = make_llama(width, layers, heads, length, vocab), "Llama"
        except Exception as error:  # not installed, or incompatible with this torch: its import may raise anything
            print(f"without transformers ({type(error).__name__}: {error})"[:200], file=sys.stderr)
            model, name = GPT(width, layers, vocab, heads=heads, context=length), "GPT"
        model.to(torch.float32 if device == "cpu" else torch.bfloat16)
        about = f"{name} of {_count(model) / 1e9:.2f}B, LoRA of rank 16, {size} x {length} tokens"
        add_lora(model, rank=16)

    def compute_loss(batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        loss: Tensor = model(ids) if isinstance(model, GPT) else model(input_ids=ids, labels=ids).loss
        return loss * batch["weight"]

    made = {"ids": torch.randint(0, vocab, (size, length), device=device), "weight": torch.ones((), device=device)}
    case = _plain(model, made, lambda b: {**b, "weight": b["weight"] * torch.nan}, size, about, device, lr=2e-4)
    case.loss, case.num_tokens = compute_loss, size * length
    return case


def make_llama(width: int, layers: int, heads: int, length: int, vocab: int) -> nn.Module:
    """Return a Llama with random weights that recomputes its blocks in backward."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=11 * width // 4, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 8), max_position_embeddings=length,
        use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class LowRank(nn.Module):
    """A frozen linear layer plus the product of two thin matrices, in float32 as peft keeps them."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        added = nn.functional.linear(nn.functional.linear(x.to(self.down.dtype), self.down), self.up)
        out: Tensor = self.base(x)
        return out + 2.0 * added.to(out.dtype)  # alpha / rank


def add_lora(model: nn.Module, *, rank: int) -> None:
    """Freeze the model, and add trained matrices to every linear layer but the last."""
    model.requires_grad_(False)
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    for name, layer in layers:
        parent, _, own = name.rpartition(".")
        if own != "lm_head":
            setattr(model.get_submodule(parent), own, LowRank(layer, rank))


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


RECIPES = {"seo": make_seo, "cod": make_cod, "mmdit": make_mmdit, "sft": make_sft, "clip6d": make_clip6d}
"""clip6d runs last: its exact loss takes seconds per step at B=64."""


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(case: Case, device: str, *, quick: bool) -> dict[str, Any]:
    """Time plain and guarded steps, then poison one batch."""
    plain = time_steps(lambda: step_plainly(case, device), device, quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        guard = Guard(case.model, case.optimizer, config=case.config, run_dir=folder)
        guarded = time_steps(lambda: guard.step(case.loss, case.batch), device, quick=quick)
        memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        fault = survive_fault(guard, case, device)
        guard.close()
    return {
        "about": case.about,
        "step_ms": round(1000 * guarded, 3),
        "plain_step_ms": round(1000 * plain, 3),
        "samples_per_second": round(case.num_samples / guarded, 1),
        "tokens_per_second": round(case.num_tokens / guarded) if case.num_tokens else None,
        "memory_gib": None if memory is None else round(memory, 2),
        **fault,
    }


def time_steps(step: Callable[[], Any], device: str, *, quick: bool) -> float:
    """Return the mean seconds of a step after warming up; the host waits for the device only at both ends."""
    for _ in range(2 if quick else WARMUP):
        step()
    _wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    step()
    _wait(device)
    num = 2 if quick else max(FEWEST_STEPS, min(MOST_STEPS, int(SECONDS / (time.perf_counter() - begin))))
    begin = time.perf_counter()
    for _ in range(num):
        step()
    _wait(device)
    return (time.perf_counter() - begin) / num


def step_plainly(case: Case, device: str) -> None:
    """Take an unguarded step: forward, backward, clip, step."""
    with make_autocast(case.config.autocast, torch.device(device)):
        found = case.loss(case.batch)
    loss = found[0] if isinstance(found, tuple) else found
    loss.backward()
    if isinstance(case.config.clip, FixedNorm):
        trained = [p for group in case.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(trained, case.config.clip.max_norm)
    case.optimizer.step()
    case.optimizer.zero_grad()


def survive_fault(guard: Guard, case: Case, device: str) -> dict[str, Any]:
    """Poison one batch, compare every weight before and after, and continue training."""
    guard.flush()
    assert guard.last is not None
    loss = guard.last.loss
    before = [p.detach().clone() for p in case.model.parameters()]
    begin = time.perf_counter()
    guard.step(case.loss, case.poison(case.batch))
    guard.flush()
    _wait(device)
    seconds = time.perf_counter() - begin
    changed = sum(not torch.equal(old, new) for old, new in zip(before, case.model.parameters(), strict=True))
    for _ in range(3):
        guard.step(case.loss, case.batch)
    guard.flush()
    moved = any(not torch.equal(old, new) for old, new in zip(before, case.model.parameters(), strict=True))
    causes = [incident.cause for incident in guard.incidents if incident.cause is not None]
    num_skipped = guard.stats()["num_skipped"]
    return {
        "num_skipped": num_skipped,
        "num_weights_changed_by_fault": changed,
        "fault_seconds": round(seconds, 2),
        "cause": None if not causes else f"{causes[0].kind} in {causes[0].phase}: {causes[0].source}",
        "survived": num_skipped == 1 and changed == 0 and moved and math.isfinite(guard.last.loss or math.nan),
        "loss_before_fault": loss,
        "loss_after_fault": guard.last.loss,
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- one process for each ---------------------------------------------------------------------------------------------


def measure_apart(name: str, arguments: argparse.Namespace, *, compiled: bool, seconds: float) -> dict[str, Any]:
    """Return what a separate process measures within `seconds`, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "result.json")
        command = [sys.executable, __file__, "--measure", name, "--into", str(into), "--device", arguments.device]
        command += ["--quick"] * arguments.quick + ["--compiled"] * compiled
        try:
            ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {seconds:.0f} s"}
        if into.exists():
            result: dict[str, Any] = json.loads(into.read_text())
            return result
        print(ended.stderr[-3000:], file=sys.stderr)
        return {"failed": f"exit code {ended.returncode}: {' '.join(ended.stderr.splitlines()[-1:])[-400:]}"}


def measure_here(arguments: argparse.Namespace) -> None:
    """Measure one recipe and write its result to the given file."""
    case = RECIPES[arguments.measure](arguments.device, quick=arguments.quick)
    if arguments.compiled:
        for module in case.compiled or [case.model]:
            module.compile()
    arguments.into.write_text(json.dumps(measure(case, arguments.device, quick=arguments.quick)))


def format_table(results: dict[str, Any]) -> str:
    """Return the results as a table, one line for each recipe and way."""
    lines = [f"{'recipe':<17}{'step ms':>9}{'plain ms':>10}{'samples/s':>11}{'tokens/s':>11}{'GiB':>8}  fault"]
    for name, ways in results.items():
        for way, found in ways.items():
            label = name if way == "eager" else f"{name}, {way}"
            if "failed" in found:
                lines.append(f"{label:<17}failed: {found['failed']}")
                continue
            fault = "survived" if found["survived"] else "NOT survived"
            lines.append(
                f"{label:<17}{found['step_ms']:>9.2f}{found['plain_step_ms']:>10.2f}{found['samples_per_second']:>11.1f}"
                f"{found['tokens_per_second'] or '':>11}{found['memory_gib'] or '':>8}  {fault} in "
                f"{found['fault_seconds']} s; {found['about']}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, separated by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=7.5, help="time limit for all recipes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--measure", choices=list(RECIPES), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_here(arguments)
        return
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"--only: {', '.join(unknown)} is not a recipe. Recipes: {', '.join(RECIPES)}.")
    end = time.monotonic() + 60 * arguments.minutes
    results: dict[str, Any] = {}
    print(describe_machine(), flush=True)
    for way in ("eager", "compiled"):
        for name in names:
            left = end - time.monotonic()
            if left < LEAST_SECONDS:
                print(f"{name}, {way}: not started, the time is up")
                continue
            found = measure_apart(name, arguments, compiled=way == "compiled", seconds=left)
            results.setdefault(name, {})[way] = found
            print(name, way, found, flush=True)
            write_results(
                "recipes_gpu" if arguments.device == "cuda" else "recipes_cpu", results, quick=arguments.quick
            )
    print(format_table(results))


if __name__ == "__main__":
    main()
