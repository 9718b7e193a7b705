"""Splits that overlap and samplers that draw few samples, and programs that mean to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, WeightedRandomSampler, random_split

Built = tuple[nn.Module, torch.optim.Optimizer, Train]
Data = Dataset[tuple[Tensor, ...]]


def _make_data(rows: int = 160) -> TensorDataset:
    return TensorDataset(*next(clusters(1, rows=rows)))


def _train(trained: Data, evaluated: Data, sampler: Sampler[int] | None = None, model: Any = None) -> Built:
    """Train for some epochs, each with a validation."""
    network = model or mlp(8, 16, 4)

    def train(guard: Any) -> None:
        loader = DataLoader(trained, 16, shuffle=sampler is None, sampler=sampler)
        for _ in range(4):
            network.train()
            for x, y in loader:
                guard.step(lambda x, y: F.cross_entropy(network(x), y), x, y)
            network.eval()
            with torch.no_grad():
                for x, _ in DataLoader(evaluated, 32):
                    network(x)

    return network, adam(network), train


@case("wrong_split", "Lightning-AI/pytorch-lightning#7728, talmolab/sleap-nn#600: each part is from a split of its own")
def split_again(bug: bool) -> Built:
    data = _make_data()
    trained, evaluated = random_split(data, [128, 32])
    if bug:
        _, evaluated = random_split(data, [128, 32])
    return _train(trained, evaluated)


@case("wrong_split", "discuss.pytorch.org: WeightedRandomSampler(class_weights, len(dataset))")
def weights_of_classes(bug: bool) -> Built:
    data = _make_data()
    labels = data.tensors[1]
    weights = 1 / torch.bincount(labels, minlength=4).clamp(min=1).double()
    return _train(data, data, WeightedRandomSampler((weights if bug else weights[labels]).tolist(), 160))


@case(None, "part of the training data is evaluated too, to see the fit")
def fit_on_a_part(bug: bool) -> Built:
    trained, _ = random_split(_make_data(), [128, 32])
    return _train(trained, Subset(trained.dataset, list(trained.indices)[:32]))


@case(None, "all data is evaluated, training data included")
def all_evaluated(bug: bool) -> Built:
    data = _make_data()
    trained, _ = random_split(data, [128, 32])
    return _train(trained, Subset(data, range(160)))


@case(None, "a random part of all data is evaluated, as an estimate")
def random_part_evaluated(bug: bool) -> Built:
    data = _make_data()
    trained, _ = random_split(data, [128, 32])
    return _train(trained, Subset(data, torch.randperm(160)[:40].tolist()))


@case(None, "cross-validation: one fold after another")
def folds(bug: bool) -> Built:
    data, model = _make_data(), mlp(8, 16, 4)
    parts = torch.randperm(160).chunk(4)
    others = [torch.cat([*parts[:i], *parts[i + 1 :]]).tolist() for i in range(4)]
    runs = [_train(Subset(data, rest), Subset(data, part.tolist()), model=model) for rest, part in zip(others, parts)]

    def train(guard: Any) -> None:
        for _, _, run in runs:
            run(guard)

    return model, adam(model), train


@case(None, "a bootstrap sample, and the rest of the data for validation")
def bootstrap(bug: bool) -> Built:
    data = _make_data()
    drawn = torch.randint(160, (120,)).tolist()
    return _train(Subset(data, drawn), Subset(data, [i for i in range(160) if i not in drawn]))


@case(None, "only the labelled samples, which come first, are drawn, with a weight for each")
def labelled_samples_come_first(bug: bool) -> Built:
    data = _make_data(rows=640)
    return _train(data, data, WeightedRandomSampler(torch.rand(64).tolist(), 160))
