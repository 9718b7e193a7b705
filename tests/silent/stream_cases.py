"""Errors in the stream of data, updates that are lost, and programs that look like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


def _make_data(rows: int = 160) -> TensorDataset:
    return TensorDataset(*next(clusters(1, rows=rows)))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields samples; each worker all of them, or its share."""

    def __init__(self, *, split: bool) -> None:
        self.split, (self.x, self.y) = split, next(clusters(1, rows=256))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        start, step = (worker.id, worker.num_workers) if self.split and worker is not None else (0, 1)
        yield from zip(self.x[start::step], self.y[start::step])


@case("repeated_batch", "pytorch docs: an IterableDataset that is not split by worker")
def iterable_not_split(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    loader = DataLoader(Stream(split=not bug), batch_size=8, num_workers=2)

    def train(guard: Any) -> None:
        for x, y in loader:
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model), train


@case("repeated_batch", "stackoverflow: next(iter(loader)) in the loop")
def stuck_loader(bug: bool) -> Built:
    model, loader = mlp(8, 16, 4), DataLoader(_make_data(640), batch_size=16)

    def train(guard: Any) -> None:
        batches = iter(loader)
        for _ in range(24):
            x, y = next(iter(loader)) if bug else next(batches)
            guard.step(F.cross_entropy(model(x), y))  # a loss, not a function

    return model, adam(model), train


@case("repeated_order", "discuss.pytorch.org: the sampler's generator is seeded in each epoch")
def seeded_each_epoch(bug: bool) -> Built:
    model, generator = mlp(8, 16, 4), torch.Generator()
    loader = DataLoader(_make_data(), batch_size=16, shuffle=True, generator=generator)

    def train(guard: Any) -> None:
        for epoch in range(3):
            generator.manual_seed(0 if bug else epoch)
            for x, y in loader:
                guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model), train


@case("sorted_labels", "shuffle=False on folders of classes")
def sorted_folders(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    x, y = next(clusters(1, rows=640))
    order = y.argsort() if bug else torch.arange(640)
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=16)

    def train(guard: Any) -> None:
        for x, y in loader:
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, torch.optim.SGD(model.parameters(), 0.01), train


@case("constant_labels", "a column of the labels that was never filled")
def labels_never_filled(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def train(guard: Any) -> None:
        for x, y in clusters(40):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, torch.zeros_like(y) if bug else y)

    return model, adam(model), train


@case("independent_labels", "labels are those of the next sample")
def labels_off_by_one(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def train(guard: Any) -> None:
        for x, y in clusters(280):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y.roll(1) if bug else y)

    return model, adam(model), train


class InPlace(Dataset[tuple[Tensor, Tensor]]):
    """Normalises what it returns, or what it keeps."""

    def __init__(self, *, bug: bool) -> None:
        self.bug, (self.x, self.y) = bug, next(clusters(1, rows=128, width=16))
        self.x += 5

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = self.x[i]
        return (x.sub_(2).div_(1.3) if self.bug else (x - 2) / 1.3), self.y[i]


@case("changed_dataset", "an in-place transform on cached data")
def in_place_transform(bug: bool) -> Built:
    model, loader = mlp(16, 16, 4), DataLoader(InPlace(bug=bug), batch_size=16, shuffle=True)

    def train(guard: Any) -> None:
        for _ in range(24):
            for x, y in loader:
                guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model, 1e-4), train


@case(None, "a curriculum: the program lowers the contrast of the stored inputs after each epoch")
def contrast_lowered(bug: bool) -> Built:
    data = InPlace(bug=False)
    model, loader = mlp(16, 16, 4), DataLoader(data, batch_size=16, shuffle=True)

    def train(guard: Any) -> None:
        for _ in range(36):
            for x, y in loader:
                guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            data.x *= 0.93

    return model, adam(model, 1e-4), train


@case("single_row", "a collate function that keeps the first sample only")
def single_row(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def loss(x: Tensor, condition: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x + condition), y)

    def train(guard: Any) -> None:
        for x, y in clusters(8):
            condition = torch.randn(16, 8)
            guard.step(loss, x, condition[:1] if bug else condition, y)

    return model, adam(model), train


@case("lost_updates", "meta-pytorch/torchtune#2254: bfloat16 weights and a small rate")
def bfloat16_weights(bug: bool) -> Built:
    model = mlp(8, 32, 4).bfloat16()

    def train(guard: Any) -> None:
        for x, y in clusters(40):
            guard.step(lambda x, y: F.cross_entropy(model(x.bfloat16()).float(), y), x, y)

    return model, torch.optim.SGD(model.parameters(), 1e-4 if bug else 0.05), train


# --- nothing to find --------------------------------------------------------------------------------------------------


@case(None, "full-batch training: the very same tensors at every step")
def full_batch(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    x, y = next(clusters(1, rows=64))

    def train(guard: Any) -> None:
        for _ in range(40):
            guard.step(F.cross_entropy(model(x[:48]), y[:48]))

    return model, adam(model), train


@case(None, "full-batch training on inputs that are made anew for each step, as coordinates are")
def coordinates(bug: bool) -> Built:
    model, wanted = mlp(1, 16, 1), torch.rand(32, 1)

    def train(guard: Any) -> None:
        for _ in range(40):
            guard.step(lambda x, y: F.mse_loss(model(x), y), torch.linspace(0, 1, 32)[:, None], wanted.clone())

    return model, adam(model), train


@case(None, "an epoch of one batch, from a DataLoader")
def one_batch_epochs(bug: bool) -> Built:
    model, loader = mlp(8, 16, 4), DataLoader(_make_data(64), batch_size=64)

    def train(guard: Any) -> None:
        for _ in range(40):
            for x, y in loader:
                guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model), train


@case(None, "epochs in a fixed order, on purpose")
def unshuffled(bug: bool) -> Built:
    model, loader = mlp(8, 16, 4), DataLoader(_make_data(), batch_size=16)

    def train(guard: Any) -> None:
        for _ in range(4):
            for x, y in loader:
                guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model), train


@case(None, "a rare class: most batches hold the common one only")
def rare_class(bug: bool) -> Built:
    model = mlp(8, 16, 2)

    def train(guard: Any) -> None:
        for x, _ in clusters(80):
            y = (torch.rand(16) < 0.01).long()
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model), train


@case(None, "contrastive learning: the label is always 0")
def contrastive_zeros(bug: bool) -> Built:
    model = mlp(8, 16, 16)

    def loss(x: Tensor) -> Tensor:
        a, b = F.normalize(model(x)), F.normalize(model(x + 0.1 * torch.randn_like(x)))
        logits = torch.cat([(a * b).sum(1, keepdim=True), a @ b.roll(1, 0).T], 1)
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))

    def train(guard: Any) -> None:
        for x, _ in clusters(60):
            guard.step(loss, x)

    return model, adam(model), train


@case(None, "several passes over each rollout, as in PPO")
def passes_over_rollouts(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def train(guard: Any) -> None:
        for x, y in clusters(12, rows=64):
            for _ in range(4):
                order = torch.randperm(64)
                for rows in order.split(32):
                    guard.step(F.cross_entropy(model(x[rows]), y[rows]))

    return model, adam(model), train


@case(None, "bfloat16 weights in a warm-up from a rate of nearly 0")
def bfloat16_warm_up(bug: bool) -> Built:
    model = mlp(8, 32, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(100)):
            optimizer.param_groups[0]["lr"] = 1e-6 * (i + 1)
            guard.step(lambda x, y: F.cross_entropy(model(x.bfloat16()).float(), y), x, y)

    return model, optimizer, train


@case(None, "a hard task: nothing is learnt yet, but the labels depend on the inputs")
def slow_start(bug: bool) -> Built:
    model = mlp(8, 16, 4)

    def train(guard: Any) -> None:
        for x, y in clusters(270):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, torch.optim.SGD(model.parameters(), 1e-6), train


def _train_on_codes(make: Callable[[], tuple[Tensor, Tensor]], model: nn.Module, rate: float = 1e-3) -> Built:
    """Train for as long as the labels' dependence on the inputs is looked at."""

    def train(guard: Any) -> None:
        for _ in range(260):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), *make())

    return model, torch.optim.SGD(model.parameters(), rate), train


@case(None, "grokking: the sum of tokens modulo 4, which no single token tells anything of")
def sums_modulo_of_tokens(bug: bool) -> Built:
    def make() -> tuple[Tensor, Tensor]:
        x = torch.randint(4, (16, 6))
        return x, x.sum(1) % 4

    return _train_on_codes(
        make, nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 4))
    )


@case(None, "a parity of bits that are given as numbers")
def parity_of_bits(bug: bool) -> Built:
    def make() -> tuple[Tensor, Tensor]:
        x = torch.randint(2, (16, 16)) * 2.0 - 1
        return x, (x[:, :4].prod(1) > 0).long()

    return _train_on_codes(make, mlp(16, 32, 2))


@case(None, "the sign of a product of two numbers, of which neither tells anything by itself")
def sign_of_a_product(bug: bool) -> Built:
    def make() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 16)
        return x, (x[:, 0] * x[:, 1] > 0).long()

    return _train_on_codes(make, mlp(16, 32, 2))


@case(None, "two spirals, whose means and spreads are the same")
def two_spirals(bug: bool) -> Built:
    def make() -> tuple[Tensor, Tensor]:
        turns, y = torch.rand(16) * 3, torch.randint(2, (16,))
        angle = turns * 6.2832 + y * 3.1416
        return torch.stack([angle.cos(), angle.sin()], 1) * turns[:, None], y

    return _train_on_codes(make, mlp(2, 32, 2))
