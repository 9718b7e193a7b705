"""Captions in any language -> rows of byte tokens of equal length. No vocabulary to train, and no unknown characters.

Tokens 0..255 are the bytes of UTF-8; three more start, end and pad a row. A caption that is too long is cut between
two characters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BEGIN, END, FILL = 256, 257, 258
NUM_TOKENS = 259


def encode(text: str, context: int) -> list[int]:
    """Return the tokens of one caption, at most `context`.

    >>> encode("né", 8)
    [256, 110, 195, 169, 257]
    >>> encode("né", 4)
    [256, 110, 257]
    """
    cut = text.encode()[: context - 2]
    whole = cut.decode(errors="ignore").encode()  # drops a character that was cut in two
    return [BEGIN, *whole, END]


def encode_batch(texts: Sequence[str], context: int) -> Tensor:
    """Return [B, T] for the longest of them; an empty text still gets its own row."""
    rows = [encode(text, context) for text in texts]
    longest = max(map(len, rows))
    return torch.tensor([row + [FILL] * (longest - len(row)) for row in rows])
