"""A small causal transformer over letters, with a bug in it that no test on ordinary text would find.

`QueryKeyNorm` is a norm as people write it. Its epsilon protects the division from 0, but not the derivative of the
square root: where a whole vector is 0 the result is 0, as it should be, but the gradient is NaN. Only an empty text
gets there. The bug is part of the demo: do not fix it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad_recipes.demo.text import LETTERS, PADDING


class QueryKeyNorm(nn.Module):
    """Scales each vector to a root mean square of 1."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        size = x.square().mean(-1, keepdim=True).sqrt()
        return self.gain * x / (size + 1e-6)


class Block(nn.Module):
    """Attention with normed queries and keys, then an MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.norm_q, self.norm_k = QueryKeyNorm(width // num_heads), QueryKeyNorm(width // num_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:  # [B, T, D], [H, T, T]
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v, attn_mask=near)  # [B, H, T, D/H]
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class TextModel(nn.Module):
    """Predicts the next letter from those before; its forward is the loss."""

    near: Tensor

    def __init__(self, *, width: int, num_layers: int, context: int, num_heads: int = 4) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(len(LETTERS), width, padding_idx=PADDING)
        self.blocks = nn.ModuleList([Block(width, num_heads) for _ in range(num_layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, len(LETTERS))
        self.register_buffer("near", _prefer_near(context, num_heads), persistent=False)

    def predict(self, tokens: Tensor) -> Tensor:  # [B, T] -> [B, T, letters]
        """Return scores for the letter that follows each."""
        x = self.embed(tokens)
        near = self.near[:, : tokens.shape[1], : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, near)
        scores: Tensor = self.head(self.norm(x))
        return scores

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:  # [B, T + 1], [B] -> scalar
        scores = self.predict(tokens[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(scores, tokens[:, 1:], ignore_index=PADDING, reduction="none").mean(1)
        return (weights * losses).sum() / weights.sum()

    @torch.no_grad()
    def write_on(self, tokens: Tensor, num_letters: int) -> Tensor:  # [T] -> [T + num_letters]
        """Append the likeliest letter repeatedly; padding when there is none because all are NaN."""
        for _ in range(num_letters):
            scores = self.predict(tokens[None, -self.context :])[0, -1]
            letter = scores.argmax() if bool(scores.isfinite().all()) else torch.zeros_like(tokens[0])
            tokens = torch.cat([tokens, letter[None]])
        return tokens


def _prefer_near(context: int, num_heads: int) -> Tensor:
    """Return what is added to the attention scores: less for letters further back, -inf for those ahead (ALiBi)."""
    place = torch.arange(context)
    back = place[:, None] - place
    slopes = 0.5 ** torch.arange(1, num_heads + 1)[:, None, None]
    return torch.where(back >= 0, -slopes * back, -torch.inf)  # [H, T, T]
