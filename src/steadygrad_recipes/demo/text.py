"""A seed -> English sentences -> batches of letters as numbers. Readable, and small enough to learn in a minute.

Letter 0 is padding: it stands for nothing, and an empty text is all padding. No text generated here contains any.
"""

from __future__ import annotations

import torch
from torch import Tensor

LETTERS = "\0 .abcdefghijklmnopqrstuvwxyz"
PADDING = 0
ADJECTIVES = ("old", "small", "grey", "quiet", "bright", "slow", "red")
NOUNS = ("sailor", "gull", "lamp", "boat", "child", "storm", "baker", "fox", "tower", "mouse", "garden", "clock")
VERBS = ("sees", "follows", "finds", "paints", "hears", "forgets", "wakes")
PLACES = ("by the sea", "under the moon", "in the rain", "at noon", "behind the hill")


def write_text(num_sentences: int, generator: torch.Generator) -> str:
    """Return sentences of one pattern, with words drawn at random."""

    def pick(words: tuple[str, ...]) -> str:
        return words[int(torch.randint(len(words), (1,), generator=generator))]

    sentences = (
        f"the {pick(ADJECTIVES)} {pick(NOUNS)} {pick(VERBS)} the {pick(NOUNS)} {pick(PLACES)}. "
        for _ in range(num_sentences)
    )
    return "".join(sentences)


def encode(text: str) -> Tensor:
    """Letters -> numbers."""
    return torch.tensor([LETTERS.index(letter) for letter in text])


def decode(numbers: Tensor) -> str:
    """Numbers -> letters; padding becomes nothing."""
    return "".join(LETTERS[number] for number in numbers.tolist() if number != PADDING)


def make_texts(num_batches: int, batch_size: int, length: int, *, seed: int) -> Tensor:
    """Cut pieces from one long text, each at a random place: [num_batches, batch_size, length]."""
    generator = torch.Generator().manual_seed(seed)
    text = encode(write_text(3000, generator))
    starts = torch.randint(len(text) - length, (num_batches, batch_size, 1), generator=generator)
    return text[starts + torch.arange(length)]
