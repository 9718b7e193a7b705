"""Texts beside latents: JSON lines with a tokenizer, and .npy arrays -> the tensors that a shard holds.

`NAME.jsonl` has a row {"text": ...} for each latent of `NAME.npy` [N, D] or [N, T, D]; a tokenizer turns texts into
ids. `NAME_tokens.npy` and `NAME_latents.npy` hold both. Arrays are memory-mapped: only the rows of a batch are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad_recipes.tables import read_jsonl, require_text
from steadygrad_recipes.tokenizing import show_tokenizing

LATENTS, TOKENS = "_latents.npy", "_tokens.npy"
MAX_SHOWN = 5
"""Number of bad rows that are named; the others are counted."""


def map_array(path: Path) -> Tensor:
    """Return a .npy file as a tensor that is read from the disk when it is used; pickled objects are refused."""
    numpy = import_extra("recipes", "numpy", what=f"reading {path.name}", error=UsageError)
    if not path.is_file():
        raise UsageError(f"there is no file {path}. Give an .npy file of numbers.")
    try:
        # "c", copy on write: torch wants a writable array, and no write may reach the user's file
        return torch.from_numpy(numpy.load(path, mmap_mode="c", allow_pickle=False))
    except (ValueError, OSError, TypeError, EOFError) as error:
        reason = str(error).partition(". ")[0]  # after that numpy advises to run the file's code
        raise UsageError(f"{path} is not an .npy file of plain numbers: {reason}. Write it with numpy.save.") from None


class MappedRows:
    """Rows of several arrays [N, T, D], seen as one; each is read from its file when it is asked for."""

    def __init__(self, parts: Sequence[Tensor], index: Tensor | None = None) -> None:
        """`index`: which rows, counted through all parts; None: all."""
        self._parts = tuple(parts)
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        self._index = torch.arange(int(self._ends[-1])) if index is None else index

    @property
    def shape(self) -> torch.Size:
        """[N, T, D]."""
        return torch.Size([len(self), *self._parts[0].shape[1:]])

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, row: int) -> Tensor:
        where = int(self._index[row])
        part = int(torch.searchsorted(self._ends, where, right=True))
        return self._parts[part][where - int(self._ends[part])]  # from the part's end, so negative

    def take(self, index: Tensor | slice) -> MappedRows:
        """Return some of the rows; none is read."""
        return MappedRows(self._parts, self._index[index])


def read_pair(latents: Path) -> dict[str, Tensor]:
    """Return `tokens` and `latents` of a pair of .npy files."""
    tokens = latents.with_name(latents.name.removesuffix(LATENTS) + TOKENS)
    if not tokens.is_file():
        raise UsageError(f"{latents} has no {tokens.name} beside it. Write the token ids [N, L] there.")
    return {"tokens": map_array(tokens), "latents": map_array(latents)}


@dataclass(frozen=True)
class Texts:
    """The rows of a .jsonl file, with those of the .npy file beside it."""

    arrays: dict[str, Tensor]
    """`tokens`, `mask` and `latents`."""
    lines: list[int]
    """The line of each row."""
    faults: dict[int, str]
    """Row, from 0 -> why its line has no text."""
    num_cut: int
    """Number of texts that were cut."""


def read_texts(path: Path, tokenizer: Any, length: int) -> Texts:
    """Read a .jsonl file and the .npy file beside it; texts are cut at `length`, and empty where a line has none."""
    beside = path.with_suffix(".npy")
    if not beside.is_file():
        raise UsageError(f"{path} has no {beside.name} beside it. Write the latents [N, T, D] of its rows there.")
    require_text(path)
    read = [(line, *_find_text(row)) for line, row in read_jsonl(path)]
    latents = map_array(beside)
    if latents.dim() not in (2, 3):
        raise UsageError(f"{beside} has the shape {list(latents.shape)}. Write latents [N, D] or [N, T, D].")
    if len(read) != len(latents):
        raise UsageError(f"{path} has {len(read)} texts, and {beside.name} {len(latents)} latents. Write one for each.")
    faults = {row: fault for row, (_, _, fault) in enumerate(read) if fault}
    tokens, mask, num_cut = encode_texts([text for _, text, _ in read], tokenizer, length)
    # Not left to the tokenizer, which may put marks of beginning and end around no text
    mask[list(faults)] = False
    arrays = {"tokens": tokens, "mask": mask, "latents": latents}
    return Texts(arrays, [line for line, _, _ in read], faults, num_cut)


def encode_texts(texts: Sequence[str], tokenizer: Any, length: int) -> tuple[Tensor, Tensor, int]:
    """Return ids [N, L] padded with 0, the mask of what is not padding, and how many texts were cut at `length`."""
    whole = [list(tokenizer(text)["input_ids"]) for text in show_tokenizing(texts)]
    rows = [row[:length] for row in whole]
    longest = max(map(len, rows), default=1) or 1
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32).view(-1, longest)
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows], dtype=torch.bool)
    return tokens, mask.view(-1, longest), sum(len(row) > length for row in whole)


def open_tokenizer(folder: str) -> Any:
    """Return the tokenizer in a folder, as transformers saves it. Nothing is downloaded, no code of it runs."""
    transformers = import_extra("transformers", "transformers", what="data.tokenizer", error=UsageError)
    if not Path(folder).exists():
        raise UsageError(f"data.tokenizer: there is no folder {folder}. Save one with tokenizer.save_pretrained.")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"data.tokenizer: {folder} holds no tokenizer ({reason}). Save one with save_pretrained."
        ) from None


def list_words(tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens by id."""
    return tuple(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))


def _find_text(row: Any) -> tuple[str, str]:
    """Return the text of a row, and "", or no text and what is wrong."""
    if isinstance(row, ValueError):
        return "", str(row)
    text = row.get("text", row.get("caption")) if isinstance(row, Mapping) else row
    return (text, "") if isinstance(text, str) and text.strip() else ("", "no text")
