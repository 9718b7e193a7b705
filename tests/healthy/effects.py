"""Step functions with side effects. Each meets a change of its data in mid-run, so that a Guard may wish to replay it.

To run such a function once more is to change the training, even where weights, gradients and random states are put
back. The effects are compared between the plain and the guarded run: calls counted, items drawn, lines read.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from healthy.parts import Clusters, make_mlp, miss_sum
from healthy.scenario import Trial, scenario

SHIFT = 300
"""The step at which the data changes: all losses leap by far more than a guard tolerates."""


def stretch(number: int) -> float:
    """Size of the targets at a step."""
    return 1.0 if number < SHIFT else 8.0


@scenario
def counts_its_calls(trial: Trial) -> None:
    """The function counts its calls and takes its curriculum from the count, so one call more shifts the schedule."""
    model, calls = make_mlp(8, 64, 1), itertools.count()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(x: Tensor) -> Tensor:
        return (model(x) - stretch(next(calls)) * x.sum(1, keepdim=True)).square().mean()

    loop = trial.loop(model, optimizer)
    for _ in range(700):
        loop.step(loss, torch.randn(64, 8))
    trial.effects["calls"] = next(calls)
    trial.expect("jump", loop.losses[SHIFT], above=50 * loop.losses[SHIFT - 1])
    trial.expect("last loss", loop.final, below=0.3 * loop.losses[SHIFT])


@scenario
def draws_from_its_own_iterator(trial: Trial) -> None:
    """The function takes `next(batches)` from a generator of its own; nobody else knows what it trained on."""
    model, drawn = make_mlp(8, 64, 1), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
        source = torch.Generator().manual_seed(5)
        for number in itertools.count():
            x = torch.randn(64, 8, generator=source)
            drawn.append(number)
            yield x, stretch(number) * x.sum(1, keepdim=True)

    batches = make_batches()

    def loss() -> Tensor:
        x, y = next(batches)
        return F.mse_loss(model(x), y)

    loop = trial.loop(model, optimizer)
    for _ in range(700):
        loop.step(loss)
    trial.effects["drawn"] = len(drawn)
    trial.expect("last loss", loop.final, below=0.3 * loop.losses[SHIFT])


@scenario
def own_random_generators(trial: Trial) -> None:
    """Noise from three generator objects of the program: torch's, Python's and numpy's. None of them is global."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tensors, plain, arrays = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)

    def loss(number: int) -> Tensor:
        x = torch.randn(32 if plain.random() < 0.5 else 64, 8, generator=tensors)
        noise = torch.from_numpy(arrays.normal(0, 0.1, (len(x), 1))).float()
        return (model(x) - stretch(number) * x.sum(1, keepdim=True) - noise).square().mean()

    loop = trial.run(model, optimizer, 700, loss)
    trial.effects["next numbers"] = (torch.rand((), generator=tensors).item(), plain.random(), arrays.random())
    trial.expect("last loss", loop.final, below=0.3 * loop.losses[SHIFT])


@scenario
def reads_a_file_line_by_line(trial: Trial) -> None:
    """Letters of two files, one after the other: the second has another language, and no line can be read twice."""
    model = nn.Sequential(nn.Embedding(26, 16), nn.Linear(16, 26))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    source = random.Random(4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "letters.txt")
        with path.open("w", encoding="utf-8") as file:
            for number in range(800):
                step, first = (1 if number < SHIFT else 7), source.randrange(26)
                file.write("".join(chr(97 + (first + step * at) % 26) for at in range(17)) + "\n")
        with path.open(encoding="utf-8") as lines:

            def loss() -> Tensor:
                letters = torch.tensor([ord(letter) - 97 for letter in lines.readline().strip()])
                return F.cross_entropy(model(letters[:-1]), letters[1:])

            loop = trial.loop(model, optimizer)
            for _ in range(700):
                loop.step(loss)
            trial.effects["next line"] = lines.readline()
    trial.expect("jump", loop.losses[SHIFT], above=50 * loop.losses[SHIFT - 1])
    trial.expect("last loss", loop.final, below=0.3)


@scenario
def keeps_its_hidden_state(trial: Trial) -> None:
    """Truncated backpropagation: the last hidden state stays in the module for the next step."""
    model, head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
    both = nn.ModuleList([model, head])
    optimizer = torch.optim.Adam(both.parameters(), 1e-2)
    model.last = torch.zeros(1, 8, 24)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        hidden, last = model(x, model.last)
        model.last = last.detach()
        return F.mse_loss(head(hidden), y)

    phase = torch.rand(8, 1) * 6
    loop = trial.loop(both, optimizer)
    for number in range(450):
        time = phase + (torch.arange(13) + 12 * number) * (0.3 if number < 225 else 0.9)
        series = (time.sin() * (1 if number < 225 else 5))[..., None]  # (batch, time, 1)
        loop.step(loss, series[:, :-1], series[:, 1:])
    trial.effects["state"] = model.last.sum().item()
    trial.expect("jump", max(loop.losses[225:230]), above=20 * loop.losses[224])
    trial.expect("last loss", loop.final, below=1.0)


@scenario
def changes_its_batch_in_place(trial: Trial) -> None:
    """The function normalises and augments the batch where it lies: the next call would get something else."""
    model, task = make_mlp(8, 64, 4, activation=nn.ReLU), Clusters(4, 8, spread=2.0, noise=0.5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5).add_(0.1 * torch.randn_like(x))
        return F.cross_entropy(model(x), y)

    loop = trial.loop(model, optimizer)
    for number in range(600):
        x, y = task.draw(64)
        loop.step(loss, x, y if number < SHIFT else 3 - y)
    trial.expect("jump", loop.losses[SHIFT], above=50 * loop.losses[SHIFT - 1])
    trial.expect("last loss", loop.final, below=0.1)


@scenario
def prints_its_progress(trial: Trial) -> None:
    """The function prints a line every 50 steps. A line more is a bug report."""
    model, calls, out = make_mlp(8, 64, 1), itertools.count(), io.StringIO()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def loss(x: Tensor, number: int) -> Tensor:
        error = (model(x) - stretch(number) * x.sum(1, keepdim=True)).square().mean()
        if next(calls) % 50 == 0:
            print(f"step {number}: {error.item():.3f}")
        return error

    loop = trial.loop(model, optimizer)
    with contextlib.redirect_stdout(out):
        for number in range(700):
            loop.step(loss, torch.randn(64, 8), number)
    trial.effects["printed"] = out.getvalue()
    trial.expect("last loss", loop.final, below=0.3 * loop.losses[SHIFT])


@scenario
def effects_begin_late(trial: Trial) -> None:
    """Pure for 300 steps, so a look at the first ones finds nothing; then each call takes a case from a list."""
    model, hard = make_mlp(8, 64, 1), [10 * torch.randn(16, 8) for _ in range(600)]
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)

    def loss(x: Tensor, number: int) -> Tensor:
        if number >= SHIFT:
            x = torch.cat([x, hard.pop()])
        return miss_sum(model, x)

    loop = trial.loop(model, optimizer)
    for number in range(700):
        loop.step(loss, torch.randn(64, 8), number)
    trial.effects["left"] = len(hard)
    trial.expect("jump", loop.losses[SHIFT], above=50 * loop.losses[SHIFT - 1])
    trial.expect("last loss", loop.final, below=loop.losses[SHIFT])


@scenario
def moves_on_when_it_is_good(trial: Trial) -> None:
    """The function watches its own loss and takes up a harder level when it is below 0.05: a machine with a state."""
    model = make_mlp(8, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    levels = [0]

    def loss(x: Tensor) -> Tensor:
        error = (model(x) - 3 * x[:, : 1 + levels[-1]].sum(1, keepdim=True)).square().mean()
        if error.item() < 0.05:
            levels.append(min(7, levels[-1] + 1))
        return error

    loop = trial.loop(model, optimizer)
    for _ in range(800):
        loop.step(loss, torch.randn(64, 8))
    trial.effects["levels"] = levels
    trial.expect("level", levels[-1], above=2)
