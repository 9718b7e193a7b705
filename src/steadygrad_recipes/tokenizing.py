"""Texts -> the same texts, with a bar while they are tokenized: 100,000 of them take half a minute of silence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from steadygrad.trainer.ranks import is_first
from steadygrad.view.progress import track

T = TypeVar("T")


def show_tokenizing(items: Sequence[T]) -> Iterable[T]:
    """Yield the items, with a bar on the terminal of the first rank."""
    return track(items, describe=lambda: "tokenizing", total=len(items)) if is_first() else items
