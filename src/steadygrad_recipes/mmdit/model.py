"""MMDiT: hidden text, noisy latents and how much is hidden of each -> words for the hidden positions, a direction.

Two streams with separate weights and one attention over both, as in arXiv 2403.03206. The model also stores what it
must know about the data (mean and spread of the latents, lengths of the texts), so that a checkpoint alone can sample.
Padding is never attended to; answers at padding positions are meaningless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from steadygrad_recipes.mmdit.config import ModelConfig

GATE_STD = 0.02
"""Gates and scales start near 0, so that each block starts near the identity; not at 0, where half of the parameters
would have no gradient at the first step."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of the data that determine the shape of the model."""

    vocab_size: int
    """The mask token is one more, with this id."""
    text_length: int
    num_latents: int
    latent_dim: int


class MMDiT(nn.Module):
    """A diffusion transformer over text and latents.

    >>> model = MMDiT(ModelConfig(hidden_size=16, num_layers=1, num_heads=2), Shapes(9, 5, 3, 4))
    >>> tokens, latents, time = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 3, 4), torch.ones(2)
    >>> [list(out.shape) for out in model(tokens, tokens == 0, latents, time, time)]
    [[2, 5, 9], [2, 3, 4]]
    """

    latent_mean: Tensor
    latent_std: Tensor
    latent_norm: Tensor
    length_counts: Tensor

    def __init__(self, config: ModelConfig, shapes: Shapes) -> None:
        super().__init__()
        self.config, self.shapes = config, shapes
        width = config.hidden_size
        self.words = nn.Embedding(shapes.vocab_size + 1, width)
        self.word_places = nn.Parameter(torch.randn(shapes.text_length, width) * 0.02)
        self.latent_input = nn.Linear(shapes.latent_dim, width)
        self.latent_places = nn.Parameter(torch.randn(shapes.num_latents, width) * 0.02)
        self.text_time, self.latent_time = TimeEmbedding(width), TimeEmbedding(width)
        self.blocks = nn.ModuleList(JointBlock(config) for _ in range(config.num_layers))
        self.text_output = Output(width, shapes.vocab_size)
        self.latent_output = Output(width, shapes.latent_dim)
        nn.init.normal_(self.words.weight, std=0.02)
        self.register_buffer("latent_mean", torch.zeros(shapes.latent_dim))
        self.register_buffer("latent_std", torch.ones(shapes.latent_dim))
        self.register_buffer("latent_norm", torch.tensor(math.sqrt(shapes.latent_dim)))
        self.register_buffer("length_counts", torch.zeros(shapes.text_length + 1))

    @property
    def mask_token(self) -> int:
        """The token that stands for a hidden word."""
        return self.shapes.vocab_size

    def forward(
        self, tokens: Tensor, real: Tensor, latents: Tensor, text_time: Tensor, latent_time: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, L, V] and latent prediction [B, T, D]; `real` is False on padding, times are in [0, 1]."""
        text = self.words(tokens) + self.word_places[: tokens.shape[1]]  # [B, L, W]
        image = self.latent_input(latents) + self.latent_places  # [B, T, W]
        condition = F.silu(self.text_time(text_time) + self.latent_time(latent_time))  # [B, W]
        # Latents are always seen, so no row of the attention is masked entirely, which would be NaN
        seen = torch.cat([real, real.new_ones(latents.shape[:2])], dim=1)[:, None, None]  # [B, 1, 1, L + T]
        for block in self.blocks:
            text, image = block(text, image, condition, seen)
        return self.text_output(text, condition), self.latent_output(image, condition)


class JointBlock(nn.Module):
    """One attention over both streams, then an MLP for each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.text, self.latents = Stream(config), Stream(config)

    def forward(self, text: Tensor, latents: Tensor, condition: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return both streams, each updated by attention over both."""
        shifts = [stream.modulate(condition) for stream in (self.text, self.latents)]
        parts = [s.project(x, m) for s, x, m in zip((self.text, self.latents), (text, latents), shifts)]
        query, key, value = (torch.cat(pair, dim=2) for pair in zip(*parts))  # [B, H, L + T, head]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        mixed = mixed.transpose(1, 2).flatten(2)  # [B, L + T, W]
        own = mixed.split([text.shape[1], latents.shape[1]], dim=1)
        return self.text.finish(text, own[0], shifts[0]), self.latents.finish(latents, own[1], shifts[1])


class Stream(nn.Module):
    """The weights of one modality in a block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self._num_heads = config.num_heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.mlp_ratio * width), nn.Linear(config.mlp_ratio * width, width)
        head = width // config.num_heads
        self.query_scale = nn.Parameter(torch.ones(head)) if config.qk_norm else None
        self.key_scale = nn.Parameter(torch.ones(head)) if config.qk_norm else None
        nn.init.normal_(self.modulation.weight, std=GATE_STD)
        nn.init.zeros_(self.modulation.bias)

    def modulate(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Return shift, scale and gate of attention, then of the MLP; each [B, 1, W]."""
        return self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)  # type: ignore[no-any-return]

    def project(self, x: Tensor, shifts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value [B, H, N, head]."""
        qkv = self.qkv(normalize_and_shift(x, shifts[0], shifts[1]))
        query, key, value = qkv.unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        return normalize_heads(query, self.query_scale), normalize_heads(key, self.key_scale), value

    def finish(self, x: Tensor, mixed: Tensor, shifts: tuple[Tensor, ...]) -> Tensor:
        """Return the stream after adding the attention output and applying its MLP."""
        x = x + shifts[2] * self.out(mixed)
        hidden = F.gelu(self.up(normalize_and_shift(x, shifts[3], shifts[4])), approximate="tanh")
        return x + shifts[5] * self.down(hidden)  # type: ignore[no-any-return]


class Output(nn.Module):
    """A final norm conditioned on how much was hidden, and a projection.

    It does not start at 0: a prediction of 0 has no direction, so a loss on directions has no gradient there.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.modulation, self.project = nn.Linear(width, 2 * width), nn.Linear(width, size)
        for layer in (self.modulation, self.project):
            nn.init.normal_(layer.weight, std=GATE_STD)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return [B, N, size]."""
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, dim=-1)
        return self.project(normalize_and_shift(x, shift, scale))  # type: ignore[no-any-return]


class TimeEmbedding(nn.Module):
    """A number in [0, 1] -> a vector, by sines of many frequencies."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        half = torch.arange(width // 2) / (width // 2)
        self.register_buffer("frequencies", 1000.0 * torch.exp(-math.log(10000.0) * half), persistent=False)

    def forward(self, time: Tensor) -> Tensor:
        """[B] -> [B, W]."""
        # In fp32: bf16 has 8 bits, too few to tell angles of several hundred apart
        angles = time.float().unsqueeze(-1) * self.frequencies
        return self.layers(torch.cat([angles.cos(), angles.sin()], dim=-1))  # type: ignore[no-any-return]


def normalize_and_shift(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without weights of its own, then shifted and scaled by the condition."""
    return F.layer_norm(x.float(), x.shape[-1:]) * (1 + scale) + shift  # in fp32 also under autocast


def normalize_heads(x: Tensor, scale: Tensor | None) -> Tensor:
    """Scale each head's vector to unit size in fp32, then cast back: attention needs one dtype for all three."""
    return x if scale is None else F.rms_norm(x.float(), x.shape[-1:], scale.float(), 1e-6).to(x.dtype)


def group_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return AdamW's groups: matrices with decay; biases, scales, positions and embeddings without."""
    # Matrices too, which would otherwise get weight decay
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    free = {name for name, _ in model.named_parameters() if name.endswith("_places")}
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        plain = parameter.dim() < 2 or name in free or id(parameter) in embeddings
        (others if plain else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
