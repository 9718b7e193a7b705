"""SftConfig: every setting of the supervised fine-tuning, checked before anything is loaded. Imports no torch.

Settings of the training that this follows keep their names and defaults: `learning_rate`, `max_grad_norm`,
`warmup_steps`, bf16 before fp16. Folders and files are checked by the code that reads them, not here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from steadygrad.config import Precision
from steadygrad.config.checks import as_enum, require, require_whole, set_names
from steadygrad.errors import ConfigError
from steadygrad_recipes.settings import BatchSettings, require_below_1, require_numbers, require_shared

LEARNING_RATE = 2e-4
"""For a model that is already trained."""
TINY_LEARNING_RATE = 5e-3
"""For the model that is built here, which starts from random weights."""


class LongPrompts(enum.StrEnum):
    """What to do with a row that is longer than `max_length`."""

    CUT_START = "cut_start"
    """The prompt loses its start; the completion, which is what is learned, stays."""
    CUT_END = "cut_end"
    """The row loses its end, as tokenizers cut: a long prompt leaves no label at all."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The model that is built when no folder is given: a Llama with random weights."""

    width: int = 64
    """Size of the hidden states; a multiple of `num_heads`."""
    num_layers: int = 2
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads."""
    vocab_size: int = 384
    """Number of tokens its tokenizer may learn; all 256 bytes are included, so that no text is unknown."""

    def __post_init__(self) -> None:
        require_numbers(self)
        require_whole(self, "vocab_size", least=300, hint="256 are the single bytes.")
        fits = self.width % (2 * self.num_heads) == 0
        require(fits, self, "width", "be a multiple of twice num_heads", "Use 64 and 4.")


@dataclass(frozen=True, kw_only=True)
class SftConfig(BatchSettings):
    """Supervised fine-tuning of a causal language model on prompts and completions."""

    data: str | None = None
    """Rows: .jsonl, .json, .csv, .tsv, .txt, .parquet, or a folder of datasets; None: questions are generated."""
    validation: str | None = None
    """The same, for validation; None: a share of `data` is held out."""
    validation_share: float = 0.1
    """Share of the rows to hold out when `validation` is None."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, and report them; False: they are an error."""
    hub: bool = False
    """Whether data and model may be names on the Hugging Face hub, which are then downloaded."""
    num_synthetic: int = 4000
    """Number of questions to generate when `data` is None."""
    largest_amount: int = 999
    """Largest number in them: 99 is learned sooner than 999."""
    model: str | None = None
    """Folder of a causal language model with its tokenizer, as transformers saves it; None: `tiny` is built."""
    tiny: TinyModel = field(default_factory=TinyModel)
    """Sizes of the model that is built when `model` is None."""
    max_length: int = 256
    """Maximum number of tokens in a row."""
    long_prompts: LongPrompts = LongPrompts.CUT_START
    """What to do with a longer row: cut_start, cut_end."""
    group_by_length: bool = True
    """Put rows of about the same length into one batch: less padding."""

    lora_rank: int = 16
    """Rank of the LoRA matrices; 0: no LoRA, every weight is trained."""
    lora_alpha: float = 32.0
    """Their output is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Share of their inputs that is dropped during training."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get LoRA; "all-linear": every linear layer except the head."""

    load_in_4bit: bool = False
    """Store the frozen model in 4 bits (QLoRA); needs bitsandbytes and a GPU."""
    merge: bool = False
    """Also save the model with the LoRA matrices merged into it, in RUN/merged."""

    epochs: int = 3
    """Passes over the rows."""
    max_steps: int = 0
    """Maximum number of optimizer steps; 0: as many as the epochs have."""
    batch_size: int = 16
    """Rows per forward pass, on each device."""
    learning_rate: float | None = None
    """Peak learning rate; None: 2e-4, and 5e-3 for the model that is built here."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises to its peak; after that it falls to 0."""
    schedule: str = "linear"
    """Shape of that fall, by transformers' names: linear, cosine, constant_with_warmup."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    precision: Precision | None = None
    """Number format of the forward pass: bf16, fp16, fp32; None: bf16 if the GPU has it, else fp16; fp32 on a CPU."""
    base_precision: Precision | None = None
    """Number format in which the model's own weights are stored; None: as saved with LoRA, fp32 without."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward instead of keeping them."""
    use_cpu: bool = False
    """Train on the CPU even where there is a GPU."""

    log_every: int = 10
    """Steps between two log lines."""
    keep_last: int = 3
    """Number of checkpoints to keep; at least 2, since a crash may truncate the newest."""
    patience: int = 0
    """Validations without a better loss after which training stops; 0: never."""
    num_answers: int = 200
    """Number of held-out prompts that the trained model answers for accuracy and answer rate."""
    max_new_tokens: int = 64
    """Maximum number of tokens in an answer."""
    tolerance: float = 0.05
    """How far from the right number an answer may be, as a share of it."""
    checker: str | None = None
    """Function of an answer and its completion, whether it is right: module:function or file.py:function."""
    protect: bool = True
    """False: transformers' plain Trainer, without the callback and the safe loss."""
    safe_loss: bool = True
    """Replace an unusable loss by a small one; False: leave it to the guard, which skips the step."""

    def __post_init__(self) -> None:
        zero = "lora_rank", "lora_dropout", "max_steps", "warmup_steps", "weight_decay", "patience", "seed"
        require_numbers(self, zero=zero, infinite=("max_grad_norm",))
        require_below_1(self, "lora_dropout", "weight_decay")
        require_whole(self, "keep_last", least=2, hint="The newest may be truncated by a crash.")
        require_whole(self, "max_length", least=8, hint="Prompt and completion must fit.")
        require_shared(self)
        require(self.validation_share < 1, self, "validation_share", "be below 1", "Use 0.1.")
        self._set_enums()
        fits = not (self.load_in_4bit and self.lora_rank == 0)
        require(fits, self, "load_in_4bit", "be false without LoRA (lora_rank 0)", "Weights in 4 bits stay frozen.")
        fits = not (self.load_in_4bit and self.model is None)
        require(fits, self, "load_in_4bit", "be false without model", "What is built here is small, and all trained.")
        fits = not (self.load_in_4bit and self.merge)
        # Merged into 4 bits, the matrices are rounded away, and the export is not an ordinary model.
        require(fits, self, "merge", "be false with load_in_4bit", "Merge the adapter into the base in 16 bits later.")
        if self.lora_rank == 0 and self.base_precision is Precision.FP16:
            raise ConfigError.about(
                "SftConfig",
                "base_precision",
                " is fp16 while every weight is trained (lora_rank=0): Adam's epsilon of 1e-8 "
                "is 0 in fp16, and the first step divides by it. Use fp32, or LoRA (lora_rank=16).",
            )

    def _set_enums(self) -> None:
        object.__setattr__(self, "long_prompts", as_enum(LongPrompts, self.long_prompts, "SftConfig.long_prompts"))
        for name in ("precision", "base_precision"):
            value = getattr(self, name)
            chosen = None if value is None else as_enum(Precision, value, f"SftConfig.{name}")
            object.__setattr__(self, name, chosen)
        set_names(self, "lora_targets", "q_proj")

    @property
    def rate(self) -> float:
        """Peak learning rate of this training."""
        if self.learning_rate is not None:
            return self.learning_rate
        return TINY_LEARNING_RATE if self.model is None else LEARNING_RATE


QUICK = {
    "num_synthetic": 980,
    "largest_amount": 99,
    "epochs": 4,
    "warmup_steps": 20,
    "max_length": 64,
    "max_new_tokens": 24,
    "num_answers": 98,
}
"""What `--quick` sets: a minute on two cores."""
