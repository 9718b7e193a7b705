"""The watch of attention layers: what it takes for padding, and that it leaves the model as it was."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad import Guard
from steadygrad.measure.padding_masks import scan_masks


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.out(self.attention(h, h, h, key_padding_mask=tokens == 0)[0].mean(1))


def make_tokens() -> Tensor:
    lengths = torch.arange(3, 9)[:, None]
    return torch.randint(1, 16, (6, 10)) * (torch.arange(10) < lengths)


def count_hooks(model: nn.Module) -> int:
    return sum(len(one._forward_pre_hooks) + len(one._forward_pre_hooks_with_kwargs) for one in model.modules())


def test_hooks_are_gone_after_each_step_and_copies_have_none() -> None:
    torch.manual_seed(0)
    model = Reader()
    guard = Guard(model, torch.optim.SGD(model.parameters(), 0.1))
    copies = []

    def compute_loss(tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens), tokens[:, 0] % 3)
        copies.append(copy.deepcopy(model.attention))
        torch.save(model.attention, stored := io.BytesIO())
        stored.seek(0)
        copies.append(torch.load(stored, weights_only=False))
        return loss

    for _ in range(5):
        guard.step(compute_loss, make_tokens())
        assert count_hooks(model.attention) == 0
    guard.close()

    assert len(copies) == 10
    assert [count_hooks(one) for one in copies] == [0] * 10


def count_swapped(tokens: Tensor, *masks: Tensor) -> int:
    pending = scan_masks([tokens], masks)
    return 0 if pending is None else pending.read(0).num_swapped_rows


def added(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, -torch.inf)


@pytest.mark.parametrize("form", [Tensor.clone, added, lambda mask: mask[:, None, None].expand(-1, 2, 10, -1)])
def test_masks_of_all_forms_are_read(form: object) -> None:
    torch.manual_seed(0)
    tokens = make_tokens()
    right, wrong = form(tokens == 0), form(tokens != 0)  # type: ignore[operator]

    assert count_swapped(tokens, wrong) == count_swapped(tokens, wrong, wrong) == 6
    assert count_swapped(tokens, right) == count_swapped(tokens, right, wrong) == 0


def test_an_end_that_equals_the_padding_may_be_hidden_too() -> None:
    torch.manual_seed(0)
    tokens = make_tokens()
    hidden = torch.arange(10) < torch.arange(4, 10)[:, None]  # one place more than the tokens

    assert count_swapped(tokens, hidden) == 6
    assert count_swapped(tokens, torch.arange(10) < torch.arange(5, 11)[:, None]) == 0


def test_a_mask_that_fits_two_texts_is_not_judged() -> None:
    torch.manual_seed(0)
    tokens = make_tokens()

    assert scan_masks([tokens, make_tokens()], [tokens != 0]) is None
    assert scan_masks([tokens, make_tokens()[:, :9]], [tokens != 0]) is not None
