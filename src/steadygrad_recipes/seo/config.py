"""UltraOptimizedConfig: the settings of the SEO training."""

from __future__ import annotations

from dataclasses import dataclass

from steadygrad.config.checks import require, require_whole
from steadygrad.config.trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class UltraOptimizedConfig(TrainerConfig):
    """The settings of the SEO training: those of every Trainer, plus its own."""

    max_grad_norm: float | None = 1.0
    """Gradient clipping threshold."""
    use_amp: bool = True
    """Automatic mixed precision: on a GPU bf16, or fp16 with a loss scaler. False: fp32 everywhere."""
    learning_rate: float = 1e-3
    """Initial learning rate."""
    weight_decay: float = 1e-4
    """Initial weight decay; each epoch that overfits multiplies it by 1.5."""
    patience: int | None = 10
    """Early stopping patience, in validations."""
    precision: str = "auto"
    """Format that use_amp selects: auto, bf16 or fp16."""
    epochs: int = 30
    """Passes over the training pages."""
    batch_size: int = 32
    """Pages per batch."""
    data: str | None = None
    """A folder of HTML pages with scores.csv or scores.jsonl, or a CSV or JSONL file; None: a synthetic set is made."""
    num_synthetic: int = 600
    """Number of pages in the synthetic set."""
    val_share: float = 0.2
    """Share of the pages kept for validation."""
    hidden: int = 128
    """Width of the trunk."""
    num_layers: int = 2
    """Number of residual blocks in the trunk."""
    text_dim: int = 64
    """Width of the word vectors."""
    num_buckets: int = 8192
    """Words are hashed into so many rows of the table of word vectors."""
    max_words: int = 256
    """Number of words of a page that are read."""
    dropout: float = 0.1
    """Dropout in the trunk."""

    def __post_init__(self) -> None:
        if not self.use_amp:
            object.__setattr__(self, "precision", "fp32")
        super().__post_init__()
        for name in ("batch_size", "num_synthetic", "hidden", "num_layers", "text_dim", "num_buckets", "max_words"):
            least = 2 if name == "num_buckets" else 1  # the first one is for padding
            require_whole(self, name, least=least, hint=f"The default is {getattr(type(self), name)}.")
        require(0.0 < self.val_share < 1.0, self, "val_share", "be between 0 and 1", "Use 0.2.")
        require(0.0 <= self.dropout < 1.0, self, "dropout", "be at least 0 and below 1", "Use 0.1.")
