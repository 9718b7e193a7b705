"""A file of rows (`formats.py`), or questions generated here -> Examples: prompts and the completions to learn.

Prompts are text or chat messages (`role`, `content`), completions text or one message. No row is lost silently: those
that cannot be used are named, all in one error, or left out and counted on request. Imports no torch.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steadygrad.errors import ConfigError
from steadygrad.words import spell_count
from steadygrad_recipes.sft.formats import KNOWN, find_parts, find_prompt, read_rows

Message = Mapping[str, str]

NUM_NAMED = 5
"""Number of bad rows that an error names; the others are counted."""
UNITS = (
    ("km", "m", 3),
    ("m", "cm", 2),
    ("m", "mm", 3),
    ("cm", "mm", 1),
    ("dm", "cm", 1),
    ("kg", "g", 3),
    ("g", "mg", 3),
    ("t", "kg", 3),
    ("l", "ml", 3),
    ("l", "dl", 1),
)
"""A large unit, a small one, and the power of ten between them."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row."""

    prompt: str | tuple[Message, ...]
    completion: str
    place: str = field(default="", compare=False, repr=False)
    """File and row that it comes from, if any."""

    @property
    def question(self) -> str:
        """The prompt as one text, to compare it with others."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Examples:
    """The rows of a training, and what was left out of its files."""

    training: list[Example]
    validation: list[Example]
    left_out: tuple[str, ...] = ()


def read_examples(
    data: str | None,
    validation: str | None,
    *,
    share: float = 0.1,
    num_synthetic: int = 4000,
    largest_amount: int = 999,
    seed: int = 0,
    skip_bad_rows: bool = False,
    hub: bool = False,
) -> Examples:
    """Return rows for training and validation; without a validation file, a `share` of them is held out."""
    left_out: list[str] = []
    if data is None:
        rows = make_examples(num_synthetic, largest_amount, seed)
    else:
        rows = read_file(Path(data), left_out if skip_bad_rows else None, hub=hub)
    if validation is not None:
        held_out = read_file(Path(validation), left_out if skip_bad_rows else None, hub=hub)
        return Examples(rows, held_out, tuple(left_out))
    num_held_out = round(len(rows) * share)
    if not 0 < num_held_out < len(rows):
        raise ConfigError(
            f"{spell_count(len(rows), 'row')} in {data or 'the made set'}, of which a share of {share:g} is held out: "
            "that leaves nothing for one of both. Give more rows, or a file with SftConfig.validation."
        )
    return Examples(*split_rows(rows, num_held_out, seed), tuple(left_out))


def split_rows(rows: Sequence[Example], num_held_out: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Return the rows to train on, and about so many held out at random: the same for the same seed.

    Rows with the same prompt stay on one side, or validation would reward what was learned by heart. Where nearly all
    share a prompt, rows that are the same in full do; where nearly all are the same, nothing can.
    """
    shuffled = random.Random(seed).sample(rows, len(rows))
    ways = [row.question for row in shuffled], [(row.question, row.completion) for row in shuffled], range(len(rows))
    for keys in ways:
        held_out = _choose_keys(keys, num_held_out)
        chosen = [key in held_out for key in keys]
        if 2 * sum(chosen) >= num_held_out:
            break
    training = [row for row, is_held_out in zip(shuffled, chosen) if not is_held_out]
    return training, [row for row, is_held_out in zip(shuffled, chosen) if is_held_out]


def _choose_keys(keys: Iterable[Hashable], num_rows: int) -> set[Hashable]:
    """Return the first keys whose rows fit into so many; a key with too many rows is passed over."""
    chosen = set()
    for key, count in Counter(keys).items():  # in the order of the keys
        if count <= num_rows:
            chosen.add(key)
            num_rows -= count
    return chosen


def count_known(examples: Examples) -> int:
    """Return how many held-out rows have a prompt, or without one a text, that is trained on too."""
    known = {row.question or row.completion for row in examples.training}
    return sum((row.question or row.completion) in known for row in examples.validation)


# --- files ----------------------------------------------------------------------------------------------------------


def read_file(
    path: Path, left_out: list[str] | None = None, *, hub: bool = False, needs_completion: bool = True
) -> list[Example]:
    """Read the rows of one file. Unusable rows raise an error, or are added to `left_out` where that is a list."""
    rows, bad = [], []
    for place, row in read_rows(path, hub=hub):
        try:
            rows.append(replace(parse_row(row, needs_completion=needs_completion), place=place))
        except ValueError as error:
            bad.append(f"{place}: {error}")
    if bad and left_out is None:
        raise ConfigError(spell_bad_rows(bad, len(bad) + len(rows), can_be_skipped=needs_completion))
    if not rows:
        reasons = "; ".join(bad[:NUM_NAMED]) or "it has no rows"
        raise ConfigError(f"{path} has no row that can be used: {reasons}. A row has {KNOWN}.")
    if left_out is not None:
        left_out += bad
    return rows


def spell_bad_rows(bad: Sequence[str], num_rows: int, *, can_be_skipped: bool = True) -> str:
    """Format the error about rows that cannot be used."""
    named = "\n  ".join(bad[:NUM_NAMED])
    more = f"\n  and {len(bad) - NUM_NAMED} more" if len(bad) > NUM_NAMED else ""
    return (
        f"{len(bad)} of {num_rows} rows cannot be used:\n  {named}{more}\n"
        f"Fix them{', or leave them out with skip_bad_rows=True' if can_be_skipped else ''}."
    )


def parse_row(row: Any, *, needs_completion: bool = True) -> Example:
    """Parse one row; raises ValueError, with the reason, for one that cannot be used."""
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, Mapping):
        raise ValueError(f"a JSON object is needed, found {type(row).__name__}")
    if not needs_completion:
        return Example(_parse_prompt(find_prompt(row)), "")
    prompt, given = find_parts(row)
    completion = _parse_completion(given)
    if not completion.strip():
        raise ValueError("the completion is empty: there is nothing to learn")
    return Example("" if prompt is None else _parse_prompt(prompt), completion)


def _parse_prompt(value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError("the prompt is empty")
        return value
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return tuple(value)
    raise ValueError(f"the prompt must be text or a list of messages with `role` and `content`, found {_name(value)}")


def _parse_completion(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) == 1 and _is_message(value[0]):
        return str(value[0]["content"])
    raise ValueError(f"the completion must be text or a list of one message, found {_name(value)}")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _name(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


# --- generated here -------------------------------------------------------------------------------------------------


def make_examples(count: int, largest_amount: int = 999, seed: int = 0) -> list[Example]:
    """Generate questions about units, no two alike: 'How many cm are in 3 m?' -> '<answer>300</answer>'."""
    possible = [(unit, amount) for unit in UNITS for amount in range(1, largest_amount + 1)]
    if count > len(possible):
        raise ConfigError(
            f"SftConfig.num_synthetic is {count}, and there are {len(possible)} questions. Ask for fewer."
        )
    chosen: Sequence[tuple[tuple[str, str, int], int]] = random.Random(seed).sample(possible, count)
    return [
        Example(f"How many {small} are in {amount} {large}?", f"<answer>{amount * 10**power}</answer>")
        for (large, small, power), amount in chosen
    ]
