"""Clip6dConfig: every setting of the six-modality CLIP training. No torch.

A modality is `image`, `vector`, or a language: `en` takes one of an image's captions, a different one each epoch;
`en.2` always takes the second. The training defaults are those of the 6DIMCOCO training that this recipe stabilises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from steadygrad.config.checks import require, require_whole
from steadygrad.errors import ConfigError
from steadygrad_recipes.settings import BatchSettings, require_below_1, require_choice, require_numbers, require_shared

IMAGE, VECTOR = "image", "vector"
NEGATIVES = ("all", "fibre", "sampled", "permuted")
ACTIVATIONS = ("gelu", "swish", "mish", "leaky_relu", "elu")
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Our names -> Lightning's."""
MAX_MODALITIES = 6
MOST_COMBINATIONS = 64**6
"""Combinations of a joined batch that are compared unless `gather` says otherwise: seconds on a large GPU."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the three encoders. The defaults train on a CPU; docs/recipes/clip6d.md has those of CLIP ViT-B/16."""

    pretrained: str | None = None
    """Folder of a CLIP model with its tokenizer, as transformers or OpenCLIP saves it; none: both start at random."""
    embed_dim: int = 128
    """Length of the vectors in the space that all modalities share."""
    image_size: int = 64
    """Side in pixels that images are resized to."""
    patch_size: int = 8
    """Side of an image patch; must divide image_size."""
    image_width: int = 128
    """Width of the image transformer."""
    image_layers: int = 4
    """Number of blocks of the image transformer."""
    text_width: int = 128
    """Width of the text transformer, which all languages share."""
    text_layers: int = 4
    """Number of blocks of the text transformer."""
    context: int = 128
    """Bytes of a caption that are read; the rest is cut off."""
    vector_width: int = 256
    """Width of the hidden layer of the vector encoder."""
    heads: int = 4
    """Attention heads of both transformers; must divide their widths."""
    improved_activation: str = "gelu"
    """Activation of every hidden layer: gelu, swish, mish, leaky_relu or elu."""
    dropout: float = 0.0
    """Dropout in the transformers."""
    gradient_checkpointing: bool = False
    """Recompute the blocks in backward instead of keeping their activations."""

    def __post_init__(self) -> None:
        require_numbers(self, zero=("image_layers", "text_layers", "dropout"))
        require_whole(self, "context", least=4, hint=_hint(self, "context"))
        _require(self, "patch_size", self.image_size % self.patch_size == 0, f"divide image_size ({self.image_size})")
        for name in ("image_width", "text_width"):
            _require(self, "heads", getattr(self, name) % self.heads == 0, f"divide {name} ({getattr(self, name)})")
        require_choice(self, "improved_activation", ACTIVATIONS)
        require_below_1(self, "dropout")


@dataclass(frozen=True, kw_only=True)
class Clip6dConfig(BatchSettings):
    """A complete training. Without `data`, a small set of coloured shapes with captions in five languages is made."""

    data: str | None = None
    """Folder with COCO-style `captions_<language>.json` files, or of .tar or .parquet shards; none: generated."""
    images: str = "images"
    """Folder of the images, inside `data` or anywhere else."""
    modalities: tuple[str, ...] = ("image", "en", "de", "es", "zh", "vector")
    """Two to six modalities to learn together: image, vector, a language (en), one of its captions (en.2)."""
    val_share: float = 0.1
    """Share of the images kept for validation."""
    num_synthetic: int = 432
    """Number of images to make when there is no data; at most 432."""
    workers: int = 0
    """Processes that load images; 0: load in the training process."""

    batch_size: int = 16
    """Samples per batch. The loss compares batch_size^modalities combinations within each batch."""
    max_steps: int | None = None
    """Steps after which training ends in any case; none: only epochs count."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Weight decay of AdamW."""
    warmup_steps: int = 20
    """Steps over which the learning rate rises; a cosine to zero follows."""
    precision: str = "fp32"
    """fp32, bf16 or fp16."""
    device: str = "auto"
    """auto, cpu or cuda."""
    threads: int | None = None
    """Number of CPU threads torch uses; none: torch's default."""

    enable_gradient_monitoring: bool = True
    """Look at every parameter's gradient each step and report what is wrong."""
    enable_activation_monitoring: bool = False
    """Print and record every `log_frequency` steps how activations spread and how many units are dead; costs time."""
    use_stable_loss: bool = True
    """False: the product of all vectors at CLIP's scale, whose gradients vanish; for comparison."""
    stable_loss_version: int = 1
    """0 product (einsum), 1 norm of the sum, 2 mean of the pairwise cosines, 3 distance."""
    gradient_clip_value: float = 1.0
    """Norm at which gradients are clipped."""
    log_frequency: int = 100
    """Steps between two gradient summaries."""
    negatives: str = "all"
    """What an anchor is compared with: all, fibre, sampled or permuted."""
    gather: bool | None = None
    """Whether, under torchrun, samples are compared with those of all ranks; none: if that is at most 64^6 sums."""
    label_smoothing: float = 0.0
    """Share of the label that is spread over all combinations; versions 0 and 2 only."""

    patience: int | None = None
    """Evaluations without a better loss after which training stops; none: never."""
    protect: bool = True
    """False: the same training without a Guard. Nothing is skipped, rolled back or recorded."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Encoders."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "modalities", _read_modalities(self.modalities))
        require_numbers(
            self, zero=("workers", "warmup_steps", "weight_decay", "stable_loss_version", "label_smoothing", "seed")
        )
        require_whole(
            self, "batch_size", least=2, hint=_hint(self, "batch_size"), why=": a sample is compared with others"
        )
        _require(self, "num_synthetic", 8 <= self.num_synthetic <= 432, "lie between 8 and 432")
        _require(self, "val_share", 0 < self.val_share < 1, "lie between 0 and 1")
        _require(self, "stable_loss_version", self.stable_loss_version in range(4), "be 0, 1, 2 or 3")
        require_choice(self, "negatives", NEGATIVES)
        require_shared(self)
        require_below_1(self, "label_smoothing")
        smooth = self.label_smoothing == 0 or self.stable_loss_version in (0, 2)
        _require(self, "label_smoothing", smooth, "be 0 with stable_loss_version 1 and 3")
        require_choice(self, "precision", PRECISIONS)
        require_choice(self, "device", ("auto", "cpu", "cuda"))


def choose_gather(config: Clip6dConfig, num_ranks: int) -> bool:
    """Return whether each sample is compared with those of all ranks: as asked for, else where it stays affordable."""
    if config.gather is not None or config.negatives != "all":
        return config.gather is not False
    num_combinations: int = (config.batch_size * num_ranks) ** len(config.modalities)
    return num_combinations <= MOST_COMBINATIONS


def split_modality(name: str) -> tuple[str, int | None]:
    """Return the language, and which of its captions (from 1) or None: any.

    >>> split_modality("en.2"), split_modality("de")
    (('en', 2), ('de', None))
    """
    language, _, number = name.partition(".")
    return language, int(number) if number else None


def list_languages(modalities: tuple[str, ...]) -> tuple[str, ...]:
    """Return the languages whose captions are read, each once."""
    return tuple(dict.fromkeys(split_modality(name)[0] for name in modalities if name not in (IMAGE, VECTOR)))


def _read_modalities(names: Iterable[str]) -> tuple[str, ...]:
    listed = tuple(part.strip() for part in names.split(",")) if isinstance(names, str) else tuple(names)
    advice = "Write for example image,en,de,vector."
    if not 2 <= len(listed) <= MAX_MODALITIES:
        given = ", ".join(map(str, listed))
        problem = f" must be two to {MAX_MODALITIES}, got {len(listed)}: {given}. {advice}"
        raise ConfigError.about("Clip6dConfig", "modalities", problem)
    pattern = r"image|vector|[A-Za-z][\w-]*(\.[1-9]\d*)?"
    bad = [name for name in listed if not (isinstance(name, str) and re.fullmatch(pattern, name))]
    twice = sorted({name for name in listed if listed.count(name) > 1})
    if bad or twice:
        what = f"{', '.join(map(repr, bad))} is not a modality" if bad else f"{', '.join(twice)} is there twice"
        problem = f": {what}. {advice} A second caption of a language is en.2."
        raise ConfigError.about("Clip6dConfig", "modalities", problem)
    return listed


def _require(owner: object, name: str, fits: bool, rule: str) -> None:
    require(fits, owner, name, rule, _hint(owner, name))


def _hint(owner: object, name: str) -> str:
    return f"The default is {getattr(type(owner), name)}."
