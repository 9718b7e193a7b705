"""CodConfig: every setting of the camouflage training, checked before anything is loaded. Imports no torch.

Names and defaults of the flags are those of the training that this follows: `--dataset-path --batch-size
--accumulation-steps --lr --epochs --stage1-epochs --grad-clip`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steadygrad.config.checks import require, require_whole
from steadygrad_recipes.settings import BatchSettings, require_below_1, require_choice, require_numbers, require_shared

SIZES = ("tiny", "resnet18", "resnet34", "resnet50")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class CodConfig(BatchSettings):
    """Two-stage training of camouflaged-object segmentation."""

    dataset_path: str | None = None
    """Folder in the layout of COD10K, CAMO or NC4K, or with images and masks alone. None: pictures are generated."""
    batch_size: int = 2
    """Images per forward pass."""
    accumulation_steps: int = 4
    """Batches whose gradients are accumulated into one optimizer step."""
    lr: float = 0.00025
    """Peak learning rate of stage 1; stage 2 uses `stage2_lr_factor` of it."""
    epochs: int = 140
    """Passes over the training images, both stages together."""
    stage1_epochs: int = 30
    """Number of epochs in stage 1, with the backbone frozen."""
    grad_clip: float = 0.5
    """Maximum gradient norm for clipping (lower = more stable)."""
    stage2_lr_factor: float = 0.5
    """Stage 2: learning rate of decoder and head, as a share of `lr`."""
    backbone_lr_factor: float = 0.1
    """Stage 2: learning rate of the backbone, as a share of that of decoder and head."""
    warmup_share: float = 0.1
    """Share of each stage's steps in which its learning rate rises from 0; after that it falls to 0 along a cosine."""
    weight_decay: float = 0.0001
    """Weight decay of AdamW."""
    ema_decay: float = 0.999
    """Decay of the averaged weights, which are the ones evaluated; 0 switches averaging off."""
    precision: str = "auto"
    """Number format of forward and backward: fp32, bf16, or fp16 with a loss scaler; auto: fp16 on CUDA, else fp32."""
    stage2_init_scale: float = 1024.0
    """Stage 2's loss scaler: initial scale."""
    stage2_growth_factor: float = 1.5
    """Stage 2's loss scaler: growth factor."""
    stage2_backoff_factor: float = 0.5
    """Stage 2's loss scaler: factor applied after an overflow."""
    stage2_growth_interval: int = 1000
    """Stage 2's loss scaler: steps without an overflow before it grows."""
    side_weight: float = 0.5
    """Weight of the losses of the coarser outputs, relative to the finest one."""
    model_size: str = "resnet50"
    """The network: tiny, resnet18, resnet34, resnet50, or timm:NAME with a backbone of timm."""
    model: str | None = None
    """Your own network instead: module:function or file.py:function that returns it; see docs/recipes/cod.md."""
    backbone_weights: str | None = None
    """File of trained ResNet weights for the backbone (.safetensors or .pth); None: random initialisation."""
    image_size: int = 352
    """Side of the square that images are scaled to."""
    mirror: bool = True
    """Whether training images are flipped at random."""
    include_noncam: bool = False
    """Whether to also use images named COD10K-NonCAM-..., which show no hidden object."""
    skip_bad_data: bool = False
    """Whether to leave out and list pairs that cannot be used; otherwise they end the run."""
    num_workers: int = 0
    """Processes that load images."""
    num_made: int = 64
    """Number of training images to generate when no dataset is given; a quarter as many are made for evaluation."""
    num_pictures: int = 6
    """Number of predictions shown as pictures in the report."""
    device: str = "auto"
    """Where to train: cpu, cuda, cuda:1; auto takes cuda where there is one."""
    protect: bool = True
    """False: the same loop without a guard, which ends with an error at the first gradient that is not finite."""

    def __post_init__(self) -> None:
        zero = "stage1_epochs", "num_workers", "num_pictures", "seed", "warmup_share", "ema_decay", "weight_decay"
        require_numbers(self, zero=(*zero, "side_weight"))
        require_below_1(self, "warmup_share", "ema_decay")
        require_whole(self, "num_made", least=8, hint=_hint("num_made"))
        fits = self.stage1_epochs < self.epochs
        require(fits, self, "stage1_epochs", f"be less than epochs, which is {self.epochs}", "Stage 2 has the rest.")
        fits = self.image_size >= 64 and self.image_size % 32 == 0
        require(fits, self, "image_size", "be a multiple of 32, at least 64", "352 is usual in this field.")
        fits = self.model_size in SIZES or self.model_size.startswith("timm:")
        require(fits, self, "model_size", f"be one of {', '.join(SIZES)}, or timm:NAME", _hint("model_size"))
        require_shared(self)
        require_choice(self, "precision", PRECISIONS)
        require(
            self.stage2_growth_factor > 1, self, "stage2_growth_factor", "be above 1", _hint("stage2_growth_factor")
        )
        fits = self.stage2_backoff_factor < 1
        require(fits, self, "stage2_backoff_factor", "be between 0 and 1", _hint("stage2_backoff_factor"))

    @property
    def stage2_lr(self) -> float:
        """Peak learning rate of decoder and head in stage 2: 0.000125 by default."""
        return self.lr * self.stage2_lr_factor

    @property
    def stage2_backbone_lr(self) -> float:
        """Peak learning rate of the backbone in stage 2: 0.0000125 by default."""
        return self.stage2_lr * self.backbone_lr_factor

    @property
    def stage2_scaler(self) -> dict[str, Any]:
        """The arguments of stage 2's loss scaler."""
        return {
            "init_scale": self.stage2_init_scale,
            "growth_factor": self.stage2_growth_factor,
            "backoff_factor": self.stage2_backoff_factor,
            "growth_interval": self.stage2_growth_interval,
        }


QUICK: dict[str, Any] = {
    "model_size": "tiny",
    "image_size": 64,
    "num_made": 96,
    "batch_size": 4,
    "accumulation_steps": 1,
    "epochs": 18,
    "stage1_epochs": 4,
    "lr": 0.02,
    "ema_decay": 0.9,
    "precision": "fp32",
}
"""A minute on two cores: small pictures and a small network, which tolerates a higher learning rate."""


def _hint(name: str) -> str:
    return f"The default is {getattr(CodConfig, name)}."
