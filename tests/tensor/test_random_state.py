"""The state of the random generators: captured cheaply, restored exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

from steadygrad import Guard
from steadygrad.state.random_state import capture_random, restore_random, unchanged_random


def test_numpys_generator_is_captured_exactly_though_only_when_it_changed() -> None:
    captured = capture_random([])
    moves: list[Callable[[], object]] = [
        lambda: None,
        numpy.random.rand,
        numpy.random.randn,  # keeps a second number, which is not in the words
        lambda: numpy.random.seed(3),
        lambda: restore_random(captured),
    ]
    chosen = random.Random(0)
    for _ in range(500):
        chosen.choice(moves)()
        captured = capture_random([])
        for mine, theirs in zip(captured["numpy"], numpy.random.get_state()):
            assert numpy.array_equal(mine, theirs)


def test_a_kept_normal_number_of_numpy_is_captured_again_after_restoring() -> None:
    numpy.random.seed(0)
    numpy.random.randn()  # computes two numbers and keeps the second
    held = capture_random([])
    numpy.random.randn()  # returns the second one: the words do not change
    assert capture_random([])["numpy"][3] == 0

    numpy.random.set_state(held["numpy"])

    assert capture_random([])["numpy"][3:] == numpy.random.get_state()[3:] == held["numpy"][3:]


def test_pythons_generator_is_captured_exactly_though_only_when_it_changed() -> None:
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


def test_a_checkpoint_made_inside_an_evaluation_has_the_state_that_follows_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)

    def make() -> Guard:
        return Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path)

    with make() as guard:
        guard.step(model(torch.ones(1, 2)).sum())
        with unchanged_random(()):
            torch.rand(3)
            with unchanged_random(()):
                guard.save()
            guard.flush()
        wanted = torch.rand(3), random.random(), numpy.random.rand()

    with make() as guard:
        assert guard.resume() == 1
        assert torch.equal(torch.rand(3), wanted[0])
        assert (random.random(), numpy.random.rand()) == wanted[1:]
