"""Trainings of a small model with a DeepSpeed engine, plain and guarded, on gloo ranks without compiled ops."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranked_trainings import make_batches
from torch import Tensor, nn

from steadygrad import Guard

NUM_STEPS = 6
BAD_STEP = 3
BAD_RANK = 1
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
"""Imports of an engine before it trains; the second one compiles, and imports all of inductor for it."""


def load_deepspeed() -> Any:
    """Import deepspeed for the CPU, without the op that it would compile with a C++ compiler."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # it is slow to import
    return deepspeed


class Roots(nn.Module):
    """Takes the root of |x|: finite at 0, but its derivative is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def make_model(*, half: bool) -> nn.Sequential:
    torch.manual_seed(1)
    norm = nn.LayerNorm(15) if half else nn.BatchNorm1d(15)  # sizes that two ranks cannot divide; buffers
    return nn.Sequential(nn.Linear(6, 15), norm, nn.Tanh(), nn.Linear(15, 7), Roots(), nn.Linear(7, 3))


def make_engine(stage: int, dtype: str = "fp32", *, offload: bool = False, share: int = 1, **config: Any) -> Any:
    """Make an engine with AdamW and a torch scheduler."""
    deepspeed = load_deepspeed()
    model = make_model(half=dtype != "fp32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": share,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    settings |= config
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=settings,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    )
    return engine


Spoil = Callable[[Any, list[tuple[Tensor, Tensor]], int], None]


def poison_input(_engine: Any, batches: list[tuple[Tensor, Tensor]], at: int) -> None:
    """Make loss and gradients of one rank NaN."""
    batches[at][0][0] = torch.nan


def mask_labels(_engine: Any, batches: list[tuple[Tensor, Tensor]], at: int) -> None:
    """Make a NaN loss with zero gradients, invisible to checks of gradients."""
    batches[at] = (batches[at][0], torch.full_like(batches[at][1], -100))


def poison_gradient(_engine: Any, batches: list[tuple[Tensor, Tensor]], at: int) -> None:
    """Make a finite loss with a bad derivative: `run` zeroes the input of the root."""
    batches[at] = (batches[at][0], batches[at][1], 0.0)  # type: ignore[assignment]


def run(
    engine: Any, *, share: int = 1, without: int | None = None, spoil: Spoil | None = None, steps: int = NUM_STEPS
) -> None:
    """Run the loop of a DeepSpeed user: `without` omits a step, `spoil` poisons it on one rank."""
    batches = make_batches(steps * share)
    if spoil is not None and dist.get_rank() == BAD_RANK:
        spoil(engine, batches, BAD_STEP * share + share - 1)
    dtype = next(engine.module.parameters()).dtype
    for number, (x, y, *zeroed) in enumerate(batches):
        if number // share == without:
            continue
        hook = engine.module[3].register_forward_hook(lambda _m, _a, out: out * 0.0) if zeroed else None
        loss = nn.functional.cross_entropy(engine(x.to(dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        if hook is not None:
            hook.remove()


def state_of(engine: Any) -> dict[str, Tensor]:
    """Return weights in float32, moments, buffers and rate: complete at every stage."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state: dict[str, Tensor] = {name: b.detach().clone() for name, b in engine.module.named_buffers()}
    for name, parameter in engine.module.named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        state[name] = (parameter if whole is None else whole).detach().clone()
        if whole is not None:
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    state["rate"] = torch.tensor(engine.get_lr())
    return state


def report(guard: Guard, engine: Any) -> dict[str, Any]:
    """Return what the tests check of a guarded training."""
    answer = {
        "state": state_of(engine),
        "skipped": guard.stats()["num_skipped"],
        "engine_skipped": engine.skipped_steps,
        "norm": guard.stats()["current_gradient_norm"],
        "engine_norm": engine.get_global_grad_norm(),
        "findings": [(f.kind, f.severity.value) for f in guard.findings],
        "incidents": [(i.step, i.finding.kind, i.finding.message) for i in guard.incidents],
    }
    guard.close()
    return answer
