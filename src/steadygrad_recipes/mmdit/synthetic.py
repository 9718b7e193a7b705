"""A small made-up corpus: sentences about coloured shapes, and latents that show the same things.

"a small red circle with a large blue square": four latents, two for each thing (its colour and size; its shape), as
sums of fixed codes with a little noise. Each side says much about the other, but not everything: a model that uses both
beats any that counts words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from steadygrad_recipes.mmdit.data import Corpus, Rows

SIZES = ("tiny", "small", "large", "huge")
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "pink", "brown")
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
JOINTS = ("with", "above", "below")
VOCAB = ("<pad>", "a", *JOINTS, *SIZES, *COLOURS, *SHAPES)
LENGTH = 9
NUM_LATENTS, DIM = 4, 16
NOISE = 0.1


def make_corpus(num_rows: int, *, seed: int = 0, val_fraction: float = 0.1) -> Corpus:
    """Generate rows, the same for the same `seed`."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(len(VOCAB) + 1, DIM, generator=generator)  # the last one means: nothing there
    picks = [_pick(group, (num_rows, 2), generator) for group in (SIZES, COLOURS, SHAPES)]  # each [N, 2]
    joint = _pick(JOINTS, (num_rows, 1), generator)
    has_two = torch.rand(num_rows, 1, generator=generator) < 0.7
    article = torch.full((num_rows, 1), VOCAB.index("a"))
    things = [torch.cat([article, *(pick[:, i : i + 1] for pick in picks)], dim=1) for i in (0, 1)]
    tokens = torch.cat([things[0], joint, things[1]], dim=1)  # [N, 9]
    mask = torch.cat([torch.ones(num_rows, 4, dtype=torch.bool), has_two.expand(-1, 5)], dim=1)
    rows = Rows(torch.where(mask, tokens, 0), mask, _show(picks, has_two, codes, generator))
    num_val = max(1, round(num_rows * val_fraction))
    return Corpus(rows.take(slice(num_val, None)), rows.take(slice(0, num_val)), len(VOCAB), VOCAB)


def _pick(group: tuple[str, ...], shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    first = VOCAB.index(group[0])
    return torch.randint(first, first + len(group), shape, generator=generator)


def _show(picks: list[Tensor], has_two: Tensor, codes: Tensor, generator: torch.Generator) -> Tensor:
    """Return the latents [N, 4, D] of what the sentence says."""
    size, colour, shape = picks
    latents = torch.stack([codes[colour] + 0.5 * codes[size], codes[shape]], dim=2)  # [N, 2 things, 2, D]
    latents[:, 1] = torch.where(has_two.unsqueeze(-1), latents[:, 1], codes[-1])
    return latents.flatten(1, 2) + NOISE * torch.randn(len(latents), NUM_LATENTS, DIM, generator=generator)
