"""Seeds that are set in every step, and programs that set seeds for a good reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


def _train(
    model: nn.Module, before: Callable[[int], Any] = lambda i: None, after: Callable[[int], Any] = lambda i: None
) -> Built:
    """Train on batches that are drawn beforehand, so that only the model and the program draw in a step."""

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(list(clusters(40))):

            def loss(x: Tensor, y: Tensor, i: int = i) -> Tensor:
                before(i)
                return F.cross_entropy(model(x), y)

            guard.step(loss, x, y)
            after(i)

    return model, adam(model), train


@case("repeated_seed", "torch.manual_seed in the step, for reproducible results")
def seeded_in_each_step(bug: bool) -> Built:
    return _train(mlp(8, 16, 4, dropout=0.2), lambda i: torch.manual_seed(0) if bug or i == 0 else None)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to its samples."""

    def __init__(self, seed: Callable[[int], Any]) -> None:
        self.seed, (self.x, self.y) = seed, next(clusters(1, rows=160))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.seed(i)
        return self.x[i] + 0.1 * torch.randn(8), self.y[i]


def _train_noisily(seed: Callable[[int], Any], model: nn.Module) -> Built:
    loader = DataLoader(Noisy(seed), batch_size=16, shuffle=True)

    def train(guard: Any) -> None:
        for _ in range(4):
            for x, y in loader:
                guard.step(F.cross_entropy(model(x), y))  # a loss, not a function

    return model, adam(model), train


@case("repeated_seed", "stackoverflow: a seed in __getitem__ makes the augmentation the same for each sample")
def seeded_in_getitem(bug: bool) -> Built:
    return _train_noisily(lambda i: torch.manual_seed(42) if bug else None, mlp(8, 16, 4))


@case("repeated_seed", "the same, for a model with dropout: its masks never change either")
def seeded_in_getitem_with_dropout(bug: bool) -> Built:
    return _train_noisily(lambda i: torch.manual_seed(42) if bug else None, mlp(8, 16, 4, dropout=0.2))


@case("repeated_seed", "a seed in forward")
def seeded_in_forward(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8, 16, 4, dropout=0.2)

        def forward(self, x: Tensor) -> Tensor:
            if bug:
                torch.manual_seed(1)
            return self.body(x + 0.1 * torch.randn_like(x))

    return _train(Net())


class Noise(nn.Module):
    """Adds noise of its own, as a VAE does, and has no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + 0.1 * torch.randn_like(x))


@case("repeated_seed", "a seed before the step of a model that draws noise without a dropout layer")
def seeded_before_noise(bug: bool) -> Built:
    return _train(Noise(), lambda i: torch.manual_seed(0) if bug or i == 0 else None)


@case("repeated_seed", "a seed in the loop of a diffusion model, which learns to remove one noise only")
def seeded_diffusion(bug: bool) -> Built:
    model = mlp(9, 32, 8)

    def denoise(x: Tensor) -> Tensor:
        time, noise = torch.rand(len(x), 1), torch.randn_like(x)
        return F.mse_loss(model(torch.cat([(1 - time) * x + time * noise, time], 1)), noise)

    def train(guard: Any) -> None:
        for i, (x, _) in enumerate(list(clusters(40))):
            if bug or i == 0:
                torch.manual_seed(0)
            guard.step(denoise, x)

    return model, adam(model), train


# --- nothing to find --------------------------------------------------------------------------------------------------


@case(None, "each sample has noise of its own, the same in every epoch")
def seeded_by_sample(bug: bool) -> Built:
    return _train_noisily(torch.manual_seed, mlp(8, 16, 4, dropout=0.2))


def _sample_with_fork() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.randn(4)


@case(None, "a fixed picture is drawn after every step, and the generator put back")
def forked_with_dropout(bug: bool) -> Built:
    return _train(mlp(8, 16, 4, dropout=0.2), after=lambda i: _sample_with_fork())


@case(None, "the same, in a program that draws nothing else")
def forked_without_draws(bug: bool) -> Built:
    return _train(mlp(8, 16, 4), after=lambda i: _sample_with_fork())


@case(None, "the generator's state is saved and put back around what is drawn with a seed")
def restored_by_hand(bug: bool) -> Built:
    def sample(_: int) -> None:
        state = torch.get_rng_state()
        torch.manual_seed(0)
        torch.randn(4)
        torch.set_rng_state(state)

    return _train(mlp(8, 16, 4), after=sample)


@case(None, "a seed in every step of a program that draws nothing")
def seeded_and_never_drawn(bug: bool) -> Built:
    return _train(mlp(8, 16, 4), lambda i: torch.manual_seed(0))


def _project(x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x @ torch.randn(8, 8) / 8**0.5


@case(None, "a fixed projection is drawn again in each step, and nothing else is random")
def remade_projection(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def train(guard: Any) -> None:
        for x, y in list(clusters(40)):
            guard.step(lambda x, y: F.cross_entropy(model(_project(x)), y), x, y)

    return model, adam(model), train


@case(None, "the same, in the program's loop and with shuffled batches")
def remade_projection_in_the_loop(bug: bool) -> Built:
    model, (x, y) = mlp(8, 16, 4), next(clusters(1, rows=640))
    batches = list(DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))

    def train(guard: Any) -> None:
        for x, y in batches:
            guard.step(F.cross_entropy(model(_project(x)), y))

    return model, adam(model), train


@case(None, "the same, inside the model")
def remade_projection_in_forward(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8, 16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(_project(x))

    return _train(Net())


@case(None, "an evaluation sets a seed now and then")
def seeded_evaluations(bug: bool) -> Built:
    return _train(mlp(8, 16, 4, dropout=0.2), after=lambda i: torch.manual_seed(0) if i % 5 == 4 else None)


@case(None, "zeroth order: noise is drawn again from the seed of each step")
def seeds_of_their_own(bug: bool) -> Built:
    def perturb(i: int) -> None:
        for _ in range(3):
            torch.manual_seed(1000 + i)
            torch.randn(4)

    return _train(mlp(8, 16, 4, dropout=0.2), perturb)


@case(None, "activation checkpointing puts the generator back")
def checkpointed_with_a_seed(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(8, 16, 4, dropout=0.2)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    return _train(Net())
