"""Which samples failed: by rows first, then by halves, for any nesting of the batch; otherwise a clear answer."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadygrad.diagnose import diagnose
from steadygrad.diagnose.batches import count_samples, take_samples

BAD = (3, 7)


@dataclass(frozen=True)
class Sample:
    x: Tensor
    names: list[str]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding(collections.UserDict[str, Any]):
    """Like the class that tokenizers return."""


def bad_x(size: int = 10) -> Tensor:
    x = torch.randn(size, 4)
    x[list(BAD)] = 0.0
    return x


def batches() -> dict[str, Any]:
    x, y = bad_x(), torch.randn(10, 1)
    return {
        "tensor": x,
        "tuple": (x, y),
        "dict": {"a": {"x": x}, "mask": torch.ones(4)},
        "dataclass": Sample(x, [f"name {i}" for i in range(10)]),
        "namedtuple": Pair(x, y),
        "encoding": Encoding({"x": x, "labels": y}),
    }


def find_x(batch: Any) -> Tensor:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, Sample | Pair):
        return batch.x
    if isinstance(batch, tuple):
        return batch[0]
    return batch["a"]["x"] if "a" in batch else batch["x"]


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "dataclass", "namedtuple", "encoding"])
def test_samples_are_found_in_every_form_of_batch(form: str) -> None:
    model = nn.Linear(4, 3, bias=False)

    def step(batch: Any) -> Tensor:
        return model(find_x(batch)).square().sum(-1).sqrt().mean()

    cause = diagnose(step, batches()[form])

    assert cause is not None
    assert cause.samples == BAD
    assert cause.samples_note.startswith("2 of 10 in the batch (indices 3, 7): only zeros in ")


def test_halves_find_samples_if_rows_do_not() -> None:
    """The op sees the batch flattened, and the rows of its result are not samples."""
    model = nn.Linear(4, 3, bias=False)

    def step(x: Tensor) -> Tensor:
        return model(x).flatten().abs().pow(0.5).view(-1, 3).sum(-1).mean()

    cause = diagnose(step, bad_x())

    assert cause is not None
    assert cause.samples == BAD


def test_samples_that_fail_only_together_are_reported_as_such() -> None:
    model = nn.Linear(4, 1)

    def step(x: Tensor) -> Tensor:
        ratio = model(x).sum() / (x[:, 0].amax() - x[:, 0].amin())
        return ratio if len(x) == 8 else model(x).sum()

    cause = diagnose(step, torch.ones(8, 4))

    assert cause is not None
    assert cause.samples == ()
    assert "not on its parts" in cause.samples_note


def test_a_failure_of_every_part_is_not_attributed_to_samples() -> None:
    model = nn.Linear(4, 1)

    cause = diagnose(lambda x: (model(x) * 0).sum().log(), torch.ones(8, 4))

    assert cause is not None
    assert cause.samples == ()
    assert cause.samples_note == "samples 0, 4 and 7 each fail on their own: no single one is to blame"


def test_a_step_that_fails_on_partial_batches_says_so() -> None:
    model = nn.Linear(4, 1)

    def step(x: Tensor) -> Tensor:
        if len(x) != 8:
            raise ValueError("8 rows, please")
        return (model(x) * 0).sum().log()

    cause = diagnose(step, torch.ones(8, 4))

    assert cause is not None
    assert "8 rows, please" in cause.samples_note


def test_a_batch_without_samples_says_so() -> None:
    model = nn.Linear(4, 1)

    cause = diagnose(lambda scale: (model(torch.ones(4)) * scale).log().sum(), torch.tensor(0.0))

    assert cause is not None
    assert cause.samples_note == "no tensor of the batch has samples along its first dimension"


def test_selecting_samples_does_not_change_the_batch() -> None:
    batch = batches()["encoding"]
    before = {key: value.clone() for key, value in batch.items()}

    taken = take_samples(batch, [1, 2], 10)

    assert isinstance(taken, Encoding)
    assert [len(value) for value in taken.values()] == [2, 2]
    assert all(torch.equal(batch[key], before[key]) for key in before)


def test_lists_with_one_item_per_sample_are_split_too() -> None:
    boxes = [torch.randn(i % 3, 4) for i in range(5)]
    images = torch.randn(5, 2)

    taken = take_samples((images, boxes), [4, 0], 5)

    assert torch.equal(taken[0], images[[4, 0]])
    assert [len(one) for one in taken[1]] == [1, 0]
    assert taken[1][0] is boxes[4]


def test_the_size_of_a_batch_is_the_most_common_one() -> None:
    assert count_samples((torch.ones(5, 2), torch.ones(5), torch.ones(3)), {}) == 5
    assert count_samples((nn.Linear(7, 7), 3), {"x": torch.tensor(1.0)}) is None


def test_a_sample_that_passed_through_numpy_is_found() -> None:
    model, x = nn.Linear(4, 1), torch.randn(6, 4)
    x[4] = 0.0

    def fn(x: Tensor) -> Tensor:
        rows = x.numpy()
        with np.errstate(all="ignore"):
            return model(torch.from_numpy(rows / np.linalg.norm(rows, axis=1, keepdims=True))).mean()

    cause = diagnose(fn, x, model=model)

    assert cause is not None
    assert cause.samples == (4,)
    assert "results of Python or numpy" in cause.explanation
