"""Inspecting a graph recomputes nothing: values packed by a checkpoint stay packed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steadygrad import Guard, GuardConfig
from steadygrad.measure.saved import read_saved


class Block(nn.Module):
    """Explicit attention, with everything that graph checks read: a mask, divisors, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(16, 48), nn.BatchNorm1d(16)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        query, key, value = self.project(x).chunk(3, -1)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.mT / torch.full((), 4.0)).masked_fill(hidden, -1e9)
        mixed = scores.softmax(-1) @ value / (value.norm(dim=-1, keepdim=True) + 1e-6)
        return x + self.norm(mixed.mT).mT


class Tagger(nn.Module):
    """Checkpoints its blocks, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(20, 16), nn.ModuleList([Block(), Block()]), nn.Linear(16, 20)

    def compute_loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / torch.full((), 2.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def train(*, guarded: bool) -> tuple[list[int], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = Guard(model, optimizer, config=GuardConfig(clip=None)) if guarded else None
    for _ in range(4):
        ids = torch.randint(20, (8, 12))
        if guard is not None:
            guard.step(lambda ids: checkpoint(model.compute_loss, ids, use_reentrant=False), ids)
        else:
            optimizer.zero_grad()
            checkpoint(model.compute_loss, ids, use_reentrant=False).backward()
            optimizer.step()
    return [block.num_calls for block in model.blocks], model.state_dict()  # type: ignore[misc]


def test_only_backward_recomputes_a_checkpoint() -> None:
    (plain_calls, plain), (guarded_calls, guarded) = train(guarded=False), train(guarded=True)
    assert guarded_calls == plain_calls
    assert all(torch.equal(plain[name], value) for name, value in guarded.items()), "BatchNorm counts each forward"


def test_values_packed_by_no_hook_are_read() -> None:
    x, other = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    assert read_saved((x / other).grad_fn, "other") is other
    assert read_saved((x + other).grad_fn, "other") is None
    with torch.autograd.graph.save_on_cpu():
        assert read_saved((x / other).grad_fn, "other") is None
