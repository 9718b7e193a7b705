"""TrainerConfig: what a Trainer needs to know besides the model and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steadygrad.config.checks import is_number, is_whole, require, require_booleans, require_whole

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
SCHEDULES = ("constant", "cosine")
STRATEGIES = ("ddp", "fsdp")
CLIPS = ("none", "fixed_norm", "outliers", "zclip", "autoclip", "adagc", "adaptive_unit", "value")
POLICIES = ("default", "observe", "patient", "eager", "strict")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """What a Trainer needs to know besides the model and the data.

    >>> TrainerConfig(epochs=3).max_grad_norm
    1.0
    """

    epochs: int = 10
    """Passes over the training data if no stages are given."""
    max_steps: int | None = None
    """Optimizer steps after which training ends, whatever the epochs; None: the epochs decide."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW."""
    max_grad_norm: float | None = 1.0
    """Global gradient norm to clip at; None: no clipping."""
    clip: str = "fixed_norm"
    """How to clip: none, fixed_norm, outliers, zclip, autoclip, adagc, adaptive_unit or value; see docs/clipping.md."""
    policy: str | None = None
    """What findings lead to: default, observe, patient, eager or strict; None: the training's own choice."""
    accumulation_steps: int = 1
    """Batches whose gradients are averaged for one optimizer step."""
    precision: str = "fp32"
    """fp32, bf16, fp16 (with a loss scaler), or auto: the best format on a GPU, and fp32 on a CPU."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from near 0, in each stage."""
    schedule: str = "constant"
    """What the learning rate does after the warm-up: constant, or cosine, falling to 0 at the stage's end."""
    patience: int | None = None
    """Validations in a row without a better loss that end a stage; None: never."""
    eval_every: int | None = 1000
    """Steps between two evaluations, besides the one at each epoch's end; None: only there."""
    save_every: int | None = 1000
    """Steps between two checkpoints, besides the one at each epoch's end; None: only there."""
    log_every: int | None = 100
    """Steps between two lines with loss, norm, rate and time left, if no bar shows them; None: no lines."""
    tensorboard: bool = False
    """Whether to also log norms, losses, rates and actions to TensorBoard, in the run directory."""
    wandb: bool = False
    """Whether to also log them to Weights & Biases; its own variables (WANDB_PROJECT, WANDB_MODE) are honoured."""
    keep_last: int = 3
    """How many of the newest checkpoints to keep, besides the best one and the last good one."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights, which is then used for evaluation; None: no average."""
    seed: int | None = 0
    """Seed for every random generator at the start of training; None: leave them as they are."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: cuda if available."""
    strategy: str = "ddp"
    """How processes under torchrun share the model: ddp, a copy in each; fsdp, a part of every weight in each."""
    protect: bool = True
    """False: the same loop without a guard's protection: nothing is clipped, skipped, judged or recorded."""

    def __post_init__(self) -> None:
        require_booleans(self)
        for name in ("epochs", "accumulation_steps", "keep_last"):
            require_whole(self, name, least=1, hint=f"The default is {getattr(type(self), name)}.")
        for name in ("max_steps", "patience", "eval_every", "save_every", "log_every"):
            value = getattr(self, name)
            require(value is None or (is_whole(value) and value > 0), self, name, "be None or at least 1", "Use None.")
        require_whole(self, "warmup_steps", least=0, hint="0 switches it off.")
        rate, decay, norm = self.learning_rate, self.weight_decay, self.max_grad_norm
        require(
            is_number(rate) and 0 < rate < math.inf, self, "learning_rate", "be a finite number above 0", "Use 0.001."
        )
        require(is_number(decay) and decay >= 0, self, "weight_decay", "not be negative", "0 switches it off.")
        fits = norm is None or (is_number(norm) and norm > 0)
        require(fits, self, "max_grad_norm", "be a number above 0 or None", "None switches clipping off.")
        fits = self.ema_decay is None or (is_number(self.ema_decay) and 0 < self.ema_decay < 1)
        require(fits, self, "ema_decay", "be between 0 and 1, or None", "Use 0.999.")
        require(self.seed is None or is_whole(self.seed), self, "seed", "be a whole number or None", "Use 0.")
        require(self.precision in PRECISIONS, self, "precision", f"be one of {', '.join(PRECISIONS)}", "Use auto.")
        require(self.schedule in SCHEDULES, self, "schedule", f"be one of {', '.join(SCHEDULES)}", "Use cosine.")
        require(self.strategy in STRATEGIES, self, "strategy", f"be one of {', '.join(STRATEGIES)}", "Use ddp.")
        require(self.clip in CLIPS, self, "clip", f"be one of {', '.join(CLIPS)}", "Use fixed_norm.")
        fits = self.policy is None or self.policy in POLICIES
        require(fits, self, "policy", f"be one of {', '.join(POLICIES)}, or None", "Use default.")
