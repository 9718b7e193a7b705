"""A folder of tokenised texts with latents -> rows for training and validation.

Every row is checked once, when it is read: ids inside the vocabulary, at least one word, finite latents. A row that
fails is named with its file and number, never lost silently. Files are read as tensors only: nothing in them is run.
Tokens are held in memory. Latents keep the dtype they were stored in; those of .safetensors and .npy files stay on the
disk, and are checked and measured block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    TOKENS,
    MappedRows,
    list_words,
    open_tokenizer,
    read_pair,
    read_texts,
)
from steadygrad_recipes.tables import parse_json

ENDINGS = (".safetensors", ".npz", ".jsonl", LATENTS)
FORMAT = "tokens [N, L] of whole numbers, latents [N, D] or [N, T, D], and perhaps mask [N, L]"
BLOCK = 4096
"""Number of rows whose latents are looked at together."""
MOST_IDS = 10_000_000
"""Largest vocabulary that the ids of files may suggest; above it they are probably not ids."""


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
class Part:
    """One file."""

    path: Path
    rows: Rows
    lines: Sequence[int] = ()
    """The line of each row, where they have one."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Row -> why it could not be read."""

    def name_row(self, number: int) -> str:
        """Return the row's place: editors count the lines of a text from 1, and arrays their rows from 0."""
        return f"{self.path.name} line {self.lines[number]}" if self.lines else f"{self.path.name} row {number}"


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
    notes = _note_unread(folder, inner) if has_split else []
    groups = _pad_texts([_read_folder(one, config, tokenizer, notes) for one in (inner if has_split else [folder])])
    parts = [part for group in groups for part in group]
    _require_alike(parts)
    size = config.vocab_size or (len(vocab) if vocab else _count_ids(parts))
    left_out: list[str] = []
    checked = [_check_rows(group, size, notes, left_out, skip=config.skip_bad_rows) for group in groups]
    train, val = checked if has_split else _split(checked[0], config.val_fraction, folder)
    return Corpus(train, val, size, vocab, tuple(notes), tuple(left_out))


def _read_folder(folder: Path, config: DataConfig, tokenizer: Any, notes: list[str]) -> list[Part]:
    files = sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS))
    if not files:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:3]) or "nothing"
        raise UsageError(
            f"there is no .safetensors, .npz, .npy or .jsonl file in {folder}, it holds {found}. "
            f"Put files there, each with {FORMAT}."
        )
    beside = {path.with_suffix(".npy") for path in files if path.suffix == ".jsonl"}
    beside |= {path.with_name(path.name.replace(LATENTS, TOKENS)) for path in files if path.name.endswith(LATENTS)}
    notes += _note_unread(folder, [*files, *beside])
    return [_read_file(path, config, tokenizer, notes) for path in files]


def _note_unread(folder: Path, read: Iterable[Path]) -> list[str]:
    """Return a line that names what else is in the folder; empty if nothing is."""
    known = {path.name for path in read} | {"vocab.json"}
    names = sorted(path.name for path in folder.iterdir() if path.name not in known and not path.name.startswith("."))
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return [f"not read, in {folder}: {', '.join(names[:MAX_SHOWN])}{more}"] if names else []


def _require_alike(parts: Sequence[Part]) -> None:
    """Raise UsageError if the rows of two files have different shapes."""
    first, *others = parts
    for part in others:
        ours, theirs = ([one.rows.tokens.shape[1], *one.rows.latents.shape[1:]] for one in (part, first))
        if ours != theirs:
            raise UsageError(
                f"{part.path} has rows of [L, T, D] = {ours}, {first.path.name} has {theirs}. "
                "Pad the texts to one length, and write latents of one shape."
            )


def _pad_texts(groups: list[list[Part]]) -> list[list[Part]]:
    """Give the texts of .jsonl files one length; other files say their own."""
    longest = max(part.rows.tokens.shape[1] for group in groups for part in group)

    def pad(part: Part) -> Part:
        rows, more = part.rows, (0, longest - part.rows.tokens.shape[1])
        return replace(part, rows=Rows(F.pad(rows.tokens, more), F.pad(rows.mask, more), rows.latents))

    return [[pad(part) if part.path.suffix == ".jsonl" else part for part in group] for group in groups]


def _read_file(path: Path, config: DataConfig, tokenizer: Any, notes: list[str]) -> Part:
    if path.suffix != ".jsonl":
        return Part(path, _make_rows(path, _read_arrays(path), config))
    if tokenizer is None:
        raise UsageError(f"{path} holds texts, and there is no tokenizer for them. Give --data.tokenizer FOLDER.")
    texts = read_texts(path, tokenizer, config.max_text)
    if texts.num_cut:
        notes.append(
            f"{texts.num_cut} of {len(texts.lines)} texts in {path} are cut at {config.max_text} tokens: data.max_text"
        )
    return Part(path, _make_rows(path, texts.arrays, config), texts.lines, texts.faults)


def _make_rows(path: Path, arrays: dict[str, Tensor], config: DataConfig) -> Rows:
    missing = [name for name in ("tokens", "latents") if name not in arrays]
    if missing:
        names = ", ".join(sorted(arrays)) or "nothing"
        raise UsageError(f"{path} has no {' and no '.join(missing)}, it holds {names}. Write {FORMAT}.")
    tokens, latents = arrays["tokens"], arrays["latents"]
    if tokens.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch can neither compare nor index with them
        tokens = tokens.to(torch.int32 if tokens.dtype is torch.uint16 else torch.int64)
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


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file."""
    if path.name.endswith(LATENTS):
        return read_pair(path)
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
        words = parse_json(path.read_bytes())
    except ValueError as error:
        raise UsageError(f'{path} is {error}. Write a list of words by id: ["the", "a"].') from None
    if isinstance(words, dict) and words and all(isinstance(i, int) and 0 <= i < MOST_IDS for i in words.values()):
        by_id = {number: word for word, number in words.items()}  # a tokenizer's vocab.json: word -> id
        words = [by_id.get(number, f"<{number}>") for number in range(max(by_id) + 1)]
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise UsageError(f'{path} holds no list of words. Write one, by id: ["the", "a"], or an object of word to id.')
    return tuple(words)


def _count_ids(parts: Sequence[Part]) -> int:
    largest = {
        part.path.name: int(part.rows.tokens[part.rows.mask].max()) for part in parts if bool(part.rows.mask.any())
    }
    name = max(largest, key=largest.__getitem__, default="")
    if largest.get(name, 0) >= MOST_IDS:
        raise UsageError(f"{name} has the token {largest[name]}: is that an id? Give data.vocab_size if it is.")
    return largest.get(name, 0) + 1


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


def _check_rows(parts: Sequence[Part], vocab_size: int, notes: list[str], left_out: list[str], *, skip: bool) -> Rows:
    """Return all rows that can be learned from; the others raise an error, or with `skip` are noted and listed."""
    good, refused = [], []
    for part in parts:
        bad = torch.zeros(len(part.rows), dtype=torch.bool)
        bad[list(part.faults)] = True
        refused += [f"{part.name_row(i)}: {fault}" for i, fault in part.faults.items()]
        for what, find in FAULTS:
            found = find(part.rows, vocab_size) & ~bad
            refused += [f"{part.name_row(int(i))}: {what}" for i in found.nonzero()]
            bad |= found
        good.append(~bad)
    if refused:
        text = "; ".join(refused[:MAX_SHOWN]) + (
            f"; and {len(refused) - MAX_SHOWN} more" if len(refused) > MAX_SHOWN else ""
        )
        count = f"{len(refused)} of {sum(len(part.rows) for part in parts)} rows in {parts[0].path.parent}"
        if not skip:
            raise UsageError(
                f"{count} cannot be learned from: {text}. Fix them, or leave them out: data.skip_bad_rows."
            )
        notes.append(f"left out {count}: {text}")
        left_out += refused
    rows = _join(parts, torch.cat(good) if refused else None)
    tokens = torch.where(rows.mask, rows.tokens, 0)  # padding positions may hold any number, such as -100
    return Rows(tokens, rows.mask, rows.latents)


def _join(parts: Sequence[Part], index: Tensor | None) -> Rows:
    """Return these rows of all files; their latents stay where they are."""
    tokens, mask = (torch.cat([getattr(part.rows, name) for part in parts]) for name in ("tokens", "mask"))
    if index is None and len(parts) == 1:
        return Rows(tokens, mask, parts[0].rows.latents)
    latents: list[Any] = [part.rows.latents for part in parts]
    rows = Rows(tokens, mask, MappedRows(latents))
    return rows if index is None else rows.take(index)


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
