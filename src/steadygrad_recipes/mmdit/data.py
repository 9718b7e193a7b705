"""A folder of tokenised texts with latents -> rows for training and validation.

Every row is checked once, when it is read: ids inside the vocabulary, at least one word, finite latents. A row that
fails is named with its file and number, never lost silently. Files are read as tensors only: nothing in them is run.
Rows are held in memory, in the dtype they were stored in; latents of .npy files stay on the disk, and are checked and
measured block by block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from steadygrad.errors import UsageError
from steadygrad.extras import import_extra
from steadygrad_recipes.mmdit.config import DataConfig
from steadygrad_recipes.mmdit.model import Shapes
from steadygrad_recipes.mmdit.texts import (
    LATENTS,
    MAX_SHOWN,
    MappedRows,
    list_words,
    open_tokenizer,
    read_pair,
    read_texts,
)

MAPPED = (LATENTS, ".jsonl")
"""Endings of files whose latents are memory-mapped."""
ENDINGS = (".safetensors", ".npz", *MAPPED)
FORMAT = "tokens [N, L] of whole numbers, latents [N, D] or [N, T, D], and perhaps mask [N, L]"
BLOCK = 4096
"""Number of rows whose latents are looked at together."""


@dataclass(frozen=True)
class Rows(Dataset[dict[str, Tensor]]):
    """Texts and latents, row by row."""

    tokens: Tensor
    """[N, L]"""
    mask: Tensor
    """[N, L], True where there is text."""
    latents: Tensor | MappedRows
    """[N, T, D]"""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "tokens": self.tokens[index].long(),
            "mask": self.mask[index],
            "latents": self.latents[index].float(),
        }

    def take(self, index: Tensor | slice) -> Rows:
        """Return some of the rows."""
        latents = self.latents
        taken = latents.take(index) if isinstance(latents, MappedRows) else latents[index]
        return Rows(self.tokens[index], self.mask[index], taken)

    def iterate_latents(self) -> Iterator[Tensor]:
        """Yield all latents, a block at a time: those on the disk may be more than the memory holds."""
        for start in range(0, len(self), BLOCK):
            end = min(start + BLOCK, len(self))
            if isinstance(self.latents, MappedRows):
                yield torch.stack([self.latents[row] for row in range(start, end)])  # reads only these rows
            else:
                yield self.latents[start:end]


@dataclass(frozen=True)
class Corpus:
    """The data of a training."""

    train: Rows
    val: Rows
    vocab_size: int
    vocab: tuple[str, ...] | None
    """The words, by id; None: unknown."""
    notes: tuple[str, ...] = ()
    """Lines to report: rows that were left out."""
    left_out: tuple[str, ...] = ()
    """All of those rows, each with its file, its number and its fault."""

    @property
    def shapes(self) -> Shapes:
        """Sizes of the data that determine the shape of the model."""
        _, num_latents, dim = self.train.latents.shape
        return Shapes(self.vocab_size, self.train.tokens.shape[1], num_latents, dim)


def read_corpus(config: DataConfig) -> Corpus:
    """Read the rows of `config.path`: its `train` and `val` folders, or its files with a `val_fraction` split off."""
    folder = Path(config.path or "")
    if not folder.is_dir():
        raise UsageError(
            f"data.path is not a folder: {folder}. Give a folder of .safetensors or .npz files, each with {FORMAT}."
        )
    tokenizer = None if config.tokenizer is None else open_tokenizer(config.tokenizer)
    vocab = _read_vocab(folder / "vocab.json") if tokenizer is None else list_words(tokenizer)
    inner = [folder / name for name in ("train", "val")]
    has_split = all(one.is_dir() for one in inner)
    notes: list[str] = []
    parts = [_read_folder(one, config, tokenizer, notes) for one in (inner if has_split else [folder])]
    size = config.vocab_size or (len(vocab) if vocab else _count_ids(rows for part in parts for _, rows in part))
    left_out: list[str] = []
    checked = [_check_rows(part, size, notes, left_out, skip=config.skip_bad_rows) for part in parts]
    train, val = checked if has_split else _split(checked[0], config.val_fraction, folder)
    if train.tokens.shape[1:] != val.tokens.shape[1:] or train.latents.shape[1:] != val.latents.shape[1:]:
        raise UsageError(
            f"rows of train and val differ: tokens {list(train.tokens.shape[1:])} and {list(val.tokens.shape[1:])}, "
            f"latents {list(train.latents.shape[1:])} and {list(val.latents.shape[1:])}, in {folder}. Make them alike."
        )
    return Corpus(train, val, size, vocab, tuple(notes), tuple(left_out))


def _read_folder(folder: Path, config: DataConfig, tokenizer: Any, notes: list[str]) -> list[tuple[Path, Rows]]:
    files = sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:3]) or "nothing"
        raise UsageError(
            f"there is no .safetensors, .npz, .npy or .jsonl file in {folder}, it holds {found}. "
            f"Put files there, each with {FORMAT}."
        )
    parts = _pad_texts([(path, _read_file(path, config, tokenizer, notes)) for path in files])
    first = parts[0][1]
    for path, rows in parts:
        ours, theirs = ((r.tokens.shape[1], *r.latents.shape[1:]) for r in (rows, first))
        if ours != theirs:
            raise UsageError(
                f"{path} has rows of [L, T, D] = {list(ours)}, {parts[0][0].name} has {list(theirs)}. "
                "Pad the texts to one length, and write latents of one shape."
            )
    return parts


def _pad_texts(parts: list[tuple[Path, Rows]]) -> list[tuple[Path, Rows]]:
    """Give the texts of .jsonl files one length; other files say their own."""
    longest = max(rows.tokens.shape[1] for _, rows in parts)

    def pad(rows: Rows) -> Rows:
        more = (0, longest - rows.tokens.shape[1])
        return Rows(F.pad(rows.tokens, more), F.pad(rows.mask, more), rows.latents)

    return [(path, pad(rows) if path.suffix == ".jsonl" else rows) for path, rows in parts]


def _read_file(path: Path, config: DataConfig, tokenizer: Any, notes: list[str]) -> Rows:
    arrays = _read_arrays(path, config, tokenizer, notes)
    missing = [name for name in ("tokens", "latents") if name not in arrays]
    if missing:
        names = ", ".join(sorted(arrays)) or "nothing"
        raise UsageError(f"{path} has no {' and no '.join(missing)}, it holds {names}. Write {FORMAT}.")
    tokens, latents = arrays["tokens"], arrays["latents"]
    latents = latents.unsqueeze(1) if latents.dim() == 2 else latents
    whole = not tokens.is_floating_point() and tokens.dtype is not torch.bool
    if tokens.dim() != 2 or not whole or latents.dim() != 3 or not latents.is_floating_point():
        raise UsageError(
            f"{path} has tokens {list(tokens.shape)} of {tokens.dtype} and latents {list(latents.shape)} of "
            f"{latents.dtype}. Write {FORMAT}."
        )
    mask = arrays.get("mask")
    if mask is None:
        mask = (
            torch.ones_like(tokens, dtype=torch.bool) if config.pad_token_id is None else tokens != config.pad_token_id
        )
    if len(latents) != len(tokens) or mask.shape != tokens.shape:
        raise UsageError(
            f"{path} has {len(tokens)} texts of {tokens.shape[1]}, {len(latents)} latents and a mask of "
            f"{list(mask.shape)}. Write one row of each for each text."
        )
    return Rows(tokens, mask.bool(), latents)


def _read_arrays(path: Path, config: DataConfig, tokenizer: Any, notes: list[str]) -> dict[str, Tensor]:
    """Return the tensors of one file."""
    if path.name.endswith(LATENTS):
        return read_pair(path)
    if path.suffix == ".jsonl":
        if tokenizer is None:
            raise UsageError(f"{path} holds texts, and there is no tokenizer for them. Give --data.tokenizer FOLDER.")
        return read_texts(path, tokenizer, config.max_text, notes, skip=config.skip_bad_rows)
    try:
        if path.suffix == ".npz":
            numpy = import_extra("recipes", "numpy", what=f"reading {path.name}", error=UsageError)
            with numpy.load(path, allow_pickle=False) as arrays:  # a pickle would run code
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        from safetensors.torch import load_file

        return load_file(path)
    except UsageError:
        raise
    except Exception as error:  # each library has its own exceptions for a file that is cut, pickled or of another type
        raise UsageError(f"{path} cannot be read: {error}. Write it again, as tensors: {FORMAT}.") from None


def _read_vocab(path: Path) -> tuple[str, ...] | None:
    if not path.is_file():
        return None
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f'{path} is not JSON: {error}. Write a list of words by id: ["the", "a"].') from None
    if isinstance(words, dict):  # a tokenizer's vocab.json: word -> id
        words = sorted(words, key=words.__getitem__)  # by id; gaps between ids would shift the words behind them
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UsageError(f'{path} holds no list of words. Write one, by id: ["the", "a"].')
    return tuple(words)


def _count_ids(parts: Iterable[Rows]) -> int:
    return max(int(rows.tokens[rows.mask].max()) if rows.mask.any() else 0 for rows in parts) + 1


FAULTS: tuple[tuple[str, Callable[[Rows, int], Tensor]], ...] = (
    ("no word", lambda rows, _: ~rows.mask.any(1)),
    ("a token outside the vocabulary", lambda rows, size: _is_outside(rows, size).any(1)),
    ("a latent that is NaN or Inf", lambda rows, _: _find_latents(rows, lambda x: ~x.float().isfinite().all(1))),
    ("a latent that is all zero", lambda rows, _: _find_latents(rows, lambda x: (x == 0).all(1))),
)
"""What makes a row unusable: the fault's name, and a function that finds the rows that have it."""


def _is_outside(rows: Rows, vocab_size: int) -> Tensor:
    return ((rows.tokens < 0) | (rows.tokens >= vocab_size)) & rows.mask


def _find_latents(rows: Rows, is_bad: Callable[[Tensor], Tensor]) -> Tensor:
    found = [is_bad(block.flatten(1)) for block in rows.iterate_latents()]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def _check_rows(
    parts: Sequence[tuple[Path, Rows]], vocab_size: int, notes: list[str], left_out: list[str], *, skip: bool
) -> Rows:
    """Return all rows that can be learned from; the others raise an error, or with `skip` are noted and listed."""
    good, refused = [], []
    for path, rows in parts:
        bad = torch.zeros(len(rows), dtype=torch.bool)
        for what, find in FAULTS:
            found = find(rows, vocab_size) & ~bad
            refused += [f"{_name_row(path, int(i))}: {what}" for i in found.nonzero()]
            bad |= found
        good.append(~bad)
    if refused:
        text = "; ".join(refused[:MAX_SHOWN]) + (
            f"; and {len(refused) - MAX_SHOWN} more" if len(refused) > MAX_SHOWN else ""
        )
        count = f"{len(refused)} of {sum(len(rows) for _, rows in parts)} rows in {parts[0][0].parent}"
        if not skip:
            raise UsageError(
                f"{count} cannot be learned from: {text}. Fix them, or leave them out: data.skip_bad_rows."
            )
        notes.append(f"left out {count}: {text}")
        left_out += refused
    rows = _join(parts)
    rows = rows.take(torch.cat(good)) if refused else rows
    tokens = torch.where(rows.mask, rows.tokens, 0)  # padding positions may hold any number, such as -100
    return Rows(tokens, rows.mask, rows.latents)


def _name_row(path: Path, number: int) -> str:
    # Editors count the lines of a text from 1, and arrays their rows from 0
    return f"{path.name} line {number + 1}" if path.suffix == ".jsonl" else f"{path.name} row {number}"


def _join(parts: Sequence[tuple[Path, Rows]]) -> Rows:
    """Return the rows of all files; latents that are memory-mapped in one of them stay where they are."""
    tokens, mask = (torch.cat([getattr(rows, name) for _, rows in parts]) for name in ("tokens", "mask"))
    latents: list[Any] = [rows.latents for _, rows in parts]
    if any(path.name.endswith(MAPPED) for path, _ in parts):
        return Rows(tokens, mask, MappedRows(latents))
    return Rows(tokens, mask, latents[0] if len(latents) == 1 else torch.cat(latents))


def _split(rows: Rows, fraction: float, folder: Path) -> tuple[Rows, Rows]:
    num_val = max(1, round(len(rows) * fraction))
    if len(rows) - num_val < 1:
        raise UsageError(f"{folder} has {len(rows)} good row(s), too few to train and to validate. Give more.")
    return rows.take(slice(0, len(rows) - num_val)), rows.take(slice(len(rows) - num_val, len(rows)))


def measure_rows(rows: Rows) -> dict[str, Tensor]:
    """Measure what the model keeps of the data: mean and spread of each dimension, mean latent length, text lengths.

    A dimension that never changes gets spread 1, so that nothing is divided by 0.
    """
    num = rows.latents.shape[0] * rows.latents.shape[1]

    def average(measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mean of `measure` over all vectors; float64, block by block."""
        blocks = rows.iterate_latents()
        return torch.stack([measure(block.double().flatten(0, 1)).sum(0) for block in blocks]).sum(0) / num

    mean = average(lambda flat: flat)
    # A second pass over the data: the mean of squares less the squared mean cancels where the mean is large
    std = average(lambda flat: (flat - mean).square()).sqrt()
    std = torch.where(std > 1e-6 * mean.abs().clamp(min=1e-30), std, torch.ones_like(std))
    found = {
        "latent_mean": mean,
        "latent_std": std,
        "latent_norm": average(lambda flat: ((flat - mean) / std).norm(dim=-1)),
        "length_counts": torch.bincount(rows.mask.sum(1), minlength=rows.tokens.shape[1] + 1),
    }
    return {name: value.float() for name, value in found.items()}


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows as a .safetensors file that `read_corpus` reads."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"tokens": rows.tokens, "mask": rows.mask, "latents": torch.cat(list(rows.iterate_latents()))}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


# --- generated data -----------------------------------------------------------------------------------------------
# A small made-up corpus: sentences about coloured shapes, and latents that show the same things.
#
# "a small red circle with a large blue square": four latents, two for each thing (its colour and size; its shape), as
# sums of fixed codes with a little noise. Each side says much about the other, but not everything: a model that uses
# both beats any that counts words.


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
