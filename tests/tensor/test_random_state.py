"""The state of the random generators: captured cheaply, restored exactly."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy

from steadygrad.state.random_state import capture_random, restore_random


def test_numpy_is_captured_exactly_though_only_when_it_moved() -> None:
    captured = capture_random([])
    moves: list[Callable[[], object]] = [
        lambda: None,
        numpy.random.rand,
        numpy.random.randn,  # holds a second number back, which the words do not show
        lambda: numpy.random.seed(3),
        lambda: restore_random(captured),
    ]
    chosen = random.Random(0)
    for _ in range(500):
        chosen.choice(moves)()
        captured = capture_random([])
        for mine, theirs in zip(captured["numpy"], numpy.random.get_state()):
            assert numpy.array_equal(mine, theirs)


def test_a_restored_normal_number_that_numpy_holds_back_is_captured_again() -> None:
    numpy.random.seed(0)
    numpy.random.randn()  # computes two numbers and holds the second back
    held = capture_random([])
    numpy.random.randn()  # hands out the second one: the words stay as they are
    assert capture_random([])["numpy"][3] == 0

    numpy.random.set_state(held["numpy"])

    assert capture_random([])["numpy"][3:] == numpy.random.get_state()[3:] == held["numpy"][3:]


def test_pythons_generator_is_captured_exactly_though_only_when_it_moved() -> None:
    captured = capture_random([])
    moves: list[Callable[[], object]] = [
        lambda: None,
        random.random,
        lambda: random.gauss(0.0, 1.0),  # holds a second number back
        lambda: random.seed(3),
        lambda: restore_random(captured),
    ]
    chosen = random.Random(0)
    for _ in range(500):
        chosen.choice(moves)()
        captured = capture_random([])
        assert captured["python"] == random.getstate()
