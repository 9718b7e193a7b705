"""The settings of the mmdit recipe: plain frozen values, checked on construction, no torch.

The parts `optimizer`, `training` and `loss` and their fields are those of the document that this training comes from;
its YAML is read as it stands. What it does not cover (data, model, diffusion, sampling) has its own parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steadygrad.config import Precision
from steadygrad.config.checks import as_enum, require, require_whole
from steadygrad_recipes.settings import TrainingSettings, require_choice, require_numbers, require_shared

PREDICTIONS = ("flow", "epsilon")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which texts and latents to learn."""

    path: str | None = None
    """Folder of .safetensors, .npz, .npy or .jsonl files with texts and latents; None: a small synthetic set."""
    tokenizer: str | None = None
    """Folder of a tokenizer, as transformers saves it, for .jsonl files of texts."""
    max_text: int = 256
    """Number of tokens of a text in a .jsonl file that are used."""
    val_fraction: float = 0.1
    """Share of the rows kept for validation when the folder has no `train` and `val` folders inside."""
    vocab_size: int | None = None
    """Number of token ids; None: taken from vocab.json, or the largest id plus one."""
    pad_token_id: int | None = None
    """Positions with this token are padding; None: every position is text, unless the files have a `mask`."""
    skip_bad_rows: bool = False
    """True: leave out rows that cannot be learned from, and report them; False: report them and end the program."""
    num_synthetic: int = 4096
    """Number of rows in the made-up set."""

    def __post_init__(self) -> None:
        require_numbers(self, zero=("pad_token_id",))
        require(self.val_fraction < 1, self, "val_fraction", "be below 1", "Something must be left to train on.")
        if self.vocab_size is not None:
            require_whole(self, "vocab_size", least=2, hint="Leave it out if the files say it.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Size of the transformer. hidden_size 1024 with num_layers 23 and num_heads 16 has about 892M parameters."""

    hidden_size: int = 256
    """Width of both streams."""
    num_layers: int = 6
    """Number of blocks; each has separate weights for text and for latents, and one attention over both."""
    num_heads: int = 4
    """Number of attention heads; must divide the width."""
    mlp_ratio: int = 4
    """Width of the hidden layer in each block's MLP, as a multiple of the width."""
    qk_norm: bool = True
    """Normalise queries and keys to unit size: attention scores that grow without bound are what breaks in bf16."""

    def __post_init__(self) -> None:
        require_numbers(self)
        fits = self.hidden_size % (2 * self.num_heads) == 0
        require(fits, self, "hidden_size", f"be a multiple of twice num_heads ({self.num_heads})", "Use 256 and 4.")


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """What is hidden from the model, and what it predicts."""

    prediction: str = "flow"
    """What is predicted for latents: `flow` (noise minus latent) or `epsilon` (the noise)."""
    independent_times: bool = True
    """True: text and latents are hidden by independent amounts, so that either can be sampled from the other."""

    def __post_init__(self) -> None:
        require_numbers(self)
        require_choice(self, "prediction", PREDICTIONS)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW."""

    lr: float = 5e-5
    """Learning rate after the warm-up."""
    grad_clip_norm: float = 0.5
    """Norm to clip gradients to; 0: 1.0, gradients are never left unclipped."""
    weight_decay: float = 0.01
    """Weight decay of matrices; biases, norms and embeddings have none."""
    beta2: float = 0.95
    """How long Adam remembers squared gradients; below 0.999 it adapts to a change in their size in time."""

    def __post_init__(self) -> None:
        require_numbers(self, zero=("weight_decay", "grad_clip_norm"), infinite=("grad_clip_norm",))
        require(self.beta2 < 1, self, "beta2", "be below 1", "Use 0.95.")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainingSettings):
    """How long to train, and in which steps."""

    warmup_steps: int = 2000
    """Steps over which the learning rate rises; a cosine lowers it afterwards."""
    dtype: Precision = Precision.BF16
    """Number format of the matrix products; losses and norms are computed in fp32."""
    gradient_accumulation_steps: int = 2
    """Batches accumulated into one step."""
    train_batch_size: int = 4
    """Rows per batch."""
    max_steps: int | None = None
    """Steps after which training ends, whatever the epochs say."""
    ema_decay: float | None = None
    """Decay of an average of the weights, which validation and sampling use; None: no average."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: cuda where there is one."""
    max_recoveries: int = 3
    """How often a halted training continues automatically from its last good checkpoint; 0: never."""
    recovery_lr_factor: float = 0.6
    """Factor applied to the learning rate then: 5e-5 becomes 3e-5."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_enum(Precision, self.dtype, "TrainingConfig.dtype"))
        require_numbers(self, zero=("seed", "warmup_steps", "max_recoveries"))
        require_shared(self)
        require(self.recovery_lr_factor <= 1, self, "recovery_lr_factor", "not be above 1", "Use 0.6.")
        fits = self.ema_decay is None or self.ema_decay < 1
        require(fits, self, "ema_decay", "be None or between 0 and 1", "0.999 is usual.")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the two losses."""

    loss_scale: float = 1.0
    """Factor on the whole loss before backward; the record holds the loss with it."""
    text_loss_weight: float = 1.0
    """Factor of the masked text loss."""
    latent_loss_weight: float = 0.1
    """Factor of the latent loss, which is at most 4 / (size of a latent): a larger one makes latents learn sooner."""
    normalize_latents: bool = True
    """Compare directions: predictions and targets at unit length. False: plain squared error, which can overflow."""
    ceiling: float = 100.0
    """Ceiling of each loss; beyond it a batch teaches nothing."""

    def __post_init__(self) -> None:
        require_numbers(self, zero=("text_loss_weight", "latent_loss_weight"), infinite=("ceiling",))


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What `--sample` generates."""

    num_samples: int = 8
    """Number of pairs of text and latents."""
    num_steps: int = 32
    """Number of steps from nothing to a sample."""
    temperature: float = 1.0
    """Below 1: likelier words are preferred."""
    seed: int = 0
    """Seed of the samples."""
    text: str | None = None
    """Sample latents for this text; None: text and latents together."""
    latents: str | None = None
    """Sample texts for the latents in this .npy file, [N, T, D] or [T, D]."""

    def __post_init__(self) -> None:
        require_numbers(self, zero=("seed",), infinite=("temperature",))
        require(self.text is None or self.latents is None, self, "text", "be None if latents are given", "Give one.")


@dataclass(frozen=True, kw_only=True)
class MMDiTConfig:
    """Everything that can be set.

    >>> MMDiTConfig().optimizer.grad_clip_norm
    0.5
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    protect: bool = True
    """False: the loop that broke, for comparison. It checks only the norm for NaN, zeroes the gradients, continues."""

    def __post_init__(self) -> None:
        require_numbers(self)


QUICK = {
    "data.num_synthetic": 2048,
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "loss.latent_loss_weight": 10.0,
    "optimizer.lr": 5e-3,
    "training.warmup_steps": 30,
    "training.train_batch_size": 16,
    "training.gradient_accumulation_steps": 2,
    "training.dtype": "fp32",
    "training.epochs": 10,
    "training.eval_every": 100,
    "training.save_every": 100,
}
"""What `--quick` sets: a minute on two cores. At a weight of 0.1 latents would take hours to follow the text."""
