"""Examples -> model inputs: token ids, and labels in which every token of the prompt is masked.

Prompt and completion are tokenized separately, so that the mask ends exactly where the completion begins, and so that
the model sees the same prompt when it answers. `EpochSampler` gives the order of the rows: the same for the same seed
and epoch, whatever happened before, which an exact resume requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from steadygrad.adapters.safe_loss import IGNORE_INDEX
from steadygrad.errors import ConfigError
from steadygrad_recipes.sft.config import LongPrompts
from steadygrad_recipes.sft.data import Example
from steadygrad_recipes.tokenizing import show_tokenizing

Row = dict[str, list[int]]
MEGABATCH = 50
"""Number of groups whose rows are sorted together when rows of similar length share a batch."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The rows of one set; how many were too long, and how many have no label left."""

    rows: list[Row]
    num_cut: int
    num_unlabelled: int
    examples: list[Example] = field(default_factory=list)
    """What the rows come from."""
    refused: list[str] = field(default_factory=list)
    """Where each prompt is that the chat template refuses, and why."""

    def drop_unlabelled(self) -> list[Row]:
        """Return the rows with labels, for validation: a batch without labels has no loss."""
        return [row for row in self.rows if has_labels(row)]


class RefusedPrompt(ConfigError):
    """The model's chat template does not take this prompt."""


def encode_prompt(tokenizer: Any, example: Example) -> list[int]:
    """Return the tokens of the prompt, the same in training and when answering."""
    if isinstance(example.prompt, str):
        return list(tokenizer(example.prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "a prompt is a list of messages, and the tokenizer of the model has no chat template. Give prompts as "
            "text, or the folder of a chat model."
        )
    try:
        text = tokenizer.apply_chat_template(list(example.prompt), tokenize=False, add_generation_prompt=True)
    # The model's publisher wrote the template: many refuse a system message, or two messages in a row with one role
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        place = example.place or f"the prompt {example.question[:60]}"
        raise RefusedPrompt(f"{place}: the model's chat template refuses it ({reason})") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written them


def encode(tokenizer: Any, example: Example, max_length: int, long_prompts: LongPrompts) -> tuple[Row, bool]:
    """Return the row, and whether it was cut."""
    prompt = encode_prompt(tokenizer, example)
    # No second begin token; the end is learned, or an answer would never stop
    completion = [*tokenizer(example.completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    excess = len(prompt) + len(completion) - max_length
    if excess > 0 and long_prompts is LongPrompts.CUT_START:
        prompt = prompt[min(excess, len(prompt) - 1) :]  # one token is kept: the completion must follow something
    ids = [*prompt, *completion][:max_length]
    labels = [*[IGNORE_INDEX] * len(prompt), *completion][:max_length]
    return {"input_ids": ids, "labels": labels}, excess > 0


def encode_all(tokenizer: Any, examples: Sequence[Example], max_length: int, long_prompts: LongPrompts) -> Encoded:
    """Encode every row but those whose prompt is refused."""
    rows, kept, refused, num_cut = [], [], [], 0
    for example in show_tokenizing(examples):
        try:
            row, is_cut = encode(tokenizer, example, max_length, long_prompts)
        except RefusedPrompt as error:
            refused.append(str(error))
            continue
        rows.append(row)
        kept.append(example)
        num_cut += is_cut
    return Encoded(rows, num_cut, sum(not has_labels(row) for row in rows), kept, refused)


def has_labels(row: Row) -> bool:
    """Return whether anything can be learned from the row. The first token does not count: nothing precedes it."""
    return bool(list_labels(row))


def list_labels(row: Row) -> list[int]:
    """Return the tokens that are learned, in order."""
    return [label for label in row["labels"][1:] if label != IGNORE_INDEX]


class Padder:
    """Collate rows into a batch, padded on the right; padding is neither attended to nor learned."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        length = max(len(row["input_ids"]) for row in rows)

        def fill(values: list[int], filling: int) -> list[int]:
            return values + [filling] * (length - len(values))

        ids = [fill(row["input_ids"], self._pad) for row in rows]
        mask = [fill([1] * len(row["input_ids"]), 0) for row in rows]
        labels = [fill(row["labels"], IGNORE_INDEX) for row in rows]
        columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.tensor(values) for name, values in columns.items()}  # [B, T]


class EpochSampler(Sampler[int]):
    """The order of the rows in an epoch; with `group_size`, neighbours have about the same length."""

    def __init__(
        self, lengths: Sequence[int], seed: int, group_size: int | None = None, *, find_epoch: Callable[[], int]
    ) -> None:
        """`find_epoch` is called at the start of each pass."""
        self._lengths, self._seed, self._group_size = lengths, seed, group_size
        # Not a `set_epoch`: with several ranks, accelerate does not reach it after a resume within an epoch
        self._find_epoch = find_epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        # Far apart, so that epoch 1 of one seed is not epoch 0 of the next
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._find_epoch())
        order: list[int] = torch.randperm(len(self._lengths), generator=generator).tolist()
        if self._group_size is None:
            return iter(order)
        size = self._group_size
        groups: list[list[int]] = []
        for start in range(0, len(order), size * MEGABATCH):
            part = sorted(order[start : start + size * MEGABATCH], key=lambda i: self._lengths[i], reverse=True)
            groups += [part[i : i + size] for i in range(0, len(part), size)]
        full, rest = [g for g in groups if len(g) == size], [g for g in groups if len(g) < size]
        shuffled = [full[i] for i in torch.randperm(len(full), generator=generator).tolist()]
        # Short groups last: elsewhere they would shift the borders of all batches behind them
        return iter([i for group in [*shuffled, *rest] for i in group])
