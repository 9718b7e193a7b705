"""Answers of a model -> accuracy and answer rate, on prompts that it was not trained on.

An answer is the text between `<answer>` and `</answer>`, or the whole text if the correct completion has no such
mark. Numbers are correct within a tolerance, other text when it is equal. Models answer greedily, so that the same
weights always score the same. Nothing here changes the model. `guess_loss` is the loss of not reading the prompt.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steadygrad.errors import UsageError
from steadygrad.trainer.evaluating import in_eval_mode
from steadygrad_recipes.loading import load_function, name_error, spell_place
from steadygrad_recipes.sft.data import Example
from steadygrad_recipes.sft.rows import Row, encode_prompt, list_labels

OPEN, CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True, slots=True)
class Scores:
    """Number of prompts, the share answered correctly, and the share answered at all."""

    accuracy: float
    answer_rate: float
    num_prompts: int

    def __str__(self) -> str:
        return f"accuracy={self.accuracy:.3g}, answer_rate={self.answer_rate:.3g}"


def parse_answer(text: str, *, marked: bool = True) -> str | None:
    """Return the answer; None when there is none."""
    if marked:
        _, found, after = text.partition(OPEN)
        text, closed, _ = after.partition(CLOSE)
        if not (found and closed):
            return None
    return " ".join(text.split()) or None


def is_right(given: str | None, expected: str | None, tolerance: float = 0.05) -> bool:
    """Return whether numbers agree within the relative `tolerance`; other text must be equal."""
    if given is None or expected is None:
        return False
    try:
        number, right = float(given), float(expected)
    except ValueError:
        return given.casefold() == expected.casefold()
    return math.isfinite(number) and abs(number - right) <= tolerance * abs(right)  # "inf" and "nan" are floats


Checker = Callable[[str, str], Any] | None
"""Whether an answer is right, or how right from 0 to 1, given the completion of its row; None: `is_right` decides."""


def load_checker(name: str | None) -> Checker:
    """Return the function that `module:function` or `file.py:function` names."""
    return None if name is None else load_function(name, "SftConfig.checker")


def check_answer(checker: Callable[[str, str], Any], text: str, completion: str) -> float:
    """Return what the checker says of an answer, as a number from 0 to 1; UsageError if it fails or says otherwise."""
    asked = f"the checker {getattr(checker, '__name__', checker)}, asked about {text[:40]!r} for {completion[:40]!r},"
    try:
        found = checker(text, completion)
    except (Exception, SystemExit) as error:  # the user's own code
        place = spell_place(error, checker)
        raise UsageError(f"{asked} raised {name_error(error)}{place}. Return True or False.") from error
    if not isinstance(found, bool | int | float) or not 0 <= found <= 1:
        raise UsageError(f"{asked} returned {found!r}. Return True or False, or a number from 0 to 1.")
    return float(found)


def score(
    texts: Sequence[str], examples: Sequence[Example], tolerance: float = 0.05, checker: Checker = None
) -> Scores:
    """Score these answers to the examples, whatever produced them."""
    num_right, num_answered = 0.0, 0
    for text, example in zip(texts, examples, strict=True):
        marked = OPEN in example.completion
        given = parse_answer(text, marked=marked)
        num_answered += given is not None
        if checker is None:
            num_right += is_right(given, parse_answer(example.completion, marked=marked), tolerance)
        else:
            num_right += check_answer(checker, text, example.completion)
    count = len(examples)
    return Scores(num_right / max(1, count), num_answered / max(1, count), count)


def score_commonest(
    training: Sequence[Example], examples: Sequence[Example], tolerance: float = 0.05, checker: Checker = None
) -> Scores:
    """Return the trivial baseline: the commonest training completion for every prompt."""
    ((commonest, _),) = Counter(example.completion for example in training).most_common(1)
    return score([commonest] * len(examples), examples, tolerance, checker)


PRIOR = 10.0
"""Weight of a token's frequency anywhere against its count at one place: few rows reach far into long completions."""


def guess_loss(training: Sequence[Row], validation: Sequence[Row]) -> float | None:
    """Return the loss on the validation of guessing each token by how often it stands at this place in training.

    None if one of them has no label. A model that does not beat it has learned nothing about what is asked.
    """
    places: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for row in training:
        for place, token in enumerate(list_labels(row)):
            places[place][token] += 1
    anywhere: Counter[int] = sum(places.values(), Counter())
    wanted = [pair for row in validation for pair in enumerate(list_labels(row))]
    if not anywhere or not wanted:
        return None
    num, num_tokens = anywhere.total(), len(anywhere) + 1  # one for all that are unseen
    total = 0.0
    for place, token in wanted:
        share = (anywhere[token] + 1) / (num + num_tokens)
        total -= math.log((places[place][token] + PRIOR * share) / (places[place].total() + PRIOR))
    return total / len(wanted)


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, examples: Sequence[Example], *, max_new_tokens: int, batch_size: int = 32
) -> list[str]:
    """Return the model's answer to each prompt. Prompts of equal length share a batch, so that nothing is padded."""
    prompts = [encode_prompt(tokenizer, example) for example in examples]
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(prompts):
        by_length.setdefault(len(ids), []).append(index)
    texts = [""] * len(prompts)
    with in_eval_mode(model):
        for indices in by_length.values():
            for start in range(0, len(indices), batch_size):
                part = indices[start : start + batch_size]
                for index, text in zip(part, _generate(model, tokenizer, [prompts[i] for i in part], max_new_tokens)):
                    texts[index] = text
    return texts


def _generate(model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> list[str]:
    ids = torch.tensor(prompts, device=next(model.parameters()).device)  # [B, T]
    tokens = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    # `generate` returns the prompt too
    return list(tokenizer.batch_decode(tokens[:, ids.shape[1] :], skip_special_tokens=True))
