"""The models that the benchmarks train: bare parameter shapes, and a small GPT."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# name: width, layers, vocabulary
SHAPES = {
    "43M, 1154 small tensors": (192, 96, 1000),
    "GPT-2 124M": (768, 12, 50304),
    "GPT-2 774M": (1280, 36, 50304),
    "Llama-like 1.3B": (2048, 24, 32000),
    "10M": (256, 10, 8192),
    "tiny": (64, 3, 512),
}


def parameter_shapes(name: str) -> list[tuple[int, ...]]:
    """Return the parameter shapes of a GPT."""
    d, layers, vocabulary = SHAPES[name]
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(vocabulary, d), (1024, d), *(shape for _ in range(layers) for shape in block)]


class Parameters(nn.Module):
    """Parameters of the given shapes with gradients set and no forward, for timing the step alone."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(s, device=device) * 0.02 for s in shapes])
        for weight in self.weights:
            weight.grad = torch.randn_like(weight) * 1e-3


class Block(nn.Module):
    """Pre-norm attention and MLP; with `qk_norm`, the queries and keys of each head are normalised before attention."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.norm_q, self.norm_k = (nn.LayerNorm(width // heads) if qk_norm else nn.Identity() for _ in range(2))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.norm_q(q), self.norm_k(k), v, is_causal=True)  # [B, H, T, D/H]
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2's architecture, tied embeddings, loss included; the loss has `z_loss` times the squared log-partition."""

    def __init__(
        self,
        width: int,
        layers: int,
        vocabulary: int,
        *,
        heads: int,
        context: int,
        qk_norm: bool = False,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.z_loss = z_loss
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, qk_norm=qk_norm) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T + 1] -> scalar
        x = self.tokens(ids[:, :-1]) + self.positions.weight[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        return loss + self.z_loss * logits.logsumexp(-1).square().mean() if self.z_loss and self.training else loss
