"""The output at one position is checked once, and training is not affected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad import Guard, GuardConfig
from steadygrad.measure import next_token


class Language(nn.Module):
    """A causal language model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out, self.drop = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Dropout(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.drop(self.embedding(tokens))[:, None]
        return self.out(F.scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0])


def train(*, guarded: bool) -> tuple[nn.Module, float]:
    """Return a trained model and the next random number."""
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = Guard(model, optimizer, config=GuardConfig(clip=None)) if guarded else None

    def compute_loss(tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])

    for _ in range(next_token.LATER + 3):
        tokens = torch.randint(16, (8, 12))
        if guard is not None:
            guard.step(compute_loss, tokens)
        else:
            optimizer.zero_grad()
            compute_loss(tokens).backward()
            optimizer.step()
    if guard is not None:
        guard.close()
        assert all(finding.severity.value == "info" for finding in guard.findings)
    return model, torch.rand(()).item()


def test_weights_and_random_numbers_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    differentiate = next_token._differentiate
    monkeypatch.setattr(next_token, "_differentiate", lambda *args: looked.append(args) or differentiate(*args))
    (plain, plain_next), (guarded, guarded_next) = train(guarded=False), train(guarded=True)

    assert len(looked) == 1
    assert plain_next == guarded_next
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), guarded.parameters(), strict=True))


class AcrossRows(Language):
    """Each place also sees the same place of the other rows, as in a model of aligned sequences."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)[:, None]
        h = F.scaled_dot_product_attention(h, h, h, is_causal=self.is_causal)[:, 0]
        by_place = h.transpose(0, 1)[:, None]  # [places, 1, rows, C]
        return self.out(F.scaled_dot_product_attention(by_place, by_place, by_place)[:, 0].transpose(0, 1))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("longer", [0, -1])
def test_rows_that_see_each_other_are_no_leak(longer: int, *, is_causal: bool) -> None:
    """Where one row ends a place later than the other, its output sees the next token of the other row, rightly."""
    torch.manual_seed(0)
    model = AcrossRows(is_causal=is_causal)

    def compute_loss(tokens: Tensor) -> Tensor:
        labels = tokens[:, 1:].clone()
        labels[-1 - longer, -2:] = -100
        labels[longer, -1:] = -100
        return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), labels)

    with Guard(model, torch.optim.SGD(model.parameters(), 0.1), config=GuardConfig(clip=None)) as guard:
        for _ in range(next_token.LATER + 3):
            guard.step(compute_loss, torch.randint(16, (4, 12)))
    assert any(finding.kind == "visible_labels" for finding in guard.findings) is not is_causal
