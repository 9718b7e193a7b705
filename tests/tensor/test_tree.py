"""One tree walker opens every container of a batch, and leaves the caller's objects alone."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from steadygrad.state.tree import find_tensors, map_tensors
from steadygrad.testing import poison_batches, scale_batches


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    image: Tensor
    name: str = "cat"


class Encoding(collections.UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding: keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


ONE = torch.ones(2)
CONTAINERS = {
    "dict": {"a": ONE},
    "ordered": collections.OrderedDict(a=ONE),
    "encoding": Encoding({"a": ONE}),
    "list": [ONE, 3],
    "named tuple": Pair(ONE, ONE),
    "frozen dataclass": Sample(ONE),
    "nested": {"a": [(ONE, {"b": Sample(ONE)})]},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_keeps_its_type_and_only_its_tensors_change(name: str) -> None:
    batch = CONTAINERS[name]

    changed = map_tensors(batch, lambda tensor: tensor + 1)

    assert type(changed) is type(batch)
    before, after = list(find_tensors([batch], {})), list(find_tensors([changed], {}))
    assert [path for path, _ in before] == [path for path, _ in after]
    assert all(tensor is ONE and torch.equal(tensor, torch.ones(2)) for _, tensor in before)
    assert all(torch.equal(tensor, torch.full((2,), 2.0)) for _, tensor in after)


def test_uncopyable_objects_become_dicts_and_objects_without_tensors_stay_the_same() -> None:
    assert map_tensors(types.MappingProxyType({"a": ONE}), lambda t: t * 0)["a"].sum() == 0
    sample = Sample(ONE)
    assert map_tensors(sample, lambda tensor: tensor) is sample


def test_a_module_is_never_opened_and_a_self_containing_list_ends() -> None:
    model, loop = nn.Linear(2, 1), [ONE]
    loop.append(loop)  # type: ignore[arg-type]

    assert map_tensors([model], lambda tensor: tensor * 0)[0] is model
    assert not list(find_tensors([model], {}))
    assert torch.equal(map_tensors(loop, lambda tensor: tensor + 1)[0], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    "batch",
    [
        Pair(torch.ones(2, 3), torch.zeros(2)),
        (torch.ones(2, 3), torch.zeros(2)),
        [torch.ones(2, 3), torch.zeros(2)],
        {"first": torch.ones(2, 3), "second": torch.zeros(2)},
        collections.OrderedDict(first=torch.ones(2, 3), second=torch.zeros(2)),
        Encoding(first=torch.ones(2, 3), second=torch.zeros(2)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_poisoned_batch_keeps_its_type(batch: Any) -> None:
    poisoned, scaled = (*poison_batches([batch], at=(0,)), *scale_batches([batch], at=(0,), factor=3.0))
    for changed, expected in ((poisoned, [[torch.nan] * 3, [1.0] * 3]), (scaled, [[3.0] * 3] * 2)):
        assert type(changed) is type(batch)
        (_, first), (_, second) = find_tensors([changed], {})
        torch.testing.assert_close(first, torch.tensor(expected), equal_nan=True, rtol=0, atol=0)
        assert torch.equal(second, torch.zeros(2))
    assert torch.equal(next(tensor for _, tensor in find_tensors([batch], {})), torch.ones(2, 3))


class NoClass:
    """Like a lazy proxy outside of its context."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("outside of its context")


class NoItems(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("closed")


@pytest.mark.parametrize("kind", [NoClass, NoItems])
def test_objects_that_cannot_be_opened_stay_unchanged(kind: type) -> None:
    batch = [ONE, kind()]

    changed = map_tensors(batch, torch.neg)

    assert torch.equal(changed[0], -ONE)
    assert changed[1] is batch[1]
    assert [path for path, _ in find_tensors([batch], {})] == ["0"]
