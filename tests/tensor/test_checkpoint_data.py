"""The data position: an interrupted epoch continues with the very next batch, bit for bit.

Each test runs a loader to the end, and again up to a stop; a second set of objects then loads the saved position in a
process whose generators are in another state. Every sample draws noise from torch, Python and numpy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from steadygrad.checkpoint.position import DataPositions
from steadygrad.errors import MismatchError
from steadygrad.state.random_state import capture_random, restore_random

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata's, with this torch
NUM = 22


class Noisy(Dataset[Tensor]):
    """Samples with random noise; counts the loaded ones."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Tensor:
        self.loaded.append(i)
        draws = [float(i), random.random(), float(numpy.random.rand())]
        return torch.cat([torch.tensor(draws, dtype=torch.float64), torch.rand(1, dtype=torch.float64)])


class Bucketed(Sampler[list[int]]):
    """A custom sampler that shuffles at the start of an epoch."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(NUM).tolist()
        yield from (order[i : i + 4] for i in range(0, NUM, 4))

    def __len__(self) -> int:
        return -(-NUM // 4)


Maker = Callable[[], Any]


def with_generator(**settings: Any) -> DataLoader[Tensor]:
    return DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(5), **settings)


LOADERS: dict[str, Maker] = {
    "in order": lambda: DataLoader(Noisy(), 4),
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "dropping the last": lambda: DataLoader(Noisy(), 4, shuffle=True, drop_last=True),
    "own generator": with_generator,
    "with replacement": lambda: DataLoader(Noisy(), 4, sampler=RandomSampler(Noisy(), replacement=True)),
    "weighted": lambda: DataLoader(Noisy(), 4, sampler=WeightedRandomSampler([1.0 + i for i in range(NUM)], NUM)),
    "subset": lambda: DataLoader(Noisy(), 4, sampler=SubsetRandomSampler(range(0, NUM, 2))),
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 4, False)),
    "stateful": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "workers, own generator": lambda: with_generator(num_workers=2, prefetch_factor=3),
    "workers that stay": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "stateful workers": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "list": lambda: [torch.full((4, 4), float(i)) for i in range(6)],
}


class Program:
    """The data side of a training: epochs of batches, each followed by random draws of the program."""

    def __init__(self, make: Maker, seed: int) -> None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self.loader = make()
        self.positions = DataPositions()
        self.epoch = 0

    def run(self, epochs: int, stop: int | None = None) -> list[Tensor]:
        """Run and return what was seen; stop after `stop` batches."""
        seen: list[Tensor] = []
        while self.epoch < epochs:
            for batch in self.positions.iterate(self.loader):
                seen.append(torch.cat([batch.reshape(-1).double(), torch.rand(1).double()]))
                if len(seen) == stop:
                    return seen
            self.epoch += 1
            self.positions.end_epoch()
        return seen

    def save(self) -> dict[str, Any]:
        return {"positions": self.positions.state_dict(), "epoch": self.epoch, "random": capture_random(())}

    def load(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        restore_random(state["random"])
        self.positions.load_state_dict(state["positions"], state["random"])


def go_on(make: Maker, stop: int, epochs: int = 3) -> tuple[list[Tensor], list[Tensor], Program]:
    """Return what an uninterrupted run and an interrupted one saw."""
    whole = Program(make, seed=1).run(epochs)
    first = Program(make, seed=1)
    seen = first.run(epochs, stop=stop)
    state = first.save()
    second = Program(make, seed=99)
    second.load(state)
    return whole, seen + second.run(epochs), second


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right)
    for i, (one, other) in enumerate(zip(left, right)):
        assert torch.equal(one, other), f"batch {i}: {one[:8]} and {other[:8]}"


@pytest.mark.parametrize("stop", [1, 4, 6, 9])
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "workers" not in kind])
def test_an_epoch_continues_where_it_was_interrupted(kind: str, stop: int) -> None:
    whole, resumed, _ = go_on(LOADERS[kind], stop)
    assert_equal(whole, resumed)


@pytest.mark.parametrize("stop", [3, 8])
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "workers" in kind])
def test_worker_processes_continue_with_their_own_random_numbers(kind: str, stop: int) -> None:
    whole, resumed, _ = go_on(LOADERS[kind], stop, epochs=2)
    assert_equal(whole, resumed)


def test_without_the_position_a_resumed_run_would_see_other_data() -> None:
    whole = Program(LOADERS["shuffled"], seed=1).run(2)
    first = Program(LOADERS["shuffled"], seed=1)
    seen = first.run(2, stop=3)
    second = Program(LOADERS["shuffled"], seed=99)
    restore_random(first.save()["random"])
    assert not torch.equal(whole[3], (seen + second.run(2))[3])


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "batch sampler"])
def test_the_sampler_advances_without_loading_data(kind: str) -> None:
    _, resumed, second = go_on(LOADERS[kind], 4, epochs=1)
    loaded = [int(row) for batch in resumed[4:] for row in batch[:-1].reshape(-1, 4)[:, 0]]
    assert second.loader.dataset.loaded == loaded


def test_the_loader_gives_the_same_with_and_without_a_position() -> None:
    for kind in ("shuffled", "workers"):
        Program(LOADERS[kind], seed=1)
        plain = list(LOADERS[kind]())
        program = Program(LOADERS[kind], seed=1)
        assert_equal(plain, list(program.positions.iterate(program.loader)))


def test_the_users_loader_is_unchanged() -> None:
    loader = LOADERS["workers"]()
    before = dict(vars(loader))
    assert len(list(DataPositions().iterate(loader))) == len(loader)
    assert vars(loader) == before


def test_two_loaders_of_an_epoch_are_distinguished() -> None:
    def run(stop: int | None, state: dict[str, Any] | None = None) -> tuple[list[float], dict[str, Any]]:
        torch.manual_seed(3 if state is None else 77)
        train, val = DataLoader(Noisy(), 4, shuffle=True), DataLoader(Noisy(), 8)
        positions, seen = DataPositions(), []
        if state is not None:
            positions.load_state_dict(state["positions"], state["random"])
        for loader in (train, val):
            for batch in positions.iterate(loader):
                seen.append(float(batch[0, 0]))
                if len(seen) == stop:
                    return seen, {"positions": positions.state_dict(), "random": capture_random(())}
        return seen, {}

    whole, _ = run(None)
    begun, state = run(7)
    rest, _ = run(None, state)
    assert begun + rest == whole


def test_a_changed_number_of_batches_raises_an_error() -> None:
    first = Program(LOADERS["shuffled"], seed=1)
    first.run(1, stop=2)
    second = Program(lambda: DataLoader(Noisy(), 8, shuffle=True), seed=1)
    second.load(first.save())
    with pytest.raises(MismatchError, match="has 3 batches, and had 6"):
        second.run(1)


class Counting(IterableDataset[Tensor]):
    """Has no sampler, and can only be advanced by running."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.full((2,), float(i)) for i in range(NUM))


@pytest.mark.parametrize("make", [lambda: DataLoader(Counting(), 4), lambda: map(float, range(6))], ids=["data", "map"])
def test_a_warning_is_given_if_the_order_cannot_be_guaranteed(make: Maker) -> None:
    def take(positions: DataPositions, count: int) -> list[Any]:
        batches = positions.iterate(make())
        return [next(batches) for _ in range(count)]

    whole, first, second = DataPositions(), DataPositions(), DataPositions()
    expected = take(whole, 5)
    take(first, 3)
    second.load_state_dict(first.state_dict(), capture_random(()))
    with pytest.warns(UserWarning, match="order of its data is not guaranteed"):
        rest = take(second, 2)
    assert str(rest) == str(expected[3:])


def test_a_custom_sampler_is_run_again_with_a_warning() -> None:
    def make() -> Any:
        return DataLoader(Noisy(), batch_sampler=Bucketed())

    with pytest.warns(UserWarning, match="Bucketed was read again"):
        whole, resumed, _ = go_on(make, 3)
    assert_equal(whole, resumed)


def test_a_changed_number_of_workers_keeps_the_order_with_a_warning() -> None:
    first = Program(LOADERS["workers"], seed=1)
    seen = first.run(1, stop=2)
    second = Program(lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=1), seed=4)
    second.load(first.save())
    with pytest.warns(UserWarning, match="had 2 when the checkpoint was saved"):
        rest = second.run(1)
    whole = Program(LOADERS["workers"], seed=1).run(1)
    indices = [batch[:-1].reshape(-1, 4)[:, 0].tolist() for batch in whole]
    assert [batch[:-1].reshape(-1, 4)[:, 0].tolist() for batch in seen + rest] == indices


@pytest.mark.parametrize("epochs_before", [1, 2])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_save_between_epochs_keeps_the_loaders_state(kind: str, epochs_before: int) -> None:
    make = LOADERS[kind]
    whole = Program(make, seed=1)
    expected = whole.run(3)
    first = Program(make, seed=1)
    seen = first.run(epochs_before)
    state = first.save()
    second = Program(make, seed=99)
    if isinstance(second.loader, DataLoader) and second.loader.generator is not None:
        second.loader.generator.manual_seed(42)
    second.load(state)
    seen += second.run(3)
    assert len(seen) == len(expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, expected))
