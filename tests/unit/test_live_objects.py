"""state/live_objects.py: the living instances of a class, found without disturbing a program."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from steadygrad.state.live_objects import list_live


class Proxy:
    """Runs its own code when it is asked for its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise AssertionError("this code was run")


class Own(nn.Linear):
    """A subclass."""


class Unused(nn.Linear):
    """A class without an instance."""


def test_instances_of_a_class_and_of_its_subclasses_are_found() -> None:
    first, second, other, proxy = nn.Linear(2, 3), Own(2, 3), nn.Conv1d(1, 1, 1), Proxy()

    assert {id(first), id(second)} <= set(map(id, list_live(nn.Linear)))
    assert id(other) not in set(map(id, list_live(nn.Linear)))
    assert list_live(Own) == [second]
    assert list_live(Unused) == []
    assert type(proxy) is Proxy


def test_nothing_is_kept_alive() -> None:
    one = Own(2, 3)
    before = sys.getrefcount(one)

    found = list_live(Own)
    during = sys.getrefcount(one)
    del found

    assert (during - before, sys.getrefcount(one) - before) == (1, 0)


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Have threads change places as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_tuple_that_another_thread_is_building_is_left_alone(busy_threads: None) -> None:
    """Python ends `tuple(generator)` with a SystemError where somebody else holds the unfinished tuple."""
    errors: list[BaseException] = []
    is_over = threading.Event()

    def build() -> None:
        while not is_over.is_set():
            try:
                tuple([] for _ in range(50))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(60):
            list_live(nn.Module)
    finally:
        is_over.set()
        thread.join()

    assert not errors


def test_several_threads_may_search_at_once(busy_threads: None) -> None:
    modules = [nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Conv1d(1, 1, 1)) for _ in range(10)]
    errors: list[BaseException] = []

    def search() -> None:
        try:
            for _ in range(30):
                assert len(list_live(nn.Module)) >= 4 * len(modules)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not errors
