"""An image -> logits of its camouflaged object: a residual backbone, and a decoder that goes down its pyramid.

The backbone's parameters have the names of the usual ResNet files, so that trained weights can be loaded. The decoder
uses group norm: memory limits batches to two here, and statistics over two images are noise. For the same reason a
backbone loaded with weights keeps its statistics (`keep_statistics`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad.errors import ConfigError
from steadygrad.extras import import_extra
from steadygrad.scan.foreign import load_checkpoint
from steadygrad_recipes.cod.config import SIZES, CodConfig
from steadygrad_recipes.loading import call_function

TIMM = "timm:"
"""Begins the name of a backbone of timm."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a network."""

    blocks: tuple[int, int, int, int]
    widths: tuple[int, int, int, int]
    """Channels inside the blocks of each of the four levels."""
    is_bottleneck: bool
    decoder: int
    """Channels of the decoder."""


_SIZES = {
    "tiny": Size(blocks=(1, 1, 1, 1), widths=(8, 16, 24, 32), is_bottleneck=False, decoder=16),
    "resnet18": Size(blocks=(2, 2, 2, 2), widths=(64, 128, 256, 512), is_bottleneck=False, decoder=64),
    "resnet34": Size(blocks=(3, 4, 6, 3), widths=(64, 128, 256, 512), is_bottleneck=False, decoder=64),
    "resnet50": Size(blocks=(3, 4, 6, 3), widths=(64, 128, 256, 512), is_bottleneck=True, decoder=128),
}
assert tuple(_SIZES) == SIZES


class Residual(nn.Module):
    """Two 3 x 3 convolutions, or a 3 x 3 one between two 1 x 1, with a shortcut around them."""

    def __init__(self, channels: int, width: int, *, stride: int, is_bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if is_bottleneck else width
        self.is_bottleneck = is_bottleneck
        if is_bottleneck:
            self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
            self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
            self.conv3 = nn.Conv2d(width, out, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(out)
        else:
            self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
            self.conv2 = nn.Conv2d(width, out, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(self.conv2.out_channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.is_bottleneck:
            y = self.bn3(self.conv3(F.relu(y)))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Backbone(nn.Module):
    """An image -> features at a quarter, an eighth, a sixteenth and a 32nd of its size."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        channels = size.widths[0]
        self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.channels: list[int] = []
        for level, (num, width) in enumerate(zip(size.blocks, size.widths)):
            blocks = []
            for index in range(num):
                stride = 2 if level > 0 and index == 0 else 1
                blocks.append(Residual(channels, width, stride=stride, is_bottleneck=size.is_bottleneck))
                channels = blocks[-1].conv3.out_channels if size.is_bottleneck else width
            self.channels.append(channels)
            self.add_module(f"layer{level + 1}", nn.Sequential(*blocks))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        features = []
        for level in range(4):
            x = self.get_submodule(f"layer{level + 1}")(x)
            features.append(x)
        return features


class Decoder(nn.Module):
    """Features, fine to coarse -> logits at each level, fine to coarse: each refines the sum from below."""

    def __init__(self, channels: Sequence[int], width: int) -> None:
        super().__init__()
        self.laterals = nn.ModuleList([nn.Conv2d(one, width, 1) for one in channels])
        self.context = nn.ModuleList([_make_block(width, dilation=dilation) for dilation in (1, 2, 4)])
        self.refine = nn.ModuleList([_make_block(width) for _ in channels])

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        laterals = [lateral(feature) for lateral, feature in zip(self.laterals, features)]
        x = torch.stack([block(laterals[-1]) for block in self.context]).sum(0)  # a wide view of the coarsest level
        found = [self.refine[-1](x)]
        for lateral, refine in zip(laterals[-2::-1], list(self.refine)[-2::-1]):
            up = F.interpolate(found[0], size=lateral.shape[-2:], mode="bilinear", align_corners=False)
            found.insert(0, refine(lateral + up))
        return found


class CamouflageNet(nn.Module):
    """[N, 3, H, W] -> logits [N, 1, H, W]; while training, those of every level, the finest first."""

    backbone: nn.Module

    def __init__(self, size: str, *, weights: str | Path | None = None) -> None:
        super().__init__()
        if size.startswith(TIMM):
            self.backbone, channels, width = open_timm(size.removeprefix(TIMM))
        elif size in _SIZES:
            chosen = _SIZES[size]
            self.backbone = own = Backbone(chosen)
            channels, width = own.channels, chosen.decoder
        else:
            raise ConfigError(
                f"CamouflageNet.size must be one of {', '.join(_SIZES)} or timm:NAME, got {size!r}. Use 'resnet50'."
            )
        self.decoder = Decoder(channels, width)
        self.head = nn.ModuleList([nn.Conv2d(width, 1, 1) for _ in channels])
        # Set before the first train(): that decides by it whether batch norms may update
        self.keep_statistics = weights is not None
        if weights is not None:
            load_backbone(self.backbone, weights)

    def forward(self, images: Tensor) -> Tensor | list[Tensor]:
        levels = self.decoder(self.backbone(images))
        heads = zip(self.head, levels) if self.training else [(self.head[0], levels[0])]
        logits = [
            F.interpolate(head(level), size=images.shape[-2:], mode="bilinear", align_corners=False)
            for head, level in heads
        ]
        return logits if self.training else logits[0]

    def train(self, mode: bool = True) -> Self:
        """Switch modes as usual, except that statistics loaded with the weights stay fixed."""
        super().train(mode)
        if self.keep_statistics:
            for module in self.backbone.modules():
                if isinstance(module, nn.BatchNorm2d):
                    # After super().train(), which has set it to training
                    module.eval()
        return self


def open_timm(name: str) -> tuple[nn.Module, list[int], int]:
    """Return a backbone of timm with random weights, the channels of its last four levels, and the decoder's width."""
    timm = import_extra("timm", "timm", what=f"--model-size timm:{name}", error=ConfigError)
    try:
        found = timm.create_model(name, features_only=True, pretrained=False)
        num = len(found.feature_info.channels())
        levels = tuple(range(max(0, num - 4), num))
        found = timm.create_model(name, features_only=True, pretrained=False, out_indices=levels)
    except Exception as error:  # timm's own, and whatever a model's constructor raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model_size timm:{name} cannot be built: {reason}. timm.list_models() names those that it has."
        ) from None
    return found, list(found.feature_info.channels()), 128


def load_network(name: str) -> nn.Module:
    """Return what the user's function `module:function` or `file.py:function` returns."""
    made = call_function(name, "CodConfig.model")
    if not isinstance(made, nn.Module):
        raise ConfigError(f"CodConfig.model: {name} returned {type(made).__name__}, not a torch.nn.Module.")
    return made


def build_network(config: CodConfig) -> nn.Module:
    """Return the network that the config names."""
    if config.model is not None:
        return load_network(config.model)
    return CamouflageNet(config.model_size, weights=config.backbone_weights)


def take_outputs(found: Tensor | Sequence[Tensor], size: Sequence[int]) -> list[Tensor]:
    """Return a network's logits [N, 1, H, W] at the images' size, the finest first, whether it gives one or several."""
    outputs = [found] if isinstance(found, Tensor) else list(found)
    if not outputs:
        raise ConfigError("the network gives nothing, not logits [N, 1, H, W]. Return one channel, before a sigmoid.")
    for one in outputs:
        shape = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
        if not isinstance(one, Tensor) or one.dim() != 4 or one.shape[1] != 1:
            raise ConfigError(
                f"the network gives {shape}, not logits [N, 1, H, W]. Return one channel, before a sigmoid."
            )
    return [
        one
        if list(one.shape[-2:]) == list(size)
        else F.interpolate(one, size=tuple(size), mode="bilinear", align_corners=False)
        for one in outputs
    ]


def load_backbone(backbone: nn.Module, path: str | Path) -> None:
    """Load trained weights into the backbone: a safetensors or .pth file of a ResNet. Code in it is never run.

    The file may contain more, such as a classifier, but must cover the whole backbone.
    """
    report = load_checkpoint(path, backbone, strict=False)  # not strict: the file may hold a classifier
    lacking = [*report.missing, *report.misshaped]
    if lacking:
        shown = ", ".join(lacking[:3])
        raise ConfigError(
            f"backbone_weights: {path} does not fit the backbone, {len(lacking)} of its tensors are missing or of "
            f"another shape there ({shown}). Give a file of the same ResNet, or set model_size to the one it holds."
        )


def _make_block(width: int, *, dilation: int = 1) -> nn.Module:
    conv = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(8, width), nn.ReLU())
