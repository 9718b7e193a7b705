"""The silent errors that TrainCheck (OSDI'25) reproduced and that need one process, rebuilt small, each with a twin.

Those with ranks are in rank_cases.py; benchmarks/silent.py has TrainCheck's names for them. Three of its errors leave
nothing to see in one training without a reference, and are not here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from program_case import Train, adam, case, clusters, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

Built = tuple[nn.Module, torch.optim.Optimizer, Train]


def _train(model: nn.Module, num: int = 20) -> Train:
    def train(guard: Any) -> None:
        for x, y in clusters(num):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return train


@case("stale_gradient", "stackoverflow.com/q/60335387: zero_grad() is missing")
def never_cleared(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    optimizer = adam(model)

    def train(guard: Any) -> None:
        for x, y in clusters(20):
            F.cross_entropy(model(x), y).backward()
            guard.step()
            if not bug:
                optimizer.zero_grad()

    return model, optimizer, train


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are drawn when they are read, from a generator that every worker gets a copy of."""

    def __init__(self, *, shared: bool) -> None:
        self.shared, self.generator = shared, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 640

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        worker = get_worker_info()
        if worker is not None and not self.shared:
            self.generator.manual_seed(worker.seed)
            self.shared = True
        x = torch.randn(8, generator=self.generator)
        return x, (x[0] > 0).long() + 2 * (x[1] > 0).long()


@case("repeated_batch", "stackoverflow.com/q/67180955: each worker draws the same random samples")
def workers_with_one_seed(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    loader = DataLoader(Drawn(shared=bug), batch_size=16, num_workers=2)

    def train(guard: Any) -> None:
        for x, y in loader:
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model), train


class Staged(nn.Module):
    """Freezes its first stage whenever it is set to train."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.frozen_stages = mlp(8, 16, 16), nn.Linear(16, 4), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).relu())

    def train(self, mode: bool = True) -> Staged:
        super().train(mode)
        if mode and self.frozen_stages:
            self.trunk.requires_grad_(False)
        return self


@case("not_frozen", "open-mmlab/mmpretrain#702: frozen stages are frozen by train(), which nobody calls")
def stages_not_frozen(bug: bool) -> Built:
    model = Staged()
    if not bug:
        model.train()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), _train(model)


@case("frozen_head", "discuss.pytorch.org/t/84911: only the norms are trained, the new head is frozen too")
def norms_alone_trained(bug: bool) -> Built:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )
    nn.init.normal_(model[5].weight, std=0.02)
    nn.init.zeros_(model[5].bias)
    model.requires_grad_(False)
    for layer in (model[1],) if bug else (model[1], model[5]):
        layer.requires_grad_(True)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), _train(model)


class Stopping(torch.optim.SGD):
    """Makes no more steps after one without gradients, as a compiled step did that had not guarded on them."""

    def __init__(self, parameters: Any, *, stops: bool) -> None:
        super().__init__(parameters, lr=0.05)
        self.stops, self.num_steps = stops, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        if not self.stops or self.num_steps < 50:
            super().step(closure)


@case("unchanged_parameter", "pytorch/pytorch#115607: the compiled optimizer makes no step any more")
def steps_no_more(bug: bool) -> Built:
    model = mlp(8, 16, 4)
    return model, Stopping(model.parameters(), stops=bug), _train(model, 420)


class ByHand(torch.autograd.Function):
    """A product that autocast does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.unsqueeze(1) * weight).sum(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.mm(weight), gradient.t().mm(x)


class Product(nn.Module):
    """A linear layer, by torch or by hand."""

    def __init__(self, size: int, width: int, *, by_hand: bool) -> None:
        super().__init__()
        self.weight, self.by_hand = nn.Parameter(torch.randn(width, size) / size**0.5), by_hand

    def forward(self, x: Tensor) -> Tensor:
        return ByHand.apply(x, self.weight) if self.by_hand else F.linear(x, self.weight)


@case("unheeded_autocast", "Lightning-AI/lightning-thunder#725: products of one's own escape autocast")
def products_that_escape_autocast(bug: bool) -> Built:
    model = nn.Sequential(Product(8, 32, by_hand=bug), nn.ReLU(), Product(32, 4, by_hand=bug))

    def train(guard: Any) -> None:
        for x, y in clusters(10):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)

    return model, adam(model), train


@case("eval_while_training", "pytorch/pytorch#51800: spectral norm is measured in train mode only")
def spectral_norm_in_eval(bug: bool) -> Built:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 32)), nn.ReLU(), nn.Linear(32, 4)).train(not bug)
    return model, adam(model), _train(model)


@case("dropout_in_evaluation", "huggingface/transformers#33844: F.dropout that does not ask for the mode")
def dropout_always_on(bug: bool) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.dropout(self.inner(x).relu(), 0.3, training=bug or self.training))

    model = Net()

    def train(guard: Any) -> None:
        for i, (x, y) in enumerate(clusters(24)):
            guard.step(lambda x, y: F.cross_entropy(model(x), y), x, y)
            if i % 8 == 7:
                model.eval()
                with torch.no_grad():
                    guard.validate(float(F.cross_entropy(model(x), y)))
                model.train()

    return model, adam(model), train


@case("single_row", "huggingface/transformers#34204: the processor joins the texts of all samples into one row")
def one_row_of_tokens(bug: bool) -> Built:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.image, self.out = nn.Embedding(20, 16), nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
            return self.out((self.words(tokens).mean(1) + self.image(x)).relu())

    model = Pairs()

    def train(guard: Any) -> None:
        for x, y in clusters(10):
            tokens = torch.randint(20, (1 if bug else 16, 12))
            guard.step(lambda tokens, x, y: F.cross_entropy(model(tokens, x), y), tokens, x, y)

    return model, adam(model), train


@case("zero_gradient", "adapters that are 0 on both sides: no gradient can leave them")
def adapters_of_zeros(bug: bool) -> Built:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.up = base.requires_grad_(False), nn.Parameter(torch.zeros(base.out_features, 2))
            self.down = nn.Parameter(torch.zeros(2, 8) if bug else torch.randn(2, 8) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    model = nn.Sequential(Adapted(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4).requires_grad_(False))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), _train(model, 30)


@case("lost_weights", "the trunk of a checkpoint has another prefix, its head has not")
def trunk_renamed(bug: bool) -> Built:
    state, model = mlp(8, 16, 16, 4).state_dict(), mlp(8, 16, 16, 4)
    renamed = {(f"encoder.{name}" if bug and name[0] != "4" else name): value for name, value in state.items()}
    model.load_state_dict(renamed, strict=False)
    return model, adam(model), _train(model)
