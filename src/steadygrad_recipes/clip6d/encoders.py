"""Images, captions and vectors -> one vector each in a common space.

One text transformer reads every language, byte by byte; images go through a transformer over patches; vectors through
two layers. The outputs are not normalised: the loss does that, safely or not depending on its settings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad.nn import ImprovedActivations
from steadygrad_recipes.clip6d.config import ModelConfig
from steadygrad_recipes.clip6d.tokens import FILL, NUM_TOKENS


def choose_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation with this name in `ImprovedActivations`."""
    chosen: Callable[[Tensor], Tensor] = getattr(ImprovedActivations, name)
    return chosen


class ResidualAttentionBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.activation = choose_activation(config.improved_activation)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # [B, T, W], mask [B, 1, 1, T]
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # [B, H, T, W/H]
        x = x + self._drop(self.out(mixed.transpose(1, 2).reshape(b, t, w)))
        return x + self._drop(self.down(self.activation(self.up(self.norm2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def _stack_blocks(width: int, num: int, config: ModelConfig) -> nn.ModuleList:
    return nn.ModuleList([ResidualAttentionBlock(width, config) for _ in range(num)])


class ImageEncoder(nn.Module):
    """[B, 3, S, S] of bytes -> [B, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, num_patches = config.image_width, (config.image_size // config.patch_size) ** 2
        self.patches = nn.Conv2d(3, width, config.patch_size, config.patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn(num_patches, width))
        self.transformer = _stack_blocks(width, config.image_layers, config)
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, config.embed_dim, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.to(self.positions.dtype) / 127.5 - 1  # bytes until here: a quarter of the copy to the device
        x = self.patches(pixels).flatten(2).mT + self.positions  # [B, P, W]
        for block in self.transformer:
            x = block(x)
        projected: Tensor = self.project(self.norm(x).mean(1))
        return projected


class TextEncoder(nn.Module):
    """[B, T] of byte tokens -> [B, D]; the mean over everything that is not padding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.text_width
        self.embed = nn.Embedding(NUM_TOKENS, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(config.context, width))
        self.transformer = _stack_blocks(width, config.text_layers, config)
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, config.embed_dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        is_token = tokens != FILL
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]  # [B, T, W]
        for block in self.transformer:
            x = block(x, is_token[:, None, None, :])
        weights = is_token.unsqueeze(-1).to(x.dtype)
        projected: Tensor = self.project((self.norm(x) * weights).sum(1) / weights.sum(1))  # each row has two tokens
        return projected


class VectorEncoder(nn.Module):
    """[B, V] -> [B, D]."""

    def __init__(self, vector_dim: int, config: ModelConfig) -> None:
        super().__init__()
        self.activation = choose_activation(config.improved_activation)
        self.up, self.norm = nn.Linear(vector_dim, config.vector_width), nn.LayerNorm(config.vector_width)
        self.project = nn.Linear(config.vector_width, config.embed_dim, bias=False)

    def forward(self, vectors: Tensor) -> Tensor:
        projected: Tensor = self.project(self.norm(self.activation(self.up(vectors))))
        return projected


def pad_tokens(rows: list[Tensor], fill: int = FILL) -> Tensor:
    """Stack several [B, T] with different T on top of each other."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([F.pad(row, (0, longest - row.shape[1]), value=fill) for row in rows])


def count_parameters(module: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
